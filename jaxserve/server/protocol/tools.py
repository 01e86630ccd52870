"""The functions that a model may call, and the JSON Schemas that hold it to calling them."""

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jaxserve.json_schema import check_depth, is_local, make_enforceable, subschemas
from jaxserve.server.protocol.shaping import encode_json

MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20
"""Of all tools of a request, as JSON."""

Name = Annotated[str, Field(min_length=1, max_length=256)]


class _ToolPart(BaseModel):
    """What else it holds is for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)


class Function(_ToolPart):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema; None: the function takes none."""
    strict: bool | None = None


class Tool(_ToolPart):
    type: Literal["function"] = "function"
    function: Function


class FunctionName(_ToolPart):
    name: Name


class NamedToolChoice(_ToolPart):
    type: Literal["function"] = "function"
    function: FunctionName


def _check_tools(tools: list[Tool]) -> list[Tool]:
    counts = Counter(tool.function.name for tool in tools)
    name, count = next(iter(counts.most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{count} functions are named {name!r}")
    try:
        num_bytes = len(encode_json([tool.model_dump(exclude_unset=True) for tool in tools]))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"nested too deeply, or not Unicode: {error}") from error
    if num_bytes > MAX_TOOLS_BYTES:
        raise ValueError(f"must be of at most {MAX_TOOLS_BYTES} bytes, got {num_bytes}")
    for function in (tool.function for tool in tools):
        schema = function.parameters or {}
        if schema.get("type", "object") != "object":
            raise ValueError(
                f"the parameters of function {function.name!r} must have the type 'object', "
                f"got {schema['type']!r:.80}"
            )
        if not isinstance(schema.get("properties", {}), dict):
            raise ValueError(
                f"the properties of function {function.name!r}'s parameters must be an object"
            )
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_check_tools)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def find_function(tools: Sequence[Tool], choice: NamedToolChoice) -> Function:
    """ValueError if `choice` is none of the tools."""
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool.function
    raise ValueError(f"no function of tools is named {choice.function.name!r}")


def arguments_schema(function: Function) -> dict[str, Any]:
    """The JSON Schema of a call's arguments, a copy. ValueError, naming the function, for what it
    must not hold."""
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    schema = {"type": "object", **function.parameters}
    try:
        check_depth(schema)
        schema = copy.deepcopy(schema)
        make_enforceable(schema)
    except ValueError as error:
        raise ValueError(f"function {function.name!r}: {error}") from error
    return schema


def calls_schema(tools: Sequence[Tool], max_calls: int | None) -> dict[str, Any]:
    """The JSON Schema of an array of at least one call of these functions. ValueError as above."""
    definitions, calls = {}, []
    for i, function in enumerate(tool.function for tool in tools):
        place = f"#/$defs/{i}"
        schema = arguments_schema(function)
        # It is no document of its own any more: references to it begin where it lies.
        schema.pop("$id", None)
        for part in subschemas(schema):
            if is_local(reference := part.get("$ref")):
                part["$ref"] = place + reference.removeprefix("#")
        definitions[str(i)] = schema
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if max_calls is not None:
        array["maxItems"] = max_calls
    return {**array, "$defs": definitions}

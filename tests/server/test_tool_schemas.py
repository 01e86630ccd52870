"""The JSON Schemas that hold an answer to calls, and the names of the parsers."""

import json
from typing import get_args

import pytest

from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.server.config import ReasoningParserName, ServerConfig, ToolCallParserName
from jaxserve.server.protocol.answer import AnswerFormat
from jaxserve.server.protocol.reasoning import REASONING_PARSERS
from jaxserve.server.protocol.requests import ChatCompletionRequest
from jaxserve.server.protocol.tool_parsers.registry import TOOL_PARSERS

TREE = {
    "type": "object",
    "properties": {
        "root": {"$ref": "#/$defs/Node"},
        "again": {"$ref": "#"},
        "text": {"const": 'says "$ref":"#"'},
        "value": {"enum": [{"$ref": "#/nowhere"}], "default": {"$ref": "#"}},
        "$ref": {"type": "string"},
    },
    "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/Node"}}}},
    "$id": "https://example.org/tree",
}
TOOLS = [
    {"type": "function", "function": {"name": "walk", "parameters": TREE}},
    {"type": "function", "function": {"name": "Größe", "parameters": {"properties": {}}}},
    {"type": "function", "function": {"name": "now"}},
]


def schema_of(tool_choice, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields
    request = ChatCompletionRequest(**body, tool_choice=tool_choice)
    params = request.to_params().structured_outputs
    return None if params is None else json.loads(params.json)


def named(name):
    return {"type": "function", "function": {"name": name}}


def find(schema, reference):
    assert reference.startswith("#")
    for part in reference.removeprefix("#").split("/")[1:]:
        schema = schema[part]
    return schema


def test_required():
    schema = schema_of("required")
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    parameters = {}
    for call in schema["items"]["anyOf"]:
        assert list(call["properties"]) == call["required"] == ["name", "parameters"]
        assert call["additionalProperties"] is False
        name = call["properties"]["name"]["const"]
        parameters[name] = find(schema, call["properties"]["parameters"]["$ref"])
    assert list(parameters) == ["walk", "Größe", "now"]
    # References still lead where they led.
    walk = parameters["walk"]
    assert walk["type"] == "object"
    assert find(schema, walk["properties"]["again"]["$ref"]) is walk
    node = find(schema, walk["properties"]["root"]["$ref"])
    assert find(schema, node["properties"]["next"]["$ref"]) is node
    for name in ("text", "value", "$ref"):
        assert walk["properties"][name] == TREE["properties"][name]
    assert parameters["Größe"] == {"type": "object", "properties": {}}
    assert parameters["now"] == {"type": "object", "additionalProperties": False}
    assert schema_of("required", parallel_tool_calls=False)["maxItems"] == 1


def test_references_of_names_and_what_stands_for_them():
    """Names are looked up, and each of them is given values of its own, before references move."""
    parameters = {
        "type": "object",
        "properties": {
            "sizes": {
                "propertyNames": {"$ref": "#/$defs/Colour"},
                "additionalProperties": {"$ref": "#/$defs/Size"},
            }
        },
        "$defs": {"Colour": {"enum": ["red", "blue"]}, "Size": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    schema = schema_of("required", tools=tools)
    sizes = schema["$defs"]["0"]["properties"]["sizes"]
    assert list(sizes["properties"]) == ["red", "blue"]
    for size in sizes["properties"].values():
        assert find(schema, size["$ref"]) == {"type": "integer"}


def test_named():
    assert schema_of(named("walk")) == TREE
    assert schema_of(named("now")) == {"type": "object", "additionalProperties": False}


class PlainTokenizer:
    def is_special(self, text):
        return False


def test_thoughts_come_before_json():
    """The grammar begins after them, if the answer begins with them."""

    def prepared(prompt, **fields):
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        request = ChatCompletionRequest(**body)
        answers = AnswerFormat(PlainTokenizer(), None, "qwen3")
        params, _ = answers.prepare(request, request.to_params(), prompt)
        return params.structured_outputs

    required = {"tools": TOOLS, "tool_choice": "required"}
    for prompt, after in (("<think>", "</think>"), ("<think>\n\n</think>\n", None)):
        constraint = prepared(prompt, **required)
        assert json.loads(constraint.json)["type"] == "array"
        assert constraint.after == after
    for fields in ({"json_object": True}, {"json": '{"type":"object"}'}):
        fields["whitespace_pattern"] = " ?"
        expected = StructuredOutputsParams(**fields, after="</think>")
        assert prepared("", structured_outputs=fields) == expected
    assert prepared("", structured_outputs={"regex": "a"}).regex == "a"
    assert prepared("") is None


@pytest.mark.parametrize("tool_choice", [None, "none", "auto"])
def test_free(tool_choice):
    assert schema_of(tool_choice) is None


def test_names_of_parsers():
    assert set(get_args(ToolCallParserName)) == set(TOOL_PARSERS)
    assert set(get_args(ReasoningParserName)) == set(REASONING_PARSERS)
    with pytest.raises(ValueError, match="tool_call_parser must be hermes or llama3_json"):
        ServerConfig(tool_call_parser="pythonic")
    with pytest.raises(ValueError, match="reasoning_parser must be deepseek_r1 or qwen3"):
        ServerConfig(reasoning_parser="r1")
    with pytest.raises(ValueError, match="enable_auto_tool_choice needs a tool_call_parser"):
        ServerConfig(enable_auto_tool_choice=True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"$ref": "#"}, "its reference '#' leads to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "reference '#/.defs/b' leads to no schema"),
        ({"properties": {"a": {"fooBar": 1}}}, "its keyword 'fooBar' is not supported"),
        ({"properties": {"a": json.loads('{"items":' * 99 + "{}" + "}" * 99)}}, "64 levels"),
        ({"properties": {"a": json.loads('{"items":' * 999 + "{}" + "}" * 999)}}, "64 levels"),
    ],
)
@pytest.mark.parametrize("choice", ["required", named("f")])
def test_parameters_that_make_no_grammar(parameters, message, choice):
    """They are refused in the function's own terms."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    request = ChatCompletionRequest(**body, tool_choice=choice)
    with pytest.raises(ValueError, match=f"tools make no grammar: function 'f': .*{message}"):
        request.to_params()
    assert ChatCompletionRequest(**body, tool_choice="auto").to_params() is not None

"""What an answer's text must be: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from jaxserve.sampling_params import MAX_GRAMMAR_BYTES, StructuredOutputsParams

Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class JsonSchema(_Part):
    """`name`, `description` and `strict` are the client's own: the schema holds in any case."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the type json_schema needs json_schema")
        return self

    def to_params(self) -> StructuredOutputsParams | None:
        """None: any text. ValueError for what cannot be."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.json_schema.schema_)


class StructuredOutputs(_Part):
    """Without any field that says something the text is free."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"enum": [None, False]}})

    json_: Annotated[Text | dict[str, Any] | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1), FailFast()] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name, value in data.items():
                if name not in known and value is not None and value is not False:
                    raise ValueError(f"{name!r:.80} is not one of {', '.join(known)}")
        return data

    def to_params(self) -> StructuredOutputsParams | None:
        """None: any text. ValueError for what cannot be."""
        fields = self.model_dump(by_alias=True, exclude_defaults=True)
        return StructuredOutputsParams(**fields) if fields else None


def structured_outputs(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What a request's two fields ask for; ValueError, beginning with a field's name."""
    named = {"response_format": response_format, "structured_outputs": structured}
    found = []
    for name, value in named.items():
        try:
            found.append(None if value is None else value.to_params())
        except ValueError as error:
            raise ValueError(f"{name} is wrong: {error}") from error
    if all(found):
        raise ValueError("response_format and structured_outputs exclude each other")
    return found[0] or found[1]

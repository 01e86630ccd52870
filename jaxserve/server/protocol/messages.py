"""Messages of a conversation, and how a chat template sees them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

Id = Annotated[str, Field(min_length=1, max_length=256)]


class _Part(BaseModel):
    """What else it holds is for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextPart(_Part):
    type: Literal["text"]
    text: str


class CalledFunction(_Part):
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    """JSON, if the model wrote JSON."""


class MessageToolCall(_Part):
    id: Id
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FailFast()] | None = None
    tool_calls: Annotated[list[MessageToolCall], FailFast()] | None = None
    tool_call_id: Id | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @model_validator(mode="after")
    def _check_tool(self) -> "Message":
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id that it answers")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only an assistant's message has tool_calls, not a {self.role}'s")
        return self


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for a chat template, which knows a developer as "system" and wants the arguments
    of calls as objects."""
    return [_for_template(message) for message in messages]


def _for_template(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    if message.role == "developer":
        fields["role"] = "system"
    calls = fields.pop("tool_calls", None)
    if calls:
        for call in calls:
            call["function"]["arguments"] = _object(call["function"]["arguments"])
        fields["tool_calls"] = calls
    return fields


def _object(arguments: str) -> str | dict[str, Any]:
    """What a model wrote as arguments; as it is, if that was not an object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments

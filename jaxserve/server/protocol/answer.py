"""An answer's text as an assistant's message: reasoning, content and calls."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams
from jaxserve.server.protocol.reasoning import (
    REASONING_PARSERS,
    THINK_TAGS,
    ThinkParser,
    after_thoughts,
    goes_on_thinking,
)
from jaxserve.server.protocol.requests import ChatCompletionRequest
from jaxserve.server.protocol.text_parser import CallArguments, CallStart, Content, Piece, Reasoning
from jaxserve.server.protocol.tool_parsers.constrained import NamedCallParser, RequiredCallsParser
from jaxserve.server.protocol.tool_parsers.json_calls import ToolParser
from jaxserve.server.protocol.tool_parsers.registry import TOOL_PARSERS
from jaxserve.server.protocol.tools import NamedToolChoice
from jaxserve.text.tokenizer import Tokenizer


class AnswerFormat:
    """How the model writes its answers, by the names of parsers; None: as plain text."""

    def __init__(
        self, tokenizer: Tokenizer, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser and TOOL_PARSERS[tool_call_parser]
        self._begins_thinking = reasoning_parser and REASONING_PARSERS[reasoning_parser]

    def prepare(
        self, request: ChatCompletionRequest, params: SamplingParams, prompt: str
    ) -> tuple[SamplingParams, Callable[[], "Answer"]]:
        """How to sample answers to a request whose rendered prompt is `prompt`, so that they can be
        parsed; and what makes a new answer."""
        thinks = self._thinks(request, params.structured_outputs, prompt)
        if thinks and params.structured_outputs is not None:
            constraint = after_thoughts(params.structured_outputs)
            params = replace(params, structured_outputs=constraint)
        make_tool_parser = self._tool_parser(request)
        tags = () if thinks is None else THINK_TAGS
        if request.parses_tools and self._tool_call_parser is not None:
            tags += self._tool_call_parser.tags
        if any(map(self._tokenizer.is_special, tags)):
            params = replace(params, skip_special_tokens=False)

        def new_answer() -> Answer:
            return Answer(
                None if thinks is None else ThinkParser(thinks),
                make_tool_parser and make_tool_parser(),
                shows_reasoning=request.include_reasoning,
                max_calls=request.max_calls,
            )

        return params, new_answer

    def _thinks(
        self,
        request: ChatCompletionRequest,
        constraint: StructuredOutputsParams | None,
        prompt: str,
    ) -> bool | None:
        """Whether answers begin with reasoning; None: they have no room for it."""
        if self._begins_thinking is None:
            return None
        if constraint is not None and constraint.json is None and not constraint.json_object:
            return None
        if request.continue_final_message:
            return goes_on_thinking(request.messages[-1].text)
        return self._begins_thinking(prompt, request.template_variables)

    def _tool_parser(self, request: ChatCompletionRequest) -> Callable[[], ToolParser] | None:
        if request.tool_choice == "required":
            return RequiredCallsParser
        if isinstance(request.tool_choice, NamedToolChoice):
            return partial(NamedCallParser, request.tool_choice.function.name)
        return self._tool_call_parser if request.parses_tools else None


class Answer:
    """Makes an answer's message, in parts (OpenAI's deltas) or whole."""

    def __init__(
        self,
        think_parser: ThinkParser | None,
        tool_parser: ToolParser | None,
        *,
        shows_reasoning: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self._think_parser = think_parser
        self._tool_parser = tool_parser
        self._shows_reasoning = shows_reasoning
        self._max_calls = max_calls
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    @property
    def hides_text(self) -> bool:
        """Reasoning is left out, and with it whatever would tell of its tokens."""
        return self._think_parser is not None and not self._shows_reasoning

    def delta(self, text: str, finished: bool) -> dict[str, Any]:
        """What the answer's next text adds to the message. `finished`: there is no more."""
        delta: dict[str, Any] = {}
        for piece in self._pieces(text, finished):
            if isinstance(piece, Content):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, Reasoning):
                if self._shows_reasoning:
                    # The first is vLLM's name, the second its former one, and DeepSeek's.
                    for name in ("reasoning", "reasoning_content"):
                        delta[name] = delta.get(name, "") + piece.text
            else:
                self._add_call(delta, piece)
        return delta

    def message(self, text: str) -> dict[str, Any]:
        """The message whose whole text is `text`."""
        delta = self.delta(text, finished=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        content = delta.pop("content", None if delta else "")
        return {"role": "assistant", "content": content, **delta}

    def _pieces(self, text: str, finished: bool) -> list[Piece]:
        pieces: list[Piece] = [Content(text)] if text else []
        if self._think_parser is not None:
            pieces = self._think_parser.feed(text, finished)
        if self._tool_parser is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                found += self._tool_parser.feed(piece.text, finished=False)
            else:
                found.append(piece)
        if finished:
            found += self._tool_parser.feed("", finished=True)
        return found

    def _add_call(self, delta: dict[str, Any], piece: CallStart | CallArguments) -> None:
        if isinstance(piece, CallStart):
            self._num_calls += 1
        if self._max_calls is not None and self._num_calls > self._max_calls:
            return
        index = self._num_calls - 1
        calls = delta.setdefault("tool_calls", [])
        if isinstance(piece, CallStart):
            calls.append(
                {
                    "index": index,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            )
            return
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.text

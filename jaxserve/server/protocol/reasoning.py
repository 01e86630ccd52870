"""What a model thinks before it answers: `<think>…</think>`, and then the answer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxserve.sampling_params import StructuredOutputsParams
from jaxserve.server.protocol.text_parser import Content, Reading, Reasoning, TextParser
from jaxserve.server.protocol.tool_parsers.json_calls import SPACE

_BEGIN, _END = "<think>", "</think>"
THINK_TAGS = (_BEGIN, _END)


class ThinkParser(TextParser):
    """Parts an answer into reasoning and content. `is_thinking`: it begins with reasoning even if
    it does not say so, as it does where the prompt has the opening tag."""

    def __init__(self, is_thinking: bool) -> None:
        self._is_thinking = is_thinking
        super().__init__()

    def _read(self) -> Reading[None]:
        self._mark = 0
        yield from self._skip(SPACE)
        if (yield from self._take(_BEGIN)):
            self._is_thinking = True
            self._mark = None
        else:
            self._rewind()
        if self._is_thinking:
            yield from self._take_up_to(_END, Reasoning)
            self._mark = None
        yield from self._take_rest(Content)


def deepseek_r1(prompt: str, variables: Mapping[str, Any]) -> bool:
    """The model always thinks, unless the prompt has done that for it."""
    return not prompt.rstrip().endswith(_END)


def qwen3(prompt: str, variables: Mapping[str, Any]) -> bool:
    """The same, with a switch."""
    return variables.get("enable_thinking") is not False and deepseek_r1(prompt, variables)


REASONING_PARSERS: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "deepseek_r1": deepseek_r1,
    "qwen3": qwen3,
}
"""By the names that `--reasoning-parser` takes: whether an answer begins with reasoning, from the
prompt and the chat template's variables."""


def after_thoughts(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same constraint to JSON, for what comes after the reasoning."""
    return replace(constraint, after=_END)


def goes_on_thinking(begun: str) -> bool:
    """Whether an answer that a client has begun is still in its reasoning."""
    return _BEGIN in begun and _END not in begun

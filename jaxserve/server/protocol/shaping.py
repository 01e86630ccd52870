"""What completions and chat answers have in common: the outputs of the engine as OpenAI's JSON.

Chunks of a stream are made for every token, so they are plain dicts, encoded once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from jaxserve.outputs import Logprob, OutputDelta
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.responses import Usage
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.server.protocol.requests import ChatCompletionRequest, CompletionRequest

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""
DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt on its way to the engine."""

    token_ids: list[int]
    text: str | None = None
    """None if token ids came in."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    model: str
    created: int
    """Unix time in seconds."""


def event(body: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode_json(body) + b"\n\n"


def merge_deltas(deltas: Sequence[OutputDelta]) -> Sequence[OutputDelta]:
    """At most one delta for each sequence, in the order of their first ones."""
    if len(deltas) == 1:
        return deltas
    groups: dict[tuple[str, int], list[OutputDelta]] = {}
    for delta in deltas:
        groups.setdefault((delta.request_id, delta.index), []).append(delta)
    return [group[0] if len(group) == 1 else _join(group) for group in groups.values()]


def _join(deltas: Sequence[OutputDelta]) -> OutputDelta:
    last = deltas[-1]
    return OutputDelta(
        request_id=last.request_id,
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        metrics=last.metrics,
        num_cached_tokens=last.num_cached_tokens,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """What one HTTP request asks of the engine. `request_ids` are the engine's, one a prompt; each
    has `params.n` sequences."""

    request_ids: Sequence[str]
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams


class Shaper[R: CompletionRequest | ChatCompletionRequest](ABC):
    """One HTTP request's answer, streamed or whole."""

    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(self, request: R, batch: Batch, head: Head, tokenizer: Tokenizer) -> None:
        self.head = head
        self.batch = batch
        self._request = request
        self._tokenizer = tokenizer
        self._n = batch.params.n
        self._prompt_index = {request_id: i for i, request_id in enumerate(batch.request_ids)}
        self._num_cached_tokens = [0] * len(batch.prompts)
        self._num_output_tokens = [0] * len(batch.prompts) * self._n

    @abstractmethod
    def choices(self, delta: OutputDelta, prompt_index: int) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that tell what `delta` adds."""

    @abstractmethod
    def whole_choice(self, delta: OutputDelta, prompt_index: int) -> dict[str, Any]:
        """The choice of a whole answer; `delta` is all of its output."""

    def place(self, delta: OutputDelta, prompt_index: int) -> int:
        """The choice's index in the answer."""
        return prompt_index * self._n + delta.index

    def chunks(self, deltas: Sequence[OutputDelta]) -> bytes:
        """The events that tell what `deltas` add; none if there is nothing to show yet."""
        events = []
        for delta in merge_deltas(deltas):
            prompt_index = self._count(delta)
            for choice in self.choices(delta, prompt_index):
                body = {
                    "id": self.head.id,
                    "object": self.chunk_object,
                    "created": self.head.created,
                    "model": self.head.model,
                    "choices": [choice],
                }
                if self._request.include_usage:
                    is_due = self._request.continuous_usage
                    body["usage"] = self._choice_usage(delta) if is_due else None
                events.append(event(body))
        return b"".join(events)

    def end(self) -> bytes:
        """The last events of a stream."""
        if not self._request.include_usage:
            return DONE
        body = {
            "id": self.head.id,
            "object": self.chunk_object,
            "created": self.head.created,
            "model": self.head.model,
            "choices": [],
            "usage": self.usage(),
        }
        return event(body) + DONE

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        """The answer from all deltas of its request."""
        merged = {self.place(d, self._count(d)): d for d in merge_deltas(deltas)}
        choices = [self.whole_choice(merged[place], place // self._n) for place in sorted(merged)]
        return {
            "id": self.head.id,
            "object": self.whole_object,
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
            "usage": self.usage(),
        }

    def usage(self) -> Usage:
        num_prompt = sum(len(prompt.token_ids) for prompt in self.batch.prompts)
        num_output = sum(self._num_output_tokens)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)},
        }

    def _choice_usage(self, delta: OutputDelta) -> Usage:
        prompt_index = self._prompt_index[delta.request_id]
        num_prompt = len(self.batch.prompts[prompt_index].token_ids)
        num_output = self._num_output_tokens[self.place(delta, prompt_index)]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def _count(self, delta: OutputDelta) -> int:
        prompt_index = self._prompt_index[delta.request_id]
        self._num_output_tokens[self.place(delta, prompt_index)] += self._num_shown(delta)
        if delta.index == 0 and delta.num_cached_tokens:
            self._num_cached_tokens[prompt_index] = delta.num_cached_tokens
        return prompt_index

    def _num_shown(self, delta: OutputDelta) -> int:
        return len(delta.token_ids)


def prompt_logprobs_json(
    positions: Sequence[dict[int, Logprob] | None],
) -> list[dict[str, Any] | None]:
    """vLLM's shape of `prompt_logprobs`."""
    return [
        candidates
        and {
            str(token): {
                "logprob": max(candidate.logprob, LEAST_LOGPROB),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token, candidate in candidates.items()
        }
        for candidates in positions
    ]

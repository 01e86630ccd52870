"""What a request gives back; names follow vLLM's."""

from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position: natural log of its raw probability (before any sampling
    parameter), its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One mapping of token id to Logprob for each output token, if asked for."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string, or the stop token id (unless it was the end-of-sequence id); with "error",
    what went wrong."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Monotonic times in seconds; None until the event has happened."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far; `finished` once all of them are."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry for each prompt token (None for the first), if asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied (to the first answer, if n > 1)."""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    def apply(self, delta: "OutputDelta") -> None:
        """Grow by what one step has added."""
        if delta.prompt_logprobs:
            self.prompt_logprobs = (self.prompt_logprobs or []) + list(delta.prompt_logprobs)
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            output.logprobs = output.logprobs or []
            output.logprobs.extend(delta.logprobs)
            chosen = (
                candidates[token_id].logprob
                for token_id, candidates in zip(delta.token_ids, delta.logprobs, strict=True)
            )
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(chosen)
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        if delta.metrics is not None:
            self.metrics = delta.metrics
        if delta.index == 0:
            self.num_cached_tokens = delta.num_cached_tokens


class OutputDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step adds to one of a request's answers.

    A struct: each running request has one made in each step, and sent to the server's process.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] = ()
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    """With the last delta of an answer."""
    num_cached_tokens: int = 0

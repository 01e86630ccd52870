"""What the engine keeps of a running request: sampling, text, log-probabilities.

The scheduler's Request has only what it decides on; the rest lives here.
"""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from llguidance import LLMatcher

from jaxserve.outputs import Logprob, OutputDelta, RequestMetrics, RequestOutput
from jaxserve.sampling import TokenLogprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer
from scheduler import FinishReason, Request, TokenEvent


class Feature(Enum):
    """What the host does for a request beside its tokens."""

    GRAMMAR = auto()
    """A token mask before every token."""
    LOGPROBS = auto()
    """Scores to read after every token."""
    PROMPT_LOGPROBS = auto()
    """Scores to read after a chunk of the prompt."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One sequence: a request with n = 3 has three of these."""

    request: Request
    """The scheduler's side; its token lists are shared, never copied."""
    parent_id: str
    index: int
    params: SamplingParams
    seed: int
    """64 bits; the key of output token i is this folded with i."""
    has_bias: bool
    bad_word_token_ids: list[list[int]]
    """Several-token bad words; single tokens are in the slot's bias."""
    metrics: RequestMetrics
    tokenizer: Tokenizer | None
    detokenizer: IncrementalDetokenizer | None
    eos_token_ids: frozenset[int]
    matcher: LLMatcher | None = None
    """Where the output stands in its grammar, if it has one; one token behind the newest."""
    num_prompt_logprobs: int = 0
    """Prompt positions already reported; a preempted request computes them again."""

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def features(self) -> list[Feature]:
        """What the host does for this request in some steps, and for most requests in none."""
        asked = {
            Feature.GRAMMAR: self.matcher,
            Feature.LOGPROBS: self.params.logprobs,
            Feature.PROMPT_LOGPROBS: self.params.prompt_logprobs,
        }
        return [feature for feature, value in asked.items() if value is not None]

    def advance(
        self, event: TokenEvent, logprobs: dict[int, Logprob] | None, now: float
    ) -> OutputDelta:
        """Take the tokens that were on the host at `now`; the finish reason becomes "stop" if one
        ends a stop string, and those after it are dropped."""
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = now
        _, token_ids, finish, stop_token_id = event
        stop_reason: int | str | None = None
        if stop_token_id is not None and stop_token_id not in self.eos_token_ids:
            stop_reason = stop_token_id
        text = ""
        if self.detokenizer is not None:
            hidden = stop_token_id is not None and not self.params.include_stop_str_in_output
            shown = token_ids[:-1] if hidden else token_ids
            num_before = self.detokenizer.num_tokens
            text = self.detokenizer.push(shown, finished=finish is not None)
            if self.detokenizer.stop_string is not None:
                token_ids = token_ids[: self.detokenizer.num_tokens - num_before]
                finish = FinishReason.STOP
                stop_reason = self.detokenizer.stop_string
        if finish is not None:
            self.metrics.finished_s = now
        asked = self.params.prompt_logprobs is not None and self.index == 0
        unscored = asked and self.num_prompt_logprobs == 0
        if unscored:
            # A prompt of one token: no step has had anything to score.
            self.num_prompt_logprobs = 1
        return OutputDelta(
            request_id=self.parent_id,
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=(None,) if unscored else (),
            finish_reason=None if finish is None else finish.value,
            stop_reason=stop_reason,
            metrics=None if finish is None else self.metrics,
            num_cached_tokens=self.request.num_cached_tokens,
        )

    def dropped(self, reason: FinishReason, stop_reason: str | None) -> OutputDelta:
        """The last word of a request that ends early; text held back so far is flushed."""
        self.metrics.finished_s = time.monotonic()
        text = "" if self.detokenizer is None else self.detokenizer.push([], finished=True)
        return OutputDelta(
            request_id=self.parent_id,
            index=self.index,
            text=text,
            finish_reason=reason.value,
            stop_reason=stop_reason,
            metrics=self.metrics,
            num_cached_tokens=self.request.num_cached_tokens,
        )

    def logprobs_at(
        self, logprobs: TokenLogprobs, position: int, token_id: int, num_candidates: int
    ) -> dict[int, Logprob]:
        """The token's own log-probability and the most likely candidates', by token id.

        `logprobs` holds NumPy arrays; `position` is the one to read.
        """
        entries = {
            token_id: (float(logprobs.logprobs[position]), int(logprobs.ranks[position])),
        }
        for rank in range(num_candidates):
            candidate = int(logprobs.top_token_ids[position, rank])
            logprob = float(logprobs.top_logprobs[position, rank])
            entries.setdefault(candidate, (logprob, rank + 1))
        return {
            token: Logprob(logprob, rank, self._token_text(token))
            for token, (logprob, rank) in entries.items()
        }

    def _token_text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def prompt_logprobs_of(
        self, logprobs: TokenLogprobs, start: int, first_index: int, num_tokens: int
    ) -> OutputDelta | None:
        """The prompt log-probabilities of one chunk that have not been reported yet.

        The chunk holds positions start .. start + num_tokens - 1, the first of them at
        `first_index` of `logprobs`; position p tells about prompt token p + 1.
        """
        if self.params.prompt_logprobs is None or self.index != 0:
            return None
        prompt = self.prompt_token_ids
        entries: list[dict[int, Logprob] | None] = []
        if self.num_prompt_logprobs == 0:
            entries.append(None)
        first = max(start + 1, self.num_prompt_logprobs)
        for target in range(first, min(start + num_tokens, len(prompt) - 1) + 1):
            position = first_index + target - 1 - start
            entries.append(
                self.logprobs_at(logprobs, position, prompt[target], self.params.prompt_logprobs)
            )
        if not entries:
            return None
        self.num_prompt_logprobs += len(entries)
        return OutputDelta(self.parent_id, self.index, prompt_logprobs=tuple(entries))


@dataclass(slots=True)
class Submission:
    """A checked request, ready for the engine: the output it will grow and its n sequences."""

    output: RequestOutput
    states: list[RequestState] = field(default_factory=list)

"""Answers of /v1/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.outputs import Logprob, OutputDelta
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.requests import CompletionRequest
from jaxserve.server.protocol.responses import CompletionLogprobs
from jaxserve.server.protocol.shaping import (
    LEAST_LOGPROB,
    Batch,
    Head,
    Shaper,
    prompt_logprobs_json,
)
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.tokenizer import Tokenizer


class CompletionShaper(Shaper[CompletionRequest]):
    chunk_object = whole_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, batch: Batch, head: Head, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, batch, head, tokenizer)
        self._echo_is_due = [bool(request.echo)] * len(batch.prompts) * self._n
        self._offsets: dict[int, TextOffsets] = {}
        # An echo with log-probabilities waits until the engine has told those of the whole prompt.
        self._waits = bool(request.echo and request.logprobs is not None)
        self._waiting: list[list[OutputDelta]] = [[] for _ in batch.prompts]
        self._prompt_logprobs: list[list[dict[int, Logprob] | None]] = [[] for _ in batch.prompts]

    def choices(self, delta: OutputDelta, prompt_index: int) -> Iterator[dict[str, Any]]:
        for ready in self._ready(delta, prompt_index):
            choice = self._choice(ready, prompt_index)
            if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                yield choice

    def whole_choice(self, delta: OutputDelta, prompt_index: int) -> dict[str, Any]:
        self._prompt_logprobs[prompt_index] += delta.prompt_logprobs
        choice = self._choice(delta, prompt_index)
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(self._prompt_logprobs[prompt_index])
        return choice

    def _ready(self, delta: OutputDelta, prompt_index: int) -> Sequence[OutputDelta]:
        """The deltas that may be shown now that `delta` is here."""
        if not self._waits:
            return [delta]
        known = self._prompt_logprobs[prompt_index]
        known += delta.prompt_logprobs
        waiting = self._waiting[prompt_index]
        waiting.append(delta)
        if len(known) < len(self.batch.prompts[prompt_index].token_ids) and not delta.finish_reason:
            return []
        self._waiting[prompt_index] = []
        return waiting

    def _choice(self, delta: OutputDelta, prompt_index: int) -> dict[str, Any]:
        place = self.place(delta, prompt_index)
        text, token_ids, entries = delta.text, list(delta.token_ids), list(delta.logprobs)
        if self._request.drops_output:
            text, token_ids, entries = "", [], []
        if self._echo_is_due[place]:
            self._echo_is_due[place] = False
            text = self._prompt_text(prompt_index) + text
            if self._waits:
                known = self._prompt_logprobs[prompt_index]
                token_ids = self.batch.prompts[prompt_index].token_ids[: len(known)] + token_ids
                entries = known + entries
        return {
            "index": place,
            "text": text,
            "logprobs": self._logprobs(place, prompt_index, token_ids, entries),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _num_shown(self, delta: OutputDelta) -> int:
        return 0 if self._request.drops_output else len(delta.token_ids)

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self.batch.prompts[prompt_index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, self.batch.params.skip_special_tokens)

    def _logprobs(
        self,
        place: int,
        prompt_index: int,
        token_ids: Sequence[int],
        entries: Sequence[dict[int, Logprob] | None],
    ) -> CompletionLogprobs | None:
        if not token_ids or self._request.logprobs is None:
            return None
        if place not in self._offsets:
            before = [] if self._request.echo else self.batch.prompts[prompt_index].token_ids
            self._offsets[place] = TextOffsets(
                self._tokenizer, before, self.batch.params.skip_special_tokens
            )
        return {
            "tokens": [self._tokenizer.token_text(token) for token in token_ids],
            "token_logprobs": [
                entry and max(entry[token].logprob, LEAST_LOGPROB)
                for token, entry in zip(token_ids, entries, strict=True)
            ],
            "top_logprobs": [entry and self._candidates(entry) for entry in entries],
            "text_offset": self._offsets[place].next(token_ids),
        }

    def _candidates(self, entry: dict[int, Logprob]) -> dict[str, float]:
        # Tokens may have the same text (pieces of characters); the likeliest speaks for them.
        candidates: dict[str, float] = {}
        for candidate in sorted(entry.values(), key=lambda c: c.rank):
            logprob = max(candidate.logprob, LEAST_LOGPROB)
            candidates.setdefault(candidate.decoded_token or "", logprob)
        return candidates


class TextOffsets:
    """Where in an answer's text each of its tokens begins.

    `before` are the tokens in front of the answer. A character in pieces belongs to its last token.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], skip_special_tokens: bool
    ) -> None:
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, params)
        self._offset = 0

    def next(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the answer's next tokens."""
        offsets = []
        for token in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token], finished=False))
        return offsets

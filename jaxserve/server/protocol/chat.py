"""Answers of /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.outputs import Logprob, OutputDelta
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.requests import ChatCompletionRequest
from jaxserve.server.protocol.responses import ChatLogprobs, ContentLogprob, TokenLogprob
from jaxserve.server.protocol.shaping import (
    LEAST_LOGPROB,
    EncodedPrompt,
    Head,
    Shaper,
    prompt_logprobs_json,
)
from jaxserve.text.tokenizer import Tokenizer


class ChatShaper(Shaper):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        request: ChatCompletionRequest,
        params: SamplingParams,
        head: Head,
        request_ids: Sequence[str],
        prompts: Sequence[EncodedPrompt],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(
            head,
            request_ids,
            prompts,
            params.n,
            tokenizer,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
        )
        self._request = request
        self._role_is_due = [True] * params.n

    def choices(self, delta: OutputDelta, prompt_index: int) -> Iterator[dict[str, Any]]:
        if self._role_is_due[delta.index]:
            self._role_is_due[delta.index] = False
            yield {
                "index": delta.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        logprobs = self._logprobs(delta)
        if delta.text or logprobs or delta.finish_reason:
            yield {
                "index": delta.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }

    def whole_choice(self, delta: OutputDelta, prompt_index: int) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        answer = super().whole(deltas)
        if self._request.prompt_logprobs is not None:
            positions = [entry for delta in deltas for entry in delta.prompt_logprobs]
            answer["prompt_logprobs"] = prompt_logprobs_json(positions)
        return answer

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        if not self._request.logprobs or not delta.token_ids:
            return None
        return {
            "content": [
                self._content_logprob(token, entry)
                for token, entry in zip(delta.token_ids, delta.logprobs, strict=True)
            ]
        }

    def _content_logprob(self, token_id: int, entry: dict[int, Logprob]) -> ContentLogprob:
        likeliest = sorted(entry, key=lambda token: entry[token].rank)
        top = likeliest[: self._request.top_logprobs or 0]
        return {
            **self._token_logprob(token_id, entry[token_id]),
            "top_logprobs": [self._token_logprob(token, entry[token]) for token in top],
        }

    def _token_logprob(self, token_id: int, candidate: Logprob) -> TokenLogprob:
        return {
            "token": candidate.decoded_token or "",
            "logprob": max(candidate.logprob, LEAST_LOGPROB),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }

"""Answers of /v1/chat/completions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.outputs import Logprob, OutputDelta
from jaxserve.server.protocol.answer import Answer
from jaxserve.server.protocol.requests import ChatCompletionRequest
from jaxserve.server.protocol.responses import ChatLogprobs, ContentLogprob, TokenLogprob
from jaxserve.server.protocol.shaping import (
    LEAST_LOGPROB,
    Batch,
    Head,
    Shaper,
    prompt_logprobs_json,
)
from jaxserve.text.tokenizer import Tokenizer


class ChatShaper(Shaper[ChatCompletionRequest]):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(
        self,
        request: ChatCompletionRequest,
        batch: Batch,
        head: Head,
        tokenizer: Tokenizer,
        new_answer: Callable[[], Answer],
    ) -> None:
        super().__init__(request, batch, head, tokenizer)
        self._role_is_due = [True] * self._n
        self._answers = [new_answer() for _ in range(self._n)]

    def choices(self, delta: OutputDelta, prompt_index: int) -> Iterator[dict[str, Any]]:
        if self._role_is_due[delta.index]:
            self._role_is_due[delta.index] = False
            yield {
                "index": delta.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        answer = self._answers[delta.index]
        change = answer.delta(delta.text, finished=delta.finish_reason is not None)
        logprobs = self._logprobs(delta)
        if change or logprobs or delta.finish_reason:
            yield {
                "index": delta.index,
                "delta": change,
                "logprobs": logprobs,
                "finish_reason": self._finish_reason(delta),
                "stop_reason": delta.stop_reason,
            }

    def whole_choice(self, delta: OutputDelta, prompt_index: int) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": self._answers[delta.index].message(delta.text),
            "logprobs": self._logprobs(delta),
            "finish_reason": self._finish_reason(delta),
            "stop_reason": delta.stop_reason,
        }

    def whole(self, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        answer = super().whole(deltas)
        if self._request.prompt_logprobs is not None:
            positions = [entry for delta in deltas for entry in delta.prompt_logprobs]
            answer["prompt_logprobs"] = prompt_logprobs_json(positions)
        return answer

    def _finish_reason(self, delta: OutputDelta) -> str | None:
        """As OpenAI has it: calls are no reason if the one function was the client's choice."""
        if delta.finish_reason == "stop" and self._answers[delta.index].has_calls:
            return "stop" if self._request.names_function else "tool_calls"
        return delta.finish_reason

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        if not self._request.logprobs or not delta.token_ids:
            return None
        if self._answers[delta.index].hides_text:
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
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

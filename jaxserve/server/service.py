"""From checked request bodies to answers: encoding, the engine, and the answer's shape."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine.group import EngineGroup
from jaxserve.engine.messages import EngineInfo
from jaxserve.engine.streams import EngineDeadError, QueueFullError, RequestStream
from jaxserve.outputs import OutputDelta
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.config import ServerConfig
from jaxserve.server.metrics import RequestClock, ServerMetrics
from jaxserve.server.protocol.answer import Answer, AnswerFormat
from jaxserve.server.protocol.chat import ChatShaper
from jaxserve.server.protocol.completions import CompletionShaper
from jaxserve.server.protocol.errors import ApiError, from_engine, shown
from jaxserve.server.protocol.messages import conversation
from jaxserve.server.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from jaxserve.server.protocol.responses import Detokenized, ModelList, Tokenized
from jaxserve.server.protocol.shaping import (
    DONE,
    Batch,
    EncodedPrompt,
    Head,
    Shaper,
    encode_json,
    event,
)
from jaxserve.server.sse import ClientDisconnected, EventStream, until_disconnect
from jaxserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve.server.tracing import Tracer

MAX_SEQUENCES = 1024
"""Of one HTTP request: prompts times n."""
_MAX_SHRINK = 3
"""How much shorter a text's UTF-8 may become by Unicode normalisation, at most."""
_CLOSED_REQUEST = 499
"""As nginx logs it; nobody is left to see it."""


class Service:
    """A model that is being served under `model_names`; answers carry the first of them."""

    def __init__(
        self,
        engine: EngineGroup,
        infos: Sequence[EngineInfo],
        tokenizer: Tokenizer,
        model_names: Sequence[str],
        chat_template: str | None,
        config: ServerConfig,
        tracer: "Tracer | None",
    ) -> None:
        self.engine = engine
        self.info = infos[0]
        self._infos = infos
        self.metrics = ServerMetrics(engine, infos, model_names[0])
        self._tokenizer = tokenizer
        self._model_names = model_names
        self._chat_template = chat_template
        self._enable_auto_tool_choice = config.enable_auto_tool_choice
        self._format = AnswerFormat(tokenizer, config.tool_call_parser, config.reasoning_parser)
        self._tracer = tracer
        self._created = int(time.time())
        self._max_text_bytes = (
            _MAX_SHRINK * self.info.max_model_len * tokenizer.longest_token_bytes()
        )

    def ready_line(self, seconds: float) -> str:
        """What the log says when the start has taken `seconds`."""
        slowest = max(self._infos, key=lambda info: sum(info.startup_s.values()))
        phases = ", ".join(f"{phase} {s:.1f} s" for phase, s in slowest.startup_s.items())
        capacity = sum(info.kv_capacity_tokens for info in self._infos)
        max_model_len = self.info.max_model_len
        engines = "" if len(self._infos) == 1 else f"{len(self._infos)} engines, "
        return (
            f"ready: {self._model_names[0]}, {engines}max_model_len {max_model_len}, KV cache of "
            f"{capacity} tokens, enough for {capacity / max_model_len:.1f} requests of that "
            f"length; started in {seconds:.1f} s ({phases})"
        )

    # Without the engine.

    def models(self) -> ModelList:
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": self._created,
                    "owned_by": "jaxserve",
                    "max_model_len": self.info.max_model_len,
                }
                for name in self._model_names
            ],
        }

    async def tokenize(self, body: TokenizeTextRequest | TokenizeChatRequest) -> Tokenized:
        self._check_model(body.model)
        if isinstance(body, TokenizeTextRequest):
            ids = await _in_thread(body, self._encode, body.prompt, body.add_special_tokens)
        else:
            ids = (await _in_thread(body, self._encode_chat, body)).token_ids
        strings = [self._tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self.info.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        self._check_model(body.model)
        self._check_ids("tokens", body.tokens)
        return {"prompt": await _in_thread(body, self._tokenizer.decode, body.tokens, False)}

    # With it.

    async def complete(self, body: CompletionRequest, http: Request, id_: str) -> Response:
        arrival_s = time.monotonic()
        self._check_model(body.model)
        prompts, params = await _in_thread(body, self._prepare_completion, body)
        ids = [id_] if len(prompts) == 1 else [f"{id_}-{i}" for i in range(len(prompts))]
        batch = Batch(ids, prompts, params)
        shaper = CompletionShaper(body, batch, self._head(id_), self._tokenizer)
        return await self._answer(body, http, shaper, arrival_s)

    async def chat(self, body: ChatCompletionRequest, http: Request, id_: str) -> Response:
        arrival_s = time.monotonic()
        self._check_model(body.model)
        if body.parses_tools and not self._enable_auto_tool_choice:
            raise ApiError(
                400,
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to '
                "be set",
                param="tool_choice",
            )
        prompt, params, new_answer = await _in_thread(body, self._prepare_chat, body)
        batch = Batch([id_], [prompt], params)
        shaper = ChatShaper(body, batch, self._head(id_), self._tokenizer, new_answer)
        return await self._answer(body, http, shaper, arrival_s)

    async def _answer(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        http: Request,
        shaper: Shaper,
        arrival_s: float,
    ) -> Response:
        batch = shaper.batch
        stream = RequestStream()
        clock: RequestClock | None = None

        def end() -> None:
            """What is not finished has nobody to read it."""
            if not stream.finished:
                for request_id in batch.request_ids:
                    self.engine.abort(request_id)
            if self._tracer is not None and clock is not None:
                self._tracer.record(clock, shaper.head.id, batch.params, http.headers, stream.error)

        try:
            for request_id, prompt in zip(batch.request_ids, batch.prompts, strict=True):
                self.engine.submit(
                    stream, request_id, prompt.token_ids, batch.params, body.priority or 0
                )
            await until_disconnect(http.receive, stream.wait_queued())
            lens = [len(prompt.token_ids) for prompt in batch.prompts]
            prompt_lens = dict(zip(batch.request_ids, lens, strict=True))
            clock = RequestClock(self.metrics, stream.ranks, prompt_lens, arrival_s)
            if body.stream:
                return EventStream(self._events(body, stream, shaper, clock), end)
            deltas = await until_disconnect(http.receive, _collect(stream, clock))
        except ClientDisconnected:
            end()
            return Response(status_code=_CLOSED_REQUEST)
        except (ValueError, QueueFullError, EngineDeadError) as error:
            end()
            raise _refusal(error, body) from error
        except BaseException:
            end()
            raise
        end()
        return Response(encode_json(shaper.whole(deltas)), media_type="application/json")

    async def _events(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        stream: RequestStream,
        shaper: Shaper,
        clock: RequestClock,
    ) -> AsyncGenerator[bytes]:
        try:
            async for deltas in stream:
                clock.observe(deltas)
                if data := shaper.chunks(deltas):
                    yield data
        except (RuntimeError, ValueError) as error:
            if error is not stream.error:
                raise
            yield event(_refusal(error, body).body) + DONE
        else:
            yield shaper.end()

    # Encoding, off the event loop.

    def _encode_prompt(
        self, place: str, prompt: str | list[int], add_special_tokens: bool
    ) -> EncodedPrompt:
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(prompt, add_special_tokens) if text is not None else prompt
        self._check_len(len(ids))
        self._check_ids(place, ids)
        return EncodedPrompt(ids, text)

    def _prepare_completion(
        self, body: CompletionRequest
    ) -> tuple[list[EncodedPrompt], SamplingParams]:
        params = body.to_params()
        inputs = body.prompts()
        if len(inputs) * params.n > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"the number of prompts times n must be at most {MAX_SEQUENCES}, "
                f"got {len(inputs)} times {params.n}",
                param="n",
            )
        prompts = [
            self._encode_prompt(place, prompt, body.add_special_tokens)
            for place, prompt in inputs.items()
        ]
        return prompts, params

    def _prepare_chat(
        self, body: ChatCompletionRequest
    ) -> tuple[EncodedPrompt, SamplingParams, Callable[[], Answer]]:
        params = body.to_params()
        prompt = self._encode_chat(body)
        self._check_len(len(prompt.token_ids))
        return prompt, *self._format.prepare(body, params, prompt.text)

    def _encode_chat(self, body: ChatCompletionRequest | TokenizeChatRequest) -> EncodedPrompt:
        text = self._tokenizer.render_chat(
            conversation(body.messages),
            add_generation_prompt=body.adds_generation_prompt,
            tools=body.tool_definitions,
            chat_template=self._chat_template,
            continue_final_message=body.continue_final_message,
            variables=body.template_variables,
        )
        return EncodedPrompt(self._encode(text, body.add_special_tokens), text)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        num_bytes = len(text.encode())
        if num_bytes > self._max_text_bytes:
            raise _too_long(f"{num_bytes} bytes of text", self.info.max_model_len)
        return self._tokenizer.encode(text, add_special_tokens)

    def _check_len(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise ApiError(400, "the prompt is empty", param="prompt")
        if num_tokens >= self.info.max_model_len:
            raise _too_long(f"{num_tokens} tokens", self.info.max_model_len)

    def _check_ids(self, place: str, ids: Sequence[int]) -> None:
        last = self.info.vocab_size - 1
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            i = next(i for i, token in enumerate(ids) if not 0 <= token <= last)
            place = f"{place}[{i}]"
            raise ApiError(
                400,
                f"{place}: must be a token id from 0 to {last}, got {shown(ids[i])}",
                param=place,
            )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._model_names:
            raise ApiError(
                404,
                f"no model {name!r:.80} here, only {', '.join(map(repr, self._model_names))}",
                param="model",
                code="model_not_found",
            )

    def _head(self, id_: str) -> Head:
        return Head(id_, self._model_names[0], int(time.time()))


async def start_service(
    engine: EngineGroup,
    folder: Path,
    model_names: Sequence[str],
    chat_template: str | None,
    config: ServerConfig,
    tracer: "Tracer | None",
) -> Service:
    """Start the engines while the tokenizer in `folder` is loaded."""
    infos, tokenizer = await asyncio.gather(engine.start(), asyncio.to_thread(Tokenizer, folder))
    return await asyncio.to_thread(
        Service, engine, infos, tokenizer, model_names, chat_template, config, tracer
    )


def _refusal(error: Exception, body: CompletionRequest | ChatCompletionRequest) -> ApiError:
    """Of the engine, which speaks of a request's fields or of its grammar."""
    return from_engine(error, type(body).model_fields, body.grammar_field)


def _too_long(what: str, max_model_len: int) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {what}, but the model takes max_model_len={max_model_len} tokens, of "
        "which at least one is the answer's",
        param="prompt",
        code="context_length_exceeded",
    )


async def _in_thread(body: BaseModel, function: Any, *args: Any) -> Any:
    """ValueError is the fault of `body`, a client's, there."""
    try:
        return await asyncio.to_thread(function, *args)
    except ValueError as error:
        raise from_engine(error, type(body).model_fields) from error


async def _collect(stream: RequestStream, clock: RequestClock) -> list[OutputDelta]:
    collected: list[OutputDelta] = []
    async for deltas in stream:
        clock.observe(deltas)
        collected += deltas
    return collected

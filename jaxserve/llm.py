"""The library: LLM for scripts and notebooks, AsyncLLM for asyncio programs."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.request_state import Submission
from jaxserve.engine.stats import EngineStats
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class RequestErrors(ValueError):
    """Some requests of a call were refused, or could not go on; the others have finished.

    `errors` maps a request's place in the call to what is wrong with it; `outputs` has the others'
    results in the order asked, None in these places.
    """

    def __init__(self, errors: Mapping[int, str], outputs: Sequence[RequestOutput | None]) -> None:
        self.errors = dict(errors)
        self.outputs = list(outputs)
        if len(outputs) == 1:
            message = self.errors[0]
        else:
            listed = "; ".join(f"request {i}: {text}" for i, text in self.errors.items())
            message = f"{len(errors)} of {len(outputs)} requests failed: {listed}"
        super().__init__(message)


class LLM:
    """A model ready to generate, in this process and thread.

    Keyword arguments are EngineConfig's fields. Installs no signal handlers. Several may live in
    one process, where JAX's settings are common to all: the first one chooses
    `compilation_cache_dir`. `close()`, or leaving a `with` block, frees the device.

    Raises ValueError or OSError, in one line, if the model cannot be served as asked.
    """

    def __init__(self, model: str | os.PathLike[str], **fields: Any) -> None:
        self.engine = Engine(_one_engine(model, fields))
        self._lock = threading.Lock()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt (text or token ids) or many; outputs come in the order asked.

        `sampling_params`: one for all, or one for each prompt. If some requests cannot be served
        (an empty or too long prompt, an id outside the vocabulary, a grammar that outgrows its
        limits), the others finish first and RequestErrors then says which and why, with their
        outputs.
        """
        return self._generate(
            _as_prompts(prompts), lambda prompt: prompt, sampling_params, priority, use_tqdm
        )

    def _generate[T](
        self,
        inputs: Sequence[T],
        as_prompt: Callable[[T], Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self.engine.check_open()
        params = _one_each(sampling_params, len(inputs), "sampling_params", SamplingParams())
        priorities = _one_each(priority, len(inputs), "priority", 0)
        submissions: list[Submission | None] = []
        errors: dict[int, str] = {}
        for i, value in enumerate(inputs):
            try:
                prompt = as_prompt(value)
                submissions.append(self.engine.prepare(prompt, params[i], priority=priorities[i]))
            except ValueError as error:
                errors[i] = str(error)
                submissions.append(None)
        with self._lock:
            self._run([s for s in submissions if s is not None], use_tqdm)
        outputs: list[RequestOutput | None] = []
        for i, submission in enumerate(submissions):
            answers = [] if submission is None else submission.output.outputs
            for answer in answers:
                if answer.finish_reason == "error":
                    errors[i] = str(answer.stop_reason)
            outputs.append(None if i in errors else submission.output)
        if errors:
            raise RequestErrors(errors, outputs)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation ([{"role": ..., "content": ...}, ...]) or many."""
        if not messages:
            raise ValueError("messages must hold at least one message")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this engine has none")
        encode = partial(
            self.tokenizer.encode_chat,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
        )
        return self._generate(conversations, encode, sampling_params, None, use_tqdm)

    def stats(self) -> EngineStats:
        """A moment of the engine: requests, blocks, prefix cache."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the device memory. Closing twice is fine."""
        self.engine.close()

    def _run(self, submissions: list[Submission], use_tqdm: bool) -> None:
        by_id = {s.output.request_id: s.output for s in submissions}
        num_tokens = 0
        begin = time.monotonic()
        try:
            for submission in submissions:
                self.engine.add(submission)
            with tqdm(
                total=len(by_id),
                unit="request",
                disable=not use_tqdm or not by_id,
                dynamic_ncols=True,
            ) as progress:
                while self.engine.has_unfinished:
                    for delta in self.engine.step():
                        output = by_id[delta.request_id]
                        output.apply(delta)
                        num_tokens += len(delta.token_ids)
                        if delta.finish_reason is not None and output.finished:
                            rate = num_tokens / (time.monotonic() - begin)
                            progress.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                            progress.update()
        except BaseException:
            # Also for Ctrl-C in a notebook: the engine stays usable.
            self.engine.reset()
            raise


class AsyncLLM:
    """A model ready to generate for asyncio callers; the engine runs in a thread of its own."""

    def __init__(self, model: str | os.PathLike[str], **fields: Any) -> None:
        self._engine = AsyncEngine(Engine(_one_engine(model, fields)))

    @property
    def engine(self) -> Engine:
        """For reading what does not change: configuration, tokenizer, start-up times."""
        return self._engine.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def is_running(self) -> bool:
        """False once the engine has failed or was closed."""
        return self._engine.is_running

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's output each time it has grown: one and the same object, so copy
        what must stay as it was. Leaving the loop early aborts the request.

        ValueError: the request cannot be served, or its grammar has outgrown its limits.
        EngineDeadError: the engine failed meanwhile.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        submission = await asyncio.to_thread(
            self.engine.prepare, prompt, params, request_id, priority
        )
        stream = self._engine.submit(submission)
        try:
            async for deltas in stream:
                for delta in deltas:
                    submission.output.apply(delta)
                yield submission.output
        finally:
            if not stream.finished:
                self._engine.leave(submission.output.request_id, stream)

    async def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for a conversation through the model's chat template."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this engine has none")
        prompt = await asyncio.to_thread(self.tokenizer.encode_chat, messages)
        async for output in self.generate(prompt, sampling_params, **kwargs):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream finishes with the reason "abort"."""
        self._engine.abort(request_id)

    async def stats(self) -> EngineStats:
        """A moment of the engine: requests, blocks, prefix cache."""
        return await self._engine.stats()

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return await self._engine.reset_prefix_cache()

    def close(self) -> None:
        """End all requests, stop the thread and free the device memory."""
        self._engine.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a string, a mapping or a flat sequence of ids; anything else is many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}")
    many = str | Mapping | Sequence | np.ndarray
    if len(prompts) and all(not isinstance(prompt, many) for prompt in prompts):
        return [prompts]
    return list(prompts)


def _one_engine(model: str | os.PathLike[str], fields: Mapping[str, Any]) -> EngineConfig:
    if "data_parallel_size" in fields:
        raise ValueError(
            "data_parallel_size is an option of `jaxserve serve` alone: this is one engine"
        )
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    return EngineConfig(model=name, **fields)


def _one_each[T](values: T | Sequence[T] | None, count: int, name: str, default: T) -> list[T]:
    if values is None:
        return [default] * count
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise ValueError(
            f"{name} must be one for all {count} prompts or one each, got {len(values)}"
        )
    return list(values)

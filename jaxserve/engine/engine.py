"""The engine: scheduler, batch builder and step, one step in flight.

Synchronous and single-threaded: whoever calls `step` owns the engine. `AsyncEngine` gives it a
thread of its own.
"""

import gc
import itertools
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import pick_bucket
from jaxserve.engine.logprobs import StepLogprobs, launch_logprobs, tile_size
from jaxserve.engine.request_state import RequestState, Submission
from jaxserve.engine.startup import EngineParts, start
from jaxserve.engine.stats import EngineStats, StepStats
from jaxserve.engine.step import StepOutput
from jaxserve.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxserve.sampling import TokenLogprobs, check_token_ids, needs_slot_state, slot_rows
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from scheduler import FinishReason, Request, Scheduler, SchedulerOutput

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a mapping with "prompt" or "prompt_token_ids"."""


class _InFlight(NamedTuple):
    scheduled: SchedulerOutput
    output: StepOutput
    logprobs: StepLogprobs | None
    launched_s: float


class Engine:
    """Continuous batching over one model on one mesh.

    Raises ValueError, in one line, for anything in `config` or a request that cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._parts: EngineParts = start(config)
        self.startup_s: dict[str, float] = self._parts.phases_s
        self.model_config = self._parts.definition.config
        self.scheduler_config = self._parts.scheduler_config
        self.tokenizer = self._parts.tokenizer
        self._scheduler = Scheduler(self._parts.scheduler_config)
        self._builder = BatchBuilder(
            self._parts.scheduler_config.max_num_seqs, self._parts.max_blocks
        )
        self._states: dict[str, RequestState] = {}
        self._children: dict[str, list[str]] = {}
        self._num_with_logprobs = 0
        self._in_flight: deque[_InFlight] = deque()
        self._seeds = random.Random(config.seed)
        self._request_numbers = itertools.count()
        self._num_steps = 0
        self._closed = False
        self._steps = StepStats()
        self._resolved_s = 0.0
        # Tracing leaves a great many objects; the collector would walk them while serving.
        gc.collect()
        gc.freeze()

    @property
    def max_model_len(self) -> int:
        return self.scheduler_config.max_model_len

    @property
    def dtype(self) -> np.dtype:
        """What it computes in, and keeps in its cache."""
        return self._parts.definition.dtype

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return (self.scheduler_config.num_blocks - 1) * self.scheduler_config.block_size

    @property
    def num_running(self) -> int:
        """Sequences that have a slot and blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that have neither."""
        return self._scheduler.num_waiting

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states) or bool(self._in_flight)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            prefix_cache=scheduler.prefix_stats,
            steps=self._steps.copy(),
        )

    # Requests. `prepare` touches nothing that a step uses, so any thread may call it.

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt; the text is None if ids came in."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                prompt = prompt["prompt_token_ids"]
            elif "prompt" in prompt:
                prompt = prompt["prompt"]
            else:
                raise ValueError(
                    "a prompt given as a mapping needs 'prompt' or 'prompt_token_ids', got the "
                    f"keys {sorted(map(str, prompt))}"
                )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this engine has no tokenizer: give prompt token ids")
            if not prompt:
                raise ValueError("the prompt is empty")
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"a prompt must be a string or token ids, got {type(prompt).__name__}")
        return None, list(prompt)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Submission:
        """Check a request against this model and set up its state; ValueError if it cannot be."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        text, ids = self.encode(prompt)
        self._check_prompt(ids)
        ids = [int(i) for i in ids]
        bad_words = self._check_params(params)
        # Sequences have names of their own: two requests of one id may follow each other while
        # a step of the first is still in flight.
        number = next(self._request_numbers)
        if request_id is None:
            request_id = f"request-{number}"
        room = self.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        eos = frozenset() if params.ignore_eos else self._parts.eos_token_ids
        metrics = RequestMetrics(arrival_s=time.monotonic())
        output = RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(index) for index in range(params.n)],
            metrics=metrics,
        )
        submission = Submission(output)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        single = [words[0] for words in bad_words if len(words) == 1]
        has_bias = bool(params.logit_bias or params.allowed_token_ids or single)
        for index in range(params.n):
            request = Request(
                request_id=f"{number}.{index}",
                prompt_token_ids=ids,
                max_tokens=max_tokens,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                min_tokens=params.min_tokens,
                priority=priority,
                use_prefix_cache=params.prompt_logprobs is None,
            )
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = IncrementalDetokenizer(self.tokenizer, ids, params)
            state = RequestState(
                request=request,
                parent_id=request_id,
                index=index,
                params=params,
                seed=(seed + index) % 2**64,
                has_bias=has_bias,
                bad_word_token_ids=bad_words,
                metrics=metrics,
                tokenizer=self.tokenizer,
                detokenizer=detokenizer,
                eos_token_ids=eos,
            )
            submission.states.append(state)
        return submission

    def _check_prompt(self, ids: Sequence[int]) -> None:
        vocab_size = self.model_config.vocab_size
        if len(ids) == 0:
            raise ValueError("the prompt is empty")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise ValueError(f"prompt token ids must be integers, got {token!r}")
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompt token id {token} is outside the vocabulary (0 to {vocab_size - 1})"
                )
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but max_model_len={self.max_model_len} leaves "
                f"room for at most {self.max_model_len - 1} and one output token"
            )

    def _check_params(self, params: SamplingParams) -> list[list[int]]:
        """Check what depends on the model; returns the token sequences of `bad_words`."""
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.config.max_logprobs:
                raise ValueError(
                    f"{name} must be at most max_logprobs={self.config.max_logprobs}, got {value}"
                )
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ValueError(f"{name} needs a tokenizer, and this engine has none")
            words = []
        else:
            words = [
                ids for word in params.bad_words for ids in self.tokenizer.encode_bad_word(word)
            ]
        check_token_ids(params, words, self.model_config.vocab_size)
        return words

    def add(self, submission: Submission) -> None:
        """Queue a prepared request. ValueError, and nothing queued, if its id is in use."""
        request_id = submission.output.request_id
        if request_id in self._children:
            raise ValueError(f"request id {request_id!r} is in use")
        for state in submission.states:
            self._scheduler.add(state.request)
            self._states[state.request.request_id] = state
            self._num_with_logprobs += state.params.logprobs is not None
        self._children[request_id] = [s.request.request_id for s in submission.states]

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request now; its blocks are free at once. Nothing happens if it is unknown."""
        deltas = []
        for child_id in list(self._children.get(request_id, ())):
            self._scheduler.abort(child_id)
            deltas.append(self._states[child_id].aborted())
            self._forget(child_id)
        return deltas

    def is_open(self, request_id: str) -> bool:
        """True until every sequence of the request has finished or was aborted."""
        return request_id in self._children

    def _forget(self, child_id: str) -> None:
        state = self._states.pop(child_id)
        self._num_with_logprobs -= state.params.logprobs is not None
        children = self._children[state.parent_id]
        children.remove(child_id)
        if not children:
            del self._children[state.parent_id]

    def reset(self) -> None:
        """Forget every request and cached prefix, also after a step that was cut off."""
        parts = self._parts
        self._scheduler = Scheduler(self.scheduler_config)
        self._states.clear()
        self._children.clear()
        self._num_with_logprobs = 0
        self._in_flight.clear()
        if any(array.is_deleted() for array in jax.tree.leaves((parts.kv_caches, parts.slots))):
            parts.make_state()

    # The loop.

    def step(self) -> list[OutputDelta]:
        """Launch the next step, then read the one before it; returns what that one has produced."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        num_running = self._scheduler.num_running
        num_steps = 1 if self._num_with_logprobs else self._parts.num_decode_steps(num_running)
        scheduled = self._scheduler.schedule(num_steps)
        if scheduled is not None:
            self._launch(scheduled)
        if self._in_flight and (scheduled is None or len(self._in_flight) > 1):
            return self._resolve(self._in_flight.popleft())
        return []

    def _launch(self, scheduled: SchedulerOutput) -> None:
        parts = self._parts
        now = time.monotonic()
        for row in scheduled.scheduled:
            if row.admitted:
                state = self._states[row.request_id]
                if state.metrics.first_scheduled_s is None:
                    state.metrics.first_scheduled_s = now
                if needs_slot_state(state.params):
                    self._load_slot(row.slot, state)
        bucket = pick_bucket(parts.buckets, scheduled.num_tokens)
        packed = self._builder.build(scheduled, self._states, parts.programs.layouts[bucket])
        packed = jax.device_put(packed, parts.host_input)
        programs = parts.programs
        steps = programs.steps if scheduled.num_steps == 1 else programs.decode_steps
        parts.kv_caches, parts.slots, output = steps[bucket](
            parts.params, parts.kv_caches, parts.slots, packed
        )
        output.token_ids.copy_to_host_async()
        logprobs = launch_logprobs(
            programs.logprobs[bucket],
            tile_size(programs.layouts[bucket]),
            parts.params,
            output,
            scheduled,
            self._states,
            parts.replicated,
        )
        launched = time.monotonic()
        if self._in_flight:
            self._steps.host_gap_s.observe(self._gap_before(launched))
        self._in_flight.append(_InFlight(scheduled, output, logprobs, launched))
        self._num_steps += scheduled.num_steps

    def _gap_before(self, launched: float) -> float:
        previous = self._in_flight[-1]
        if not previous.output.token_ids.is_ready():
            return 0.0
        return launched - max(previous.launched_s, self._resolved_s)

    def _load_slot(self, slot: int, state: RequestState) -> None:
        rows = slot_rows(
            state.params,
            state.prompt_token_ids,
            state.request.output_token_ids,
            sorted(state.request.stop_token_ids),
            state.bad_word_token_ids,
            self.model_config.vocab_size,
        )
        self._parts.slots = self._parts.programs.load_slot(
            self._parts.slots, *jax.device_put((np.int32(slot), *rows), self._parts.replicated)
        )

    def _resolve(self, in_flight: _InFlight) -> list[OutputDelta]:
        scheduled, output, step_logprobs, launched = in_flight
        num_rows = len(scheduled.scheduled)
        token_ids = np.asarray(output.token_ids)[:, :num_rows].reshape(-1).tolist()
        now = time.monotonic()
        self._steps.observe(scheduled, now - max(launched, self._resolved_s))
        self._resolved_s = now
        scored = step_logprobs.fetch() if step_logprobs else None
        deltas = self._prompt_logprobs(scheduled, step_logprobs, scored)
        for event in self._scheduler.update(scheduled, token_ids):
            state = self._states[event.request_id]
            logprobs = None
            if state.params.logprobs is not None:
                logprobs = state.logprobs_at(
                    scored,
                    step_logprobs.sampled[event.request_id],
                    event.token_ids[0],
                    state.params.logprobs,
                )
            delta = state.advance(event, logprobs)
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._scheduler.finish(event.request_id, FinishReason.STOP)
                self._forget(event.request_id)
        return deltas

    def _prompt_logprobs(
        self,
        scheduled: SchedulerOutput,
        step_logprobs: StepLogprobs | None,
        scored: TokenLogprobs | None,
    ) -> list[OutputDelta]:
        deltas = []
        for row in scheduled.scheduled if step_logprobs and step_logprobs.prompts else ():
            state = self._states.get(row.request_id)
            first_index = step_logprobs.prompts.get(row.request_id)
            if state is not None and first_index is not None:
                delta = state.prompt_logprobs_of(scored, row.start, first_index, row.num_tokens)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing forgotten, while requests hold blocks."""
        return self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Free the device memory. The engine cannot be used afterwards; closing twice is fine."""
        self._closed = True
        self._states.clear()
        self._children.clear()
        self._in_flight.clear()
        self._parts.free()
        gc.unfreeze()

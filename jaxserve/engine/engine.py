"""The engine: scheduler, batch builder and step, one step in flight.

Synchronous and single-threaded: whoever calls `step` owns the engine. `AsyncEngine` gives it a
thread of its own.
"""

import gc
import logging
import time
from collections import Counter, deque

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import pick_bucket
from jaxserve.engine.grammar_masks import GrammarMasks
from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.logprobs import launch_logprobs
from jaxserve.engine.preparer import RequestPreparer
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.request_state import Feature, RequestState, Submission
from jaxserve.engine.startup import EngineParts, start
from jaxserve.engine.stats import EngineStats, StepStats
from jaxserve.outputs import OutputDelta
from jaxserve.sampling import TokenLogprobs, needs_slot_state, slot_rows
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.grammar import GrammarCompiler
from jaxserve.text.grammar_trial import one_line
from scheduler import FinishReason, Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)


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
        grammars = None
        if self.tokenizer is not None:
            grammars = GrammarCompiler(self.tokenizer, self.model_config.vocab_size)
        self._preparer = RequestPreparer(
            config,
            self.max_model_len,
            self.model_config.vocab_size,
            self._parts.eos_token_ids,
            self.tokenizer,
            grammars,
        )
        self._masks = GrammarMasks(self.model_config.vocab_size, self._parts.eos_token_ids)
        self._states: dict[str, RequestState] = {}
        self._children: dict[str, list[str]] = {}
        self._features: Counter[Feature] = Counter()
        """How many unfinished sequences ask for each."""
        self._in_flight: deque[InFlight] = deque()
        self._num_steps = 0
        self._closed = False
        self._steps = StepStats()
        self._resolved_s = 0.0
        # Tracing leaves a great many objects; the collector would walk them while serving.
        gc.collect()
        gc.freeze()

    @property
    def platform(self) -> str:
        """JAX's name for what the engine runs on: "gpu" or "cpu"."""
        return self._parts.replicated.mesh.devices.flat[0].platform

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
    def steps_in_dispatch(self) -> dict[int, int]:
        """Of dispatches that only decode, by the number of sequences."""
        return self._parts.steps_in_dispatch()

    def lower_step(self, num_tokens: int, *, decode: bool) -> tuple[jax.stages.Lowered, int]:
        """(the program of a dispatch, yet to be compiled; how many steps it takes): each step of so
        many tokens, and all of them of decode rows, or not."""
        return self._parts.lower_step(num_tokens, decode=decode)

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

    def check_open(self) -> None:
        """RuntimeError once the engine is closed."""
        if self._closed:
            raise RuntimeError("the engine is closed")

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

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Submission:
        """Check a request against this model and set up its state; ValueError if it cannot be.

        Compiles its grammar, if it has one that is not known yet; others wait for that.
        """
        return self._preparer.prepare(prompt, params, request_id, priority)

    def must_compile(self, params: SamplingParams) -> bool:
        """Whether `prepare` has to compile a grammar first."""
        return self._preparer.must_compile(params)

    def add(self, submission: Submission) -> None:
        """Queue a prepared request. ValueError, and nothing queued, if its id is in use."""
        request_id = submission.output.request_id
        if request_id in self._children:
            raise ValueError(f"request id {request_id!r} is in use")
        for state in submission.states:
            self._scheduler.add(state.request)
            self._states[state.request.request_id] = state
            self._features.update(state.features)
        self._children[request_id] = [s.request.request_id for s in submission.states]

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request now; its blocks are free at once. Nothing happens if it is unknown."""
        deltas = []
        for child_id in list(self._children.get(request_id, ())):
            deltas.append(self._drop(child_id, FinishReason.ABORT))
        return deltas

    def _drop(
        self, child_id: str, reason: FinishReason, stop_reason: str | None = None
    ) -> OutputDelta:
        self._scheduler.finish(child_id, reason)
        delta = self._states[child_id].dropped(reason, stop_reason)
        self._forget(child_id)
        return delta

    def is_open(self, request_id: str) -> bool:
        """True until every sequence of the request has finished or was aborted."""
        return request_id in self._children

    def _forget(self, child_id: str) -> None:
        state = self._states.pop(child_id)
        self._features.subtract(state.features)
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
        self._features.clear()
        self._in_flight.clear()
        arrays = jax.tree.leaves((parts.state, *parts.inputs.values()))
        if any(array.is_deleted() for array in arrays):
            parts.make_state()

    # The loop.

    def step(self) -> list[OutputDelta]:
        """Launch the next step, then read the one before it; returns what that one has produced."""
        self.check_open()
        num_steps = 1
        if not (self._features[Feature.GRAMMAR] or self._features[Feature.LOGPROBS]):
            num_steps = self._parts.num_decode_steps(self._scheduler.num_running)
        scheduled = self._scheduler.schedule(num_steps)
        if scheduled is not None:
            self._launch(scheduled)
        if self._in_flight and (scheduled is None or len(self._in_flight) > 1):
            return self._resolve(self._in_flight.popleft())
        return []

    def _launch(self, scheduled: SchedulerOutput) -> None:
        parts = self._parts
        now = time.monotonic()
        for row in scheduled.scheduled[scheduled.num_decode :]:
            if row.admitted:
                state = self._states[row.request_id]
                if state.metrics.first_scheduled_s is None:
                    state.metrics.first_scheduled_s = now
                if needs_slot_state(state.params):
                    self._load_slot(row.slot, state)
        bucket = pick_bucket(parts.buckets, scheduled.num_tokens)
        packed = self._builder.build(scheduled, self._states, parts.programs.layouts[bucket])
        packed = jax.device_put(packed, parts.host)
        previous = self._in_flight[-1] if self._in_flight else None
        token_masks = parts.no_masks[bucket]
        if self._features[Feature.GRAMMAR]:
            masks = self._masks.fill(scheduled, self._states, previous, bucket.num_rows)
            if masks is not None:
                token_masks = jax.device_put(masks, parts.replicated)
        programs = parts.programs
        steps = programs.steps if scheduled.num_steps == 1 else programs.decode_steps
        inputs = parts.inputs[bucket] = programs.receive[bucket](parts.inputs[bucket], packed)
        parts.state = steps[bucket](parts.params, parts.state, inputs, token_masks)
        # The next dispatch need not wait until these have been read.
        token_ids = programs.copy(parts.state.output.token_ids)
        token_ids.copy_to_host_async()
        logprobs = None
        if self._features[Feature.LOGPROBS] or self._features[Feature.PROMPT_LOGPROBS]:
            logprobs = launch_logprobs(
                programs.logprobs,
                parts.params,
                parts.state.output,
                scheduled,
                self._states,
                parts.replicated,
            )
        launched = time.monotonic()
        if previous is not None:
            self._steps.observe_gap(scheduled, self._gap_between(previous, launched))
        self._in_flight.append(InFlight(scheduled, token_ids, logprobs, launched))
        self._num_steps += scheduled.num_steps

    def _gap_between(self, previous: InFlight, launched: float) -> float:
        if previous.arrived_s is not None:
            return launched - previous.arrived_s
        if not previous.device_token_ids.is_ready():
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
        parts = self._parts
        rows = jax.device_put((np.int32(slot), *rows), parts.replicated)
        slots = parts.programs.load_slot(parts.state.slots, *rows)
        parts.state = parts.state._replace(slots=slots)

    def _resolve(self, in_flight: InFlight) -> list[OutputDelta]:
        scheduled, step_logprobs = in_flight.scheduled, in_flight.logprobs
        token_ids = in_flight.token_ids()
        begin = max(in_flight.launched_s, self._resolved_s)
        self._steps.observe(scheduled, in_flight.arrived_s - begin)
        self._resolved_s = in_flight.arrived_s
        scored = step_logprobs.fetch() if step_logprobs else None
        deltas = self._prompt_logprobs(in_flight, scored)
        for event in self._scheduler.update(scheduled, token_ids):
            state = self._states[event.request_id]
            if state.matcher is not None and state.matcher.is_error():
                reason = f"the grammar failed: {one_line(state.matcher.get_error())}"
                self._preparer.forget_grammar(state.params)
                logger.warning("request %s: %s", state.parent_id, reason)
                deltas.append(self._drop(event.request_id, FinishReason.ERROR, reason))
                continue
            logprobs = None
            if state.params.logprobs is not None:
                logprobs = state.logprobs_at(
                    scored,
                    step_logprobs.sampled[event.request_id],
                    event.token_ids[0],
                    state.params.logprobs,
                )
            delta = state.advance(event, logprobs, in_flight.arrived_s)
            deltas.append(delta)
            if delta.finish_reason is not None:
                self._scheduler.finish(event.request_id, FinishReason.STOP)
                self._forget(event.request_id)
        return deltas

    def _prompt_logprobs(
        self, in_flight: InFlight, scored: TokenLogprobs | None
    ) -> list[OutputDelta]:
        deltas = []
        asked = in_flight.logprobs.prompts if in_flight.logprobs else {}
        for row in in_flight.scheduled.scheduled if asked else ():
            state, first_index = self._states.get(row.request_id), asked.get(row.request_id)
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
        self._preparer.close()
        self._parts.free()
        gc.unfreeze()

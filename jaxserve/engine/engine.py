"""The engine: scheduler, batch builder and step, one step in flight.

Synchronous and single-threaded: whoever calls `step` owns the engine. `AsyncEngine` gives it a
thread of its own.
"""

import gc
import itertools
import logging
import random
import time
from collections import deque

import jax
import numpy as np
from llguidance import LLMatcher

from jaxserve.config import EngineConfig
from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import pick_bucket
from jaxserve.engine.grammar_masks import GrammarMasks
from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.logprobs import launch_logprobs, tile_size
from jaxserve.engine.prompts import Prompt, check_prompt, encode_prompt
from jaxserve.engine.request_state import RequestState, Submission
from jaxserve.engine.startup import EngineParts, start
from jaxserve.engine.stats import EngineStats, StepStats
from jaxserve.outputs import CompletionOutput, OutputDelta, RequestMetrics, RequestOutput
from jaxserve.sampling import TokenLogprobs, check_token_ids, needs_slot_state, slot_rows
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import IncrementalDetokenizer
from jaxserve.text.grammar import GrammarCompiler
from scheduler import FinishReason, Request, Scheduler, SchedulerOutput

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
        self._grammars: GrammarCompiler | None = None
        if self.tokenizer is not None:
            self._grammars = GrammarCompiler(self.tokenizer, self.model_config.vocab_size)
        self._masks = GrammarMasks(self.model_config.vocab_size, self._parts.eos_token_ids)
        self._states: dict[str, RequestState] = {}
        self._children: dict[str, list[str]] = {}
        self._num_single_step = 0
        self._in_flight: deque[InFlight] = deque()
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
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if not isinstance(request_id, str | None):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        text, ids = encode_prompt(prompt, self.tokenizer)
        check_prompt(ids, self.model_config.vocab_size, self.max_model_len)
        ids = [int(i) for i in ids]
        bad_words = self._check_params(params)
        # Sequences have names of their own: two requests of one id may follow each other while
        # a step of the first is still in flight.
        number = next(self._request_numbers)
        if request_id is None:
            request_id = f"request-{number}"
        room = self.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        has_grammar = params.structured_outputs is not None
        # With a grammar the token masks hold the end back, and let it through when it is all that
        # is left; it counts then.
        ignores_eos = params.ignore_eos and not has_grammar
        eos = frozenset() if ignores_eos else self._parts.eos_token_ids
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
                min_tokens=0 if has_grammar else params.min_tokens,
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
                matcher=self._matcher(params),
            )
            submission.states.append(state)
        return submission

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

    def _matcher(self, params: SamplingParams) -> LLMatcher | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ValueError("structured_outputs needs a tokenizer, and this engine has none")
        return self._grammars.matcher(params.structured_outputs)

    def must_compile(self, params: SamplingParams) -> bool:
        """Whether `prepare` has to compile a grammar first."""
        structure = params.structured_outputs
        return not (structure is None or self._grammars is None or self._grammars.has(structure))

    def add(self, submission: Submission) -> None:
        """Queue a prepared request. ValueError, and nothing queued, if its id is in use."""
        request_id = submission.output.request_id
        if request_id in self._children:
            raise ValueError(f"request id {request_id!r} is in use")
        for state in submission.states:
            self._scheduler.add(state.request)
            self._states[state.request.request_id] = state
            self._num_single_step += state.takes_single_steps
        self._children[request_id] = [s.request.request_id for s in submission.states]

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request now; its blocks are free at once. Nothing happens if it is unknown."""
        deltas = []
        for child_id in list(self._children.get(request_id, ())):
            deltas.append(self._abort(child_id))
        return deltas

    def _abort(self, child_id: str) -> OutputDelta:
        self._scheduler.abort(child_id)
        delta = self._states[child_id].aborted()
        self._forget(child_id)
        return delta

    def is_open(self, request_id: str) -> bool:
        """True until every sequence of the request has finished or was aborted."""
        return request_id in self._children

    def _forget(self, child_id: str) -> None:
        state = self._states.pop(child_id)
        self._num_single_step -= state.takes_single_steps
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
        self._num_single_step = 0
        self._in_flight.clear()
        if any(array.is_deleted() for array in jax.tree.leaves((parts.kv_caches, parts.slots))):
            parts.make_state()

    # The loop.

    def step(self) -> list[OutputDelta]:
        """Launch the next step, then read the one before it; returns what that one has produced."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        num_running = self._scheduler.num_running
        num_steps = 1 if self._num_single_step else self._parts.num_decode_steps(num_running)
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
        previous = self._in_flight[-1] if self._in_flight else None
        masks = self._masks.fill(scheduled, self._states, previous, bucket.num_rows)
        token_masks = parts.no_masks[bucket]
        if masks is not None:
            token_masks = jax.device_put(masks, parts.replicated)
        programs = parts.programs
        steps = programs.steps if scheduled.num_steps == 1 else programs.decode_steps
        parts.kv_caches, parts.slots, output = steps[bucket](
            parts.params, parts.kv_caches, parts.slots, packed, token_masks
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
        if previous is not None:
            self._steps.host_gap_s.observe(self._gap_between(previous, launched))
        self._in_flight.append(InFlight(scheduled, output, logprobs, launched))
        self._num_steps += scheduled.num_steps

    def _gap_between(self, previous: InFlight, launched: float) -> float:
        if previous.arrived_s is not None:
            return launched - previous.arrived_s
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
                logger.warning("a request's grammar failed: %s", state.matcher.get_error())
                deltas.append(self._abort(event.request_id))
                continue
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
        if self._grammars is not None:
            self._grammars.close()
        self._parts.free()
        gc.unfreeze()

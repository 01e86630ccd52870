"""An engine without a model: the real scheduler, request states and text, and a step that makes
token i of every output the prompt's token i, over and over, where its grammar allows that.

So the next token is a function of the prefix, and a wrong one is visible at once. A prompt that
is FAIL_TOKEN alone makes the step raise. Where the grammar forbids the prompt's token, it ends what
it can, and goes on at random where it cannot.
"""

import random
import time
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.grammar_masks import GrammarMasks
from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.logprobs import launch_logprobs
from jaxserve.engine.preparer import RequestPreparer
from jaxserve.engine.state import StepOutput
from jaxserve.engine.stats import StepStats
from jaxserve.sampling import TokenLogprobs
from jaxserve.text.grammar import GrammarCompiler
from jaxserve.text.tokenizer import Tokenizer
from scheduler import Scheduler, SchedulerConfig

FAIL_TOKEN = 7


def logprob_of(token_id: int) -> float:
    """What the fake says of a sampled token: it is always the likeliest."""
    return -0.25 * (1 + token_id % 7)


class FakeEngine(Engine):
    """Waits `step_time_s` in every step."""

    platform = "cpu"

    def __init__(self, config: EngineConfig, step_time_s: float = 0.0) -> None:
        self.config = config
        self.tokenizer = Tokenizer(config.model)
        self.startup_s = {"tokenizer": 0.1}
        self.model_config = SimpleNamespace(vocab_size=self.tokenizer.vocab_size)
        self.scheduler_config = SchedulerConfig(
            num_blocks=(config.kv_cache_memory_bytes or 4096) + 1,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs or 64,
            max_num_batched_tokens=config.max_num_batched_tokens or 512,
            max_model_len=config.max_model_len or 512,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
        )
        self._parts = SimpleNamespace(free=lambda: None)
        self._features = Counter()
        vocab_size = self.tokenizer.vocab_size
        grammars = GrammarCompiler(self.tokenizer, vocab_size, compile_cpu_s=0.5)
        eos_token_ids = self.tokenizer.eos_token_ids
        self._preparer = RequestPreparer(
            config, self.max_model_len, vocab_size, eos_token_ids, self.tokenizer, grammars
        )
        self._masks = GrammarMasks(vocab_size, eos_token_ids)
        ends = [id_ for text in ('"', "}", "]") for id_ in self.tokenizer.encode(text, False)]
        self._ends = [*eos_token_ids, *ends]
        self._rng = random.Random(0)
        self._scheduler = Scheduler(self.scheduler_config)
        self._states = {}
        self._children = {}
        self._in_flight = deque()
        self._num_steps = 0
        self._steps = StepStats()
        self._resolved_s = 0.0
        self._step_time_s = step_time_s

    def step(self):
        if self._step_time_s:
            time.sleep(self._step_time_s)
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            return []
        launched = time.monotonic()
        self._num_steps += 1
        sampled = []
        masks = self._masks.fill(scheduled, self._states, None, len(scheduled.scheduled))
        for index, row in enumerate(scheduled.scheduled):
            state = self._states[row.request_id]
            prompt = state.prompt_token_ids
            if prompt == [FAIL_TOKEN]:
                raise RuntimeError("the device is lost")
            if row.admitted and state.metrics.first_scheduled_s is None:
                state.metrics.first_scheduled_s = launched
            token = prompt[row.output_index % len(prompt)]
            if row.samples and state.matcher is not None:
                token = self._allowed(masks[index], token)
            sampled.append(token)
        output = StepOutput(np.array([sampled], np.int32), None)
        programs = {64: self._score}
        logprobs = launch_logprobs(programs, None, output, scheduled, self._states, None)
        return self._resolve(InFlight(scheduled, output.token_ids, logprobs, launched))

    def _allowed(self, mask: np.ndarray, wanted: int) -> int:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        for token in (wanted, *self._ends):
            if token in allowed:
                return token
        return self._rng.choice(allowed or [wanted])  # a grammar that has failed allows nothing

    def _score(self, params, output: StepOutput, queries) -> TokenLogprobs:
        tokens = np.asarray(queries)[:, 1]
        sampled = output.token_ids[0, np.where(tokens < 0, -1 - tokens, 0)]
        ids = np.where(tokens < 0, sampled, tokens)
        tops = (ids[:, None] + np.arange(self.config.max_logprobs)) % self.model_config.vocab_size
        logprobs = -0.25 * (1 + ids % 7)
        return TokenLogprobs(
            logprobs=logprobs,
            ranks=np.ones_like(ids),
            top_token_ids=tops,
            top_logprobs=logprobs[:, None] - np.arange(self.config.max_logprobs),
        )


def make_fake_engine(config: EngineConfig, step_time_s: float = 0.0) -> FakeEngine:
    return FakeEngine(config, step_time_s)

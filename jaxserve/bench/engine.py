"""jaxserve's own engine as the benchmarks drive it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jaxserve
from jaxserve.bench.device_events import DeviceEvent
from jaxserve.bench.profile import trace
from jaxserve.bench.workloads import TokenRequest
from jaxserve.version import __version__

GREEDY = {"temperature": 0}
SAMPLED = {
    "temperature": 1.0, "top_p": 0.9, "top_k": 50,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
"""Everything that sampling can be asked to do."""


class JaxserveEngine:
    """An `LLM` that takes token ids. `fields` are EngineConfig's, `sampling` SamplingParams'."""

    name = "jaxserve"
    version = __version__

    def __init__(self, sampling: Mapping[str, Any] = GREEDY, **fields: Any) -> None:
        self._sampling = sampling
        begin = time.perf_counter()
        self._llm = jaxserve.LLM(**fields)
        self.ready_s = round(time.perf_counter() - begin, 2)
        self.engine = engine = self._llm.engine
        self.dtype = str(engine.dtype)
        self.num_gpus = engine.config.tensor_parallel_size
        self.max_num_seqs = engine.scheduler_config.max_num_seqs
        self.max_num_batched_tokens = engine.scheduler_config.max_num_batched_tokens
        self.vocab_size = engine.model_config.vocab_size
        self.settings = {
            name: value
            for name, value in fields.items()
            if name not in ("model", "compilation_cache_dir")
        }
        self.settings |= {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_blocks": engine.scheduler_config.num_blocks,
            "steps_in_dispatch": {str(n): steps for n, steps in engine.steps_in_dispatch.items()},
            "startup_s": engine.startup_s,
        }

    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        params = [
            jaxserve.SamplingParams(
                ignore_eos=True, max_tokens=request.output_len, seed=seed, **self._sampling
            )
            for seed, request in enumerate(requests)
        ]
        prompts = [request.prompt_token_ids for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def profile(self, requests: Sequence[TokenRequest]) -> list[DeviceEvent] | None:
        if self.engine.platform != "gpu":
            return None
        return trace(lambda: self.generate(requests))

    def waits(self, kind: str) -> tuple[float, int]:
        steps = self._llm.stats().steps
        return steps.host_gap_s[kind].total, sum(steps.step_time_s[kind].counts)

    def close(self) -> None:
        self._llm.close()

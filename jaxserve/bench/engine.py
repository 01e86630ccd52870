"""jaxserve's own engine as the benchmarks drive it."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.bench.offline import KernelStats
from jaxserve.bench.workloads import TokenRequest
from jaxserve.version import __version__


class JaxserveEngine:
    """An `LLM` that takes token ids. `fields` are EngineConfig's."""

    name = "jaxserve"
    version = __version__

    def __init__(self, **fields: Any) -> None:
        begin = time.perf_counter()
        self._llm = jaxserve.LLM(**fields)
        self.ready_s = round(time.perf_counter() - begin, 2)
        engine = self._llm.engine
        self.dtype = str(engine.dtype)
        self.num_gpus = engine.config.tensor_parallel_size
        self.max_num_seqs = engine.scheduler_config.max_num_seqs
        self.vocab_size = engine.model_config.vocab_size
        self.settings = {
            name: value
            for name, value in fields.items()
            if name not in ("model", "compilation_cache_dir")
        }
        self.settings |= {
            "max_num_batched_tokens": engine.scheduler_config.max_num_batched_tokens,
            "num_blocks": engine.scheduler_config.num_blocks,
            "startup_s": engine.startup_s,
        }

    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        params = [
            jaxserve.SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_len)
            for request in requests
        ]
        prompts = [request.prompt_token_ids for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def profile(self, requests: Sequence[TokenRequest]) -> KernelStats | None:
        import jax

        if jax.devices()[0].platform != "gpu":
            return None
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.generate(requests)
            return kernel_stats(Path(folder))

    def host_gap_s(self) -> float:
        return self._llm.stats().steps.host_gap_s.total

    def close(self) -> None:
        self._llm.close()


def kernel_stats(folder: Path) -> KernelStats:
    """Count what ran on the first GPU's streams in the JAX profile that `folder` holds.

    XLA's tracer also lists modules and operations that span several kernels, in lines of their own;
    only the streams' lines are counted.
    """
    from jax.profiler import ProfileData

    (path,) = folder.rglob("*.xplane.pb")
    num_kernels = num_copies = 0
    busy_ns = 0.0
    plane = ProfileData.from_file(str(path)).find_plane_with_name("/device:GPU:0")
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            busy_ns += event.duration_ns
            if event.name.lower().startswith(("memcpy", "memset")):
                num_copies += 1
            else:
                num_kernels += 1
    return KernelStats(num_kernels, num_copies, busy_ns / 1e9)

"""jaxserve's own engine as the benchmarks drive it."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxserve
from jaxserve.bench.offline import KernelStats
from jaxserve.bench.workloads import TokenRequest
from jaxserve.version import __version__

if TYPE_CHECKING:
    from jax.profiler import ProfileData

    from jaxserve.engine.startup import EngineParts

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
        engine = self._llm.engine
        self.parts: EngineParts = engine._parts
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
            jaxserve.SamplingParams(
                ignore_eos=True, max_tokens=request.output_len, seed=seed, **self._sampling
            )
            for seed, request in enumerate(requests)
        ]
        prompts = [request.prompt_token_ids for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def profile(self, requests: Sequence[TokenRequest]) -> KernelStats | None:
        if self._llm.engine.platform != "gpu":
            return None
        return kernel_stats(self.trace(requests))

    def trace(self, requests: Sequence[TokenRequest]) -> "ProfileData":
        """As `generate`; what JAX's profiler saw."""
        import jax

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.generate(requests)
            (path,) = Path(folder).rglob("*.xplane.pb")
            return jax.profiler.ProfileData.from_file(str(path))

    def host_gap_s(self) -> float:
        return self._llm.stats().steps.host_gap_s.total

    def close(self) -> None:
        self._llm.close()


def kernel_stats(profile: "ProfileData") -> KernelStats:
    """Count what ran on the first GPU's streams."""
    num_kernels = num_copies = 0
    busy_ns = 0.0
    for name, duration_ns in device_events(profile):
        busy_ns += duration_ns
        if is_copy(name):
            num_copies += 1
        else:
            num_kernels += 1
    return KernelStats(num_kernels, num_copies, busy_ns / 1e9)


def device_events(profile: "ProfileData") -> Iterator[tuple[str, float]]:
    """(name, nanoseconds) of each kernel and copy on the first GPU.

    XLA's tracer also lists modules and operations that span several kernels, in lines of their own;
    only the streams' lines are read.
    """
    for line in profile.find_plane_with_name("/device:GPU:0").lines:
        if line.name.startswith("Stream"):
            yield from ((event.name, event.duration_ns) for event in line.events)


def is_copy(name: str) -> bool:
    """Whether a device event is a copy or a fill, by its name."""
    return name.lower().startswith(("memcpy", "memset"))

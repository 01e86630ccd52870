"""What the benchmark asks of vLLM's worker, in the worker's own process."""

from typing import Any

import torch
from torch_profile import start_profile, stop_profile


class BenchExtension:
    """Mixed into the worker by worker_extension_cls; `self` is the worker."""

    def bench_randomize(self, seed: int) -> None:
        """Normal weights; norms keep their shape of 1."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.inference_mode():
            for name, parameter in self.model_runner.get_model().named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)
        torch.cuda.synchronize()

    def bench_describe(self) -> dict[str, Any]:
        runner = self.model_runner
        config = runner.vllm_config
        return {
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "num_gpu_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
        }

    def bench_profile_start(self) -> None:
        self._profile = start_profile()

    def bench_profile_stop(self) -> list[tuple[str, float, float]]:
        """DeviceEvents as plain tuples, which travel between processes."""
        return [tuple(event) for event in stop_profile(self._profile)]

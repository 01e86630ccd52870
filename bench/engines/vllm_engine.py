"""vLLM in its strongest set-up: asynchronous scheduling, FlashAttention, full and piecewise graphs.

The v2 model runner is chosen by VLLM_USE_V2_MODEL_RUNNER, which `bench/compare.py` sets.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from jaxserve.bench.device_events import DeviceEvent
from jaxserve.bench.workloads import TokenRequest


class VllmEngine:
    name = "vllm"
    version = vllm.__version__

    def __init__(self, job: dict[str, Any]) -> None:
        options = {
            "dtype": job["dtype"],
            "max_model_len": job["max_model_len"],
            "max_num_seqs": job["max_num_seqs"],
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.9,
            "attention_backend": "FLASH_ATTN",
            "async_scheduling": True,
            **job["engine_options"],
        }
        begin = time.perf_counter()
        self._llm = LLM(
            model=job["model_folder"],
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            disable_log_stats=True,
            worker_extension_cls="vllm_extension.BenchExtension",
            seed=job["seed"],
            **options,
        )
        self.ready_s = round(time.perf_counter() - begin, 2)
        self.dtype = job["dtype"]
        self.num_gpus = options.get("tensor_parallel_size", 1)
        self.max_num_seqs = job["max_num_seqs"]
        self.max_num_batched_tokens = options["max_num_batched_tokens"]
        # Its own dummy weights are near zero: all logits tie.
        self._call("bench_randomize", job["seed"])
        self.settings = options | self._call("bench_describe") | {"torch": torch.__version__}
        self.settings["environment"] = {
            name: value for name, value in os.environ.items() if name.startswith("VLLM_USE")
        }

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._llm.collective_rpc(method, args=arguments)[0]

    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = [
            SamplingParams(
                temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
            )
            for request in requests
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def waits(self, kind: str) -> None:
        return None

    def profile(self, requests: Sequence[TokenRequest]) -> list[DeviceEvent]:
        self._call("bench_profile_start")
        self.generate(requests)
        return [DeviceEvent(*event) for event in self._call("bench_profile_stop")]

    def close(self) -> None:
        del self._llm

"""transformers three ways: static batches, its continuous batching, and a compiled static cache."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch_profile import start_profile, stop_profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StaticCache

from jaxserve.bench.device_events import DeviceEvent
from jaxserve.bench.workloads import TokenRequest


class TransformersEngine:
    """A model with random weights. `generate` is the subclasses'."""

    name = "transformers"
    version = transformers.__version__
    num_gpus = 1
    max_num_batched_tokens = None

    def __init__(self, job: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config = AutoConfig.from_pretrained(job["model_folder"])
        torch.manual_seed(job["seed"])
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, job["dtype"]), attn_implementation="sdpa"
            ).eval()
        self.max_num_seqs = job["max_num_seqs"]
        self.dtype = job["dtype"]
        self.settings = {"torch": torch.__version__, "attn_implementation": "sdpa"}
        self._prepare(job)
        self.ready_s = round(time.perf_counter() - begin, 2)

    def _prepare(self, job: dict[str, Any]) -> None:
        pass

    def waits(self, kind: str) -> None:
        return None

    def profile(self, requests: Sequence[TokenRequest]) -> list[DeviceEvent] | None:
        if self.device == "cpu":
            return None
        profiler = start_profile()
        self.generate(requests)
        return stop_profile(profiler)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def batches(self, requests: Sequence[TokenRequest]) -> Iterator[list[TokenRequest]]:
        """As many at a time as may run, in the order they came."""
        for start in range(0, len(requests), self.max_num_seqs):
            yield list(requests[start : start + self.max_num_seqs])

    def padded(self, batch: Sequence[TokenRequest]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask (B, longest prompt), padded on the left."""
        longest = max(len(request.prompt_token_ids) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt_token_ids) :] = torch.tensor(
                request.prompt_token_ids
            )
            mask[row, longest - len(request.prompt_token_ids) :] = 1
        return ids.to(self.device), mask.to(self.device)

    def close(self) -> None:
        del self.model


class StaticBatches(TransformersEngine):
    """`generate`, eagerly: a batch runs until its longest request is done."""

    def _prepare(self, job: dict[str, Any]) -> None:
        # cuDNN's attention would plan anew for each length of the context.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.settings["cudnn_sdp"] = False

    @torch.inference_mode()
    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        done = []
        for batch in self.batches(requests):
            ids, mask = self.padded(batch)
            num_tokens = max(request.output_len for request in batch)
            output = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                eos_token_id=None,
            )
            assert output.shape == (len(batch), ids.shape[1] + num_tokens)
            # What a shorter request got beyond its length is waste, and counts as none.
            done += [request.output_len for request in batch]
        self.synchronize()
        return done


class ContinuousBatches(TransformersEngine):
    """transformers' own continuous batching over a paged cache."""

    def _prepare(self, job: dict[str, Any]) -> None:
        from transformers.generation import ContinuousBatchingConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            max_requests_per_batch=self.max_num_seqs,
            allow_block_sharing=False,
            **job["engine_options"],
        )
        self._manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self._manager.start()

    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        ids = [
            self._manager.add_request(
                request.prompt_token_ids, max_new_tokens=request.output_len, eos_token_id=-1
            )
            for request in requests
        ]
        done: dict[str, int] = {}
        while len(done) < len(requests):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' continuous batching has died")
            elif result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            elif result.is_finished():
                done[result.request_id] = len(result.generated_tokens)
        self.synchronize()
        return [done[request_id] for request_id in ids]

    def close(self) -> None:
        self._manager.stop(block=True)
        super().close()


class CompiledBatches(TransformersEngine):
    """Prefill eagerly, then decode steps compiled by torch over a static cache, as CUDA graphs.

    A batch runs until its longest request is done. Rows and the cache's length are rounded up to
    powers of two: what attention reads beyond a context is waste, and every size is compiled when
    it first comes, which warm-up sees to unless the workload's answers are of many lengths.
    """

    def _prepare(self, job: dict[str, Any]) -> None:
        self._caches: dict[tuple[int, int], StaticCache] = {}
        # Else the ninth shape would run uncompiled, without a word.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        mode = "reduce-overhead" if self.device == "cuda" else "default"
        self._step = torch.compile(self._decode, mode=mode, dynamic=False)

    def _decode(
        self, token: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, cache: StaticCache
    ) -> torch.Tensor:
        logits = self.model(
            token,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def _cache(self, batch_size: int, length: int) -> StaticCache:
        key = batch_size, length
        if key not in self._caches:
            # Kept: new buffers would mean new graphs. One size at a time fits beside the weights.
            self._caches.clear()
            self._caches[key] = StaticCache(config=self.model.config, max_cache_len=length)
        cache = self._caches[key]
        cache.reset()
        return cache

    @torch.inference_mode()
    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        done = []
        for batch in self.batches(requests):
            self._run(batch)
            done += [request.output_len for request in batch]
        self.synchronize()
        return done

    def _run(self, batch: Sequence[TokenRequest]) -> None:
        rows = [*batch, *[batch[-1]] * (_power_of_two(len(batch)) - len(batch))]
        ids, mask = self.padded(rows)
        num_tokens = max(request.output_len for request in batch)
        length = _power_of_two(ids.shape[1] + num_tokens)
        cache = self._cache(len(rows), length)
        lens = mask.sum(-1, keepdim=True)
        # The mask covers the whole cache, so that its shape, and the graph, stay the same.
        whole = torch.zeros(len(rows), length, dtype=torch.long, device=self.device)
        whole[:, : ids.shape[1]] = mask
        logits = self.model(
            ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        for step in range(num_tokens - 1):
            whole[:, ids.shape[1] + step] = 1
            if self.device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            token = self._step(token, lens + step, whole, cache).clone()


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()

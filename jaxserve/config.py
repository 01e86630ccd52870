"""All that a user can set. Flags and keyword arguments fill these; nothing else configures."""

from dataclasses import dataclass, fields
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. Names and meanings follow vLLM's engine arguments.

    Raises ValueError, naming the field and what it allows.
    """

    model: str
    """A Hugging Face folder, org/name on the hub, a .gguf file, a checkpoint written by
    `jaxserve convert`, or "smollm2-135m" (the demo model)."""
    dtype: Dtype = "auto"
    """Compute and cache type; "auto": bfloat16 on a GPU, float32 on a CPU."""
    load_format: LoadFormat = "auto"
    """"dummy": random weights made on the device from `seed`."""
    skip_tokenizer_init: bool = False
    """True: prompts are token ids, and outputs have no text."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together, at least one of each; None: what the model was
    made for."""
    max_num_seqs: int | None = None
    """Most requests in one step; None: 256 on a GPU, 64 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; None: 2048 on a GPU, 256 on a CPU."""
    num_scheduler_steps: int | None = None
    """Most decode steps in one dispatch, if all rows decode; None: on a GPU 8, or 4 or 2 for larger
    models, at the batch sizes where these take less than 20 ms, else 1."""
    block_size: int = 16
    """Tokens of one KV-cache block; a power of two from 8 to 128."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, cache and temporaries together."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache on each device; None: measured on a GPU, 1 GiB on a CPU."""
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    tensor_parallel_size: int = 1
    attention_impl: Literal["auto", "reference", "triton", "mosaic"] = "auto"
    """"auto": "mosaic" on a Hopper GPU, with kernels of its own for long prefills and large
    products, "triton" on any other GPU, "reference" on a CPU."""
    max_logprobs: int = 20
    """Most candidates that a request may ask for at one position."""
    seed: int = 0
    """Of dummy weights, and of requests that bring no seed."""
    compilation_cache_dir: str | None = None
    """Where this process keeps compiled steps; None: a folder in the user's cache, unless a place
    was chosen before; "": JAX's own setting."""

    def __post_init__(self) -> None:
        def check(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        def choice(name: str, *allowed: str) -> None:
            check(getattr(self, name) in allowed, name, "one of " + ", ".join(allowed))

        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.type == (int | None)
            if field.type is int or (optional and value is not None):
                whole = isinstance(value, int) and not isinstance(value, bool)
                check(whole, field.name, "an integer")
        check(isinstance(self.model, str) and bool(self.model), "model", "a path or a known name")
        choice("dtype", "auto", "float32", "bfloat16")
        choice("load_format", "auto", "dummy")
        choice("scheduling_policy", "fcfs", "priority")
        choice("attention_impl", "auto", "reference", "triton", "mosaic")
        for name, least in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("num_scheduler_steps", 1),
            ("kv_cache_memory_bytes", 1),
        ):
            value = getattr(self, name)
            check(value is None or value >= least, name, f"None or at least {least}")
        check(
            8 <= self.block_size <= 128 and self.block_size.bit_count() == 1,
            "block_size",
            "8, 16, 32, 64 or 128",
        )
        check(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "over 0, at most 1")
        check(self.tensor_parallel_size >= 1, "tensor_parallel_size", "at least 1")
        check(0 <= self.max_logprobs <= 1024, "max_logprobs", "from 0 to 1024")
        check(0 <= self.seed < 2**64, "seed", "from 0 to 2**64 - 1")

"""How many KV blocks fit."""

from dataclasses import dataclass

import jax

CPU_KV_CACHE_BYTES = 1 << 30
_GRANULE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on one device."""

    kv_cache_bytes: int
    source: str
    """Where the figure comes from, for messages."""


def kv_cache_budget(
    device: jax.Device,
    kv_cache_memory_bytes: int | None,
    gpu_memory_utilization: float,
    weight_bytes: int,
    working_bytes: int,
) -> MemoryBudget:
    """What the cache may take on `device`, with `weight_bytes` still to come.

    `working_bytes` is the scratch memory of the largest program and what steps hand on beside the
    cache. The share counts from what JAX may allocate (its own limit, three quarters of the GPU
    unless the process says otherwise).
    """
    if kv_cache_memory_bytes is not None:
        return MemoryBudget(kv_cache_memory_bytes, "kv_cache_memory_bytes")
    if device.platform == "cpu":
        return MemoryBudget(CPU_KV_CACHE_BYTES, "the default on a CPU")
    stats = device.memory_stats()
    limit, in_use = stats["bytes_limit"], stats["bytes_in_use"]
    free = max(int(limit * gpu_memory_utilization) - in_use - weight_bytes - working_bytes, 0)
    source = (
        f"gpu_memory_utilization={gpu_memory_utilization:g} of {limit:,} bytes less {in_use:,} "
        f"in use, {weight_bytes:,} of weights and {working_bytes:,} of scratch memory and of "
        "state beside the cache"
    )
    # Rounded, so that the programs kept from another start, with a little more or less in use,
    # are for the same number of blocks.
    return MemoryBudget(free // _GRANULE_BYTES * _GRANULE_BYTES, source)


def num_kv_blocks(
    budget: MemoryBudget, bytes_per_block: int, block_size: int, max_model_len: int
) -> int:
    """Blocks that fit, block 0 included; ValueError if one request of max_model_len would not."""
    num_blocks = budget.kv_cache_bytes // bytes_per_block
    needed = -(-max_model_len // block_size) + 1
    if num_blocks < needed:
        fits = max(num_blocks - 1, 0) * block_size
        advice = f"max_model_len={fits} would fit" if fits else "not even one block fits"
        raise ValueError(
            f"the KV cache of one request of max_model_len={max_model_len} needs "
            f"{needed * bytes_per_block:,} bytes, but there are {budget.kv_cache_bytes:,} "
            f"({budget.source}); {advice}"
        )
    return num_blocks

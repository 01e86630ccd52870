"""The entry of paged attention: checks the shapes and calls the implementation asked for."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention import reference, tuning


def paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "P K 2 S H"],
    counters: Int32[Array, "T+1 K"],
    block_tables: Int32[Array, "B M"],
    query_starts: Int32[Array, "B+1"],
    context_lens: Int32[Array, "B"],
    num_decode_rows: Int32[Array, ""],
    *,
    scale: float,
    sliding_window: int | None = None,
    impl: Literal["reference", "triton", "mosaic"],
) -> Float[Array, "T N H"]:
    """Attend over the paged cache, which holds the queries' own keys and values too.

    Row b owns the queries query_starts[b] .. query_starts[b + 1] - 1, the last tokens of its
    context of context_lens[b] tokens; the key of position p lies in block
    block_tables[b, p // S] at offset p % S. A query sees the positions up to its own; with
    `sliding_window` only the last `sliding_window` of them, its own included (Mistral,
    arXiv:2310.06825). Query head n reads kv head n // (N // K). The cache's axis of length 2
    holds keys, then values.

    - The first `num_decode_rows` rows have exactly one query each; the others have one or
      more, or none in a padding row, whose context length is 0.
    - Tokens from query_starts[B] on are padding: their outputs are zeros.
    - Cache positions that no query of a row may see, and block table entries past its
      context, are never used: they may hold anything, NaN included.
    - q and kv_cache share a dtype, float32 or bfloat16, which is also the output's; scores,
      softmax and sums are float32.
    - `counters` are zeros for this call alone: the GPU kernels count in them.

    `rope_and_write_kv` writes the cache and makes the counters. `impl` names the implementation:
    "reference" is plain JAX, for every platform; "triton" needs an NVIDIA GPU of compute
    capability 8.0 or more and the jax-triton package (ImportError without it); "mosaic" needs
    compute capability 9.0 and serves rows of either kind by Mosaic GPU in the shapes where
    `tuning.json` knows that to be faster, the rest by Triton. Raises ValueError for shapes, dtypes
    or devices outside this contract.
    """
    _check(q, kv_cache, counters, sliding_window)
    batch = (block_tables, query_starts, context_lens, num_decode_rows)
    options = {"scale": scale, "sliding_window": sliding_window}
    if impl == "reference":
        return reference.paged_attention(q, kv_cache, *batch, **options)
    if impl in ("triton", "mosaic"):
        # Of the GPUs that this process sees; none has the attribute where Triton is interpreted.
        compute_capability = getattr(jax.devices()[0], "compute_capability", "none")
        if impl == "mosaic" and compute_capability != "9.0":
            raise ValueError(
                f"impl='mosaic' needs a GPU of compute capability 9.0, not {compute_capability}: "
                "use impl='triton'"
            )
        # Imported here so that machines without a GPU need no triton.
        from pallas_kernels.paged_attention import gpu

        num_rows, table_width = block_tables.shape
        shape = tuning.Shape(
            num_tokens=q.shape[0],
            num_rows=num_rows,
            num_heads=q.shape[1],
            num_kv_heads=kv_cache.shape[1],
            head_dim=q.shape[2],
            block_size=kv_cache.shape[3],
            table_width=table_width,
            dtype=str(q.dtype),
        )
        choice = tuning.choose(impl, compute_capability, shape)
        return gpu.paged_attention(q, kv_cache, counters, *batch, **options, choice=choice)
    raise ValueError(f"impl={impl!r} is unknown: choose 'reference', 'triton' or 'mosaic'")


def _check(q, kv_cache, counters, sliding_window) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, _, block_size, _ = kv_cache.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_kv_heads} kv heads")
    if head_dim % 16:
        raise ValueError(f"head_dim {head_dim} is not a multiple of 16")
    if block_size < 8 or block_size & (block_size - 1):
        raise ValueError(f"block size {block_size} is not a power of two of at least 8")
    cache_shape = (num_blocks, num_kv_heads, 2, block_size, head_dim)
    if kv_cache.shape != cache_shape or counters.shape != (num_tokens + 1, num_kv_heads):
        raise ValueError(
            f"shapes disagree: q {q.shape}, kv_cache {kv_cache.shape}, counters {counters.shape}; "
            "expected (T, N, H), (P, K, 2, S, H), (T + 1, K)"
        )
    if q.dtype != kv_cache.dtype or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"q and kv_cache must share dtype float32 or bfloat16, not {q.dtype}, {kv_cache.dtype}"
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window {sliding_window} must be at least 1")

"""Attention as the models call it: one ragged batch over the paged KV cache."""

from typing import Literal, NamedTuple

from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention import paged_attention

AttentionImpl = Literal["reference", "triton", "mosaic"]
KernelImpl = Literal["reference", "triton"]
"""Of the kernels that are neither attention nor products."""


def kernel_impl(impl: AttentionImpl) -> KernelImpl:
    """What goes with this attention and these products: plain JAX, or else Triton."""
    return "reference" if impl == "reference" else "triton"


class AttentionBatch(NamedTuple):
    """Which tokens belong to which request, and where their K and V live. Shared by all layers.

    Rows are ordered decode rows first; padding rows own no token and have context length 0.
    """

    positions: Int32[Array, "T"]
    """Position of each flat token in its request; 0 for padding."""
    kv_slots: Int32[Array, "T"]
    """block * block_size + offset where each token's K and V go; inside block 0 for padding."""
    block_tables: Int32[Array, "B M"]
    query_starts: Int32[Array, "B+1"]
    """Row b owns the flat tokens query_starts[b] .. query_starts[b + 1] - 1."""
    context_lens: Int32[Array, "B"]
    """Tokens of each row in the cache once this step's are written."""
    num_decode_rows: Int32[Array, ""]
    """How many leading rows have exactly one token."""


def attend(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "P K 2 S H"],
    counters: Int32[Array, "T+1 K"],
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    impl: AttentionImpl,
) -> Float[Array, "T N H"]:
    """Attend over the cache; N and K are this shard's heads."""
    return paged_attention(
        q,
        kv_cache,
        counters,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.num_decode_rows,
        scale=scale,
        sliding_window=sliding_window,
        impl=impl,
    )

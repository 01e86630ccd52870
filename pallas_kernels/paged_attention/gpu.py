"""Paged attention on NVIDIA GPUs: a kernel for each kind of row."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill, triton_kernel
from pallas_kernels.paged_attention.tiles import aligned_query_tiles, context_pieces, query_tiles
from pallas_kernels.paged_attention.tuning import Choice, MosaicTiling


# Jitted so that a model of many layers traces and lowers it once.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "choice"))
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
    sliding_window: int | None,
    choice: Choice,
) -> Float[Array, "T N H"]:
    num_tokens, num_heads, _ = q.shape
    num_rows = block_tables.shape[0]
    options = {"scale": scale, "sliding_window": sliding_window}
    batch = {
        "query_starts": query_starts,
        "context_lens": context_lens,
        "num_tokens": num_tokens,
    }

    # One query a tile: the decode rows, or in a batch of no more tokens than rows all tokens.
    only_decode = num_tokens <= num_rows
    tiles = query_tiles(
        **batch,
        first_row=0,
        end_row=num_rows + 1 if only_decode else num_decode_rows,
        tile_q=1,
        max_tiles=min(num_tokens, num_rows),
    )
    pieces = context_pieces(
        tiles, choice.cut, tile_k=choice.decode.tile_k, sliding_window=sliding_window
    )
    if isinstance(choice.decode, MosaicTiling):
        num_pieces = jnp.sum(pieces[:, 2:3] > 0, axis=0, dtype=jnp.int32)
        out = mosaic_decode.attend(
            q,
            kv_cache,
            block_tables,
            pieces,
            num_pieces,
            counters,
            tiling=choice.decode,
            **options,
        )
    else:
        out = triton_kernel.attend(
            q,
            kv_cache,
            block_tables,
            pieces,
            counters,
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            tiling=choice.decode,
            **options,
        )
    if only_decode:
        return out

    # The prefill rows and the padding tokens, into the rest of the same output.
    out = jax.new_ref(out)
    if isinstance(choice.prefill, MosaicTiling):
        tiles, num_tiles = aligned_query_tiles(
            **batch, first_row=num_decode_rows, tile_q=mosaic_prefill.TILE_Q
        )
        mosaic_prefill.attend(
            q, kv_cache, block_tables, tiles, num_tiles, out, tiling=choice.prefill, **options
        )
    else:
        tile_q = choice.prefill.tile_rows // (num_heads // kv_cache.shape[1])
        tiles = query_tiles(
            **batch,
            first_row=num_decode_rows,
            end_row=num_rows + 1,
            tile_q=tile_q,
            max_tiles=min(num_tokens, num_tokens // tile_q + num_rows + 1),
        )
        triton_kernel.attend(
            q,
            kv_cache,
            block_tables,
            tiles,
            None,
            out,
            tiling=choice.prefill,
            **options,
        )
    return jax.freeze(out)

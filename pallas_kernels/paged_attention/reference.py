"""Paged attention in plain JAX: the CPU path, and what the GPU kernels are measured against.

Both kinds of row go through `_attend`, an online softmax over chunks of the context read
through the block table: decode rows all at once, prefill rows one tile of queries at a time.
Trip counts follow the real context lengths, so short contexts in a wide table cost nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.tiles import query_tiles

_TILE_Q = 64
# Context tokens that one step gathers, over all rows: small enough to stay in a CPU's cache,
# large enough to drown the cost of a step.
_CHUNK_TOKENS = 4096
_MAX_CHUNK = 128
# A finite stand-in for minus infinity, so that rows that see nothing yet stay free of NaN.
_NEVER = -1e30


# Jitted so that a model of many layers traces it once.
@functools.partial(jax.jit, static_argnames=("scale", "sliding_window"))
def paged_attention(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "P K 2 S H"],
    block_tables: Int32[Array, "B M"],
    query_starts: Int32[Array, "B+1"],
    context_lens: Int32[Array, "B"],
    num_decode_rows: Int32[Array, ""],
    *,
    scale: float,
    sliding_window: int | None,
) -> Float[Array, "T N H"]:
    num_tokens, num_heads, head_dim = q.shape
    num_rows = block_tables.shape[0]
    num_kv_heads = kv_cache.shape[1]
    group = num_heads // num_kv_heads

    def attend(queries, positions, tables):
        """queries [R, tile_q, N, H] of R rows, positions [R, tile_q], tables [R, M]."""
        num, tile_q = positions.shape
        grouped = queries.reshape(num, tile_q, num_kv_heads, group, head_dim)
        grouped = grouped.swapaxes(1, 2).reshape(num, num_kv_heads, tile_q * group, head_dim)
        out = _attend(
            grouped.astype(jnp.float32) * scale,
            jnp.repeat(positions, group, axis=1),
            kv_cache,
            tables,
            sliding_window,
        )
        out = out.reshape(num, num_kv_heads, tile_q, group, head_dim).swapaxes(1, 2)
        return out.reshape(queries.shape).astype(q.dtype)

    # A batch of no more tokens than rows is treated as decode whole; else its decode rows,
    # whose queries are the first tokens.
    only_decode = num_tokens <= num_rows
    max_decode = min(num_tokens, num_rows)
    tiles = query_tiles(
        query_starts,
        context_lens,
        0,
        num_rows if only_decode else num_decode_rows,
        num_tokens=num_tokens,
        tile_q=1,
        max_tiles=max_decode,
    )
    row, count, position = tiles[:, 0], tiles[:, 2], tiles[:, 3]
    positions = jnp.where(count > 0, position, -1)[:, None]
    decoded = attend(q[:max_decode, None], positions, block_tables.at[row].get(mode="clip"))[:, 0]
    if only_decode:
        return decoded

    # Room for one tile past the end: dynamic slices at the edge would slide back otherwise.
    tile_q = min(_TILE_Q, num_tokens)
    out = jnp.pad(decoded, ((0, num_tokens + tile_q - max_decode), (0, 0), (0, 0)))
    padded_q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))
    tiles = query_tiles(
        query_starts,
        context_lens,
        num_decode_rows,
        num_rows,
        num_tokens=num_tokens,
        tile_q=tile_q,
        max_tiles=min(num_tokens, num_tokens // tile_q + num_rows),
    )

    def prefill_tile(i, out):
        row, first, count, position = tiles[i]
        within = jnp.arange(tile_q)
        positions = jnp.where(within < count, position + within, -1)
        queries = lax.dynamic_slice_in_dim(padded_q, first, tile_q)
        table = lax.dynamic_slice_in_dim(block_tables, row, 1)
        # Writes zeros past the tile's queries; tiles go in order, so later ones overwrite them.
        tile_out = attend(queries[None], positions[None], table)[0]
        return lax.dynamic_update_slice_in_dim(out, tile_out, first, 0)

    out = lax.fori_loop(0, jnp.sum(tiles[:, 2] > 0), prefill_tile, out)
    return out[:num_tokens]


def _attend(
    q: Float[Array, "R K Q H"],
    positions: Int32[Array, "R Q"],
    kv_cache: Float[Array, "P K 2 S H"],
    tables: Int32[Array, "R M"],
    sliding_window: int | None,
) -> Float[Array, "R K Q H"]:
    """Softmax attention of scaled float32 queries over each row's context.

    positions[r, i] is query i's position in row r's context; at -1 it sees nothing and gets
    zeros.
    """
    num_rows, num_kv_heads, _, head_dim = q.shape
    num_blocks, _, _, block_size, _ = kv_cache.shape
    chunk_blocks = max(min(_CHUNK_TOKENS // num_rows, _MAX_CHUNK) // block_size, 1)
    chunk = chunk_blocks * block_size

    # The span of context that some query of the row sees, and the block where it begins.
    end = jnp.max(positions, axis=1) + 1
    begin = jnp.zeros_like(end)
    if sliding_window is not None:
        earliest = jnp.min(jnp.where(positions < 0, end[:, None], positions), axis=1)
        begin = jnp.maximum(earliest - sliding_window + 1, 0)
    first_block = lax.div(begin, block_size)
    num_chunks = lax.div(jnp.max(end - first_block * block_size) + chunk - 1, chunk)

    # One flat axis of (block, kv head, key or value): gathers then move whole [S, H] pages.
    pages = kv_cache.reshape(num_blocks * num_kv_heads * 2, block_size, head_dim)
    kv_head = jnp.arange(num_kv_heads)[:, None]

    def body(state):
        i, peak, total, acc = state
        columns = (first_block + i * chunk_blocks)[:, None] + jnp.arange(chunk_blocks)
        # Past the context the table holds anything: clipped here, masked below.
        block = jnp.take_along_axis(tables, columns, axis=1, mode="clip")
        page = (block[:, None] * num_kv_heads + kv_head) * 2
        kv_shape = (num_rows, num_kv_heads, chunk, head_dim)
        keys = pages.at[page].get(mode="clip").reshape(kv_shape).astype(jnp.float32)
        values = pages.at[page + 1].get(mode="clip").reshape(kv_shape).astype(jnp.float32)

        position = (first_block * block_size + i * chunk)[:, None] + jnp.arange(chunk)
        in_span = (begin[:, None] <= position) & (position < end[:, None])
        # Unseen values get weight 0, but 0 * NaN is NaN.
        values = jnp.where(in_span[:, None, :, None], values, 0)
        distance = positions[:, :, None] - position[:, None, :]
        seen = distance >= 0
        if sliding_window is not None:
            seen &= distance < sliding_window
        seen = seen[:, None]

        scores = jnp.einsum("rkqh,rksh->rkqs", q, keys, precision=lax.Precision.HIGHEST)
        scores = jnp.where(seen, scores, _NEVER)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0)
        decay = jnp.exp(peak - new_peak)
        update = jnp.einsum("rkqs,rksh->rkqh", weights, values, precision=lax.Precision.HIGHEST)
        return (
            i + 1,
            new_peak,
            total * decay + jnp.sum(weights, axis=-1),
            acc * decay[..., None] + update,
        )

    peak = jnp.full_like(q[..., 0], _NEVER)
    state = (jnp.zeros_like(num_chunks), peak, jnp.zeros_like(peak), jnp.zeros_like(q))
    _, _, total, acc = lax.while_loop(lambda state: state[0] < num_chunks, body, state)
    return acc / jnp.where(total == 0, 1, total)[..., None]

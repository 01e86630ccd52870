"""Cutting the ragged queries of a batch into equal tiles of work."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


def query_tiles(
    query_starts: Int32[Array, "B+1"],
    context_lens: Int32[Array, "B"],
    first_row: int | Int32[Array, ""],
    end_row: int | Int32[Array, ""],
    *,
    num_tokens: int,
    tile_q: int,
    max_tiles: int,
) -> Int32[Array, "W 4"]:
    """Cut the queries of rows first_row .. end_row - 1 into tiles of at most `tile_q`.

    Row B stands for the padding tokens from query_starts[B] to `num_tokens`; its context is
    empty. A tile never crosses rows. Tile w is (row, first flat query, number of queries,
    position of the first query in the row's context); tiles are in the order of their
    queries, and those past the last hold no query. W = `max_tiles` must not be exceeded.
    A padding token's position is negative, so it sees nothing.
    """
    rows = jnp.arange(query_starts.size, dtype=jnp.int32)
    ends = jnp.append(query_starts[1:], num_tokens)
    contexts = jnp.append(context_lens, 0)
    num_queries = jnp.where((rows >= first_row) & (rows < end_row), ends - query_starts, 0)
    num_tiles = lax.div(num_queries + (tile_q - 1), tile_q)
    tile_ends = jnp.cumsum(num_tiles)

    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    # Not searchsorted, which is a loop on GPU.
    row = jnp.sum(tile[:, None] >= tile_ends, axis=1, dtype=jnp.int32)
    used = row < rows.size
    row = jnp.minimum(row, rows.size - 1)
    done = (tile - (tile_ends - num_tiles)[row]) * tile_q
    count = jnp.where(used, jnp.minimum(num_queries[row] - done, tile_q), 0)
    position = contexts[row] - num_queries[row] + done
    return jnp.stack([row, query_starts[row] + done, count, position], axis=1)


def aligned_query_tiles(
    query_starts: Int32[Array, "B+1"],
    context_lens: Int32[Array, "B"],
    first_row: int | Int32[Array, ""],
    *,
    num_tokens: int,
    tile_q: int,
) -> tuple[Int32[Array, "W 5"], Int32[Array, "1"]]:
    """Cut the queries of rows first_row .. B at every multiple of `tile_q` flat queries.

    Row B stands for the padding tokens, as in `query_tiles`. Tile w is (row, start, low, high,
    position): of the queries start .. start + tile_q - 1 the row owns those from start + low to
    start + high - 1, and query start would be at that position of the row's context. Returns the
    tiles in the order of their queries, and how many there are.
    """
    num_rows = context_lens.size
    rows = jnp.arange(num_rows + 1, dtype=jnp.int32)
    ends = jnp.append(query_starts[1:], num_tokens)
    contexts = jnp.append(context_lens, 0)
    first_tiles = lax.div(query_starts, tile_q)
    num_tiles = jnp.where(
        (rows >= first_row) & (ends > query_starts),
        lax.div(ends + (tile_q - 1), tile_q) - first_tiles,
        0,
    )
    tile_ends = jnp.cumsum(num_tiles)

    # Each row may share its first tile with the row before.
    max_tiles = min(num_tokens, num_tokens // tile_q + 1 + num_rows)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.sum(tile[:, None] >= tile_ends, axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows)
    start = (first_tiles[row] + tile - (tile_ends - num_tiles)[row]) * tile_q
    low = jnp.maximum(query_starts[row] - start, 0)
    high = jnp.minimum(ends[row] - start, tile_q)
    position = contexts[row] - ends[row] + start
    return jnp.stack([row, start, low, high, position], axis=1), tile_ends[-1:]

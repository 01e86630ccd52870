"""Cutting the ragged queries of a batch into equal tiles of work."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.paged_attention.tuning import ContextCut


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


def context_pieces(
    tiles: Int32[Array, "U 4"], cut: ContextCut, *, tile_k: int, sliding_window: int | None
) -> Int32[Array, "W 6"]:
    """Cut the contexts of tiles of one query into pieces of about equal length, longest first.

    A piece is its tile's (row, first flat query, number of queries, position), then which piece
    of the context it is, and of how many: of n steps of `tile_k` keys, piece i of m has those
    from n * i // m to n * (i + 1) // m - 1. The pieces of a context lie side by side. A query
    that sees nothing has one piece; pieces past the last hold no query. W = U +
    `cut.max_shares(U)`.
    """
    num_tiles = tiles.shape[0]
    _, _, count, position = tiles.T
    used = count > 0
    begin = 0 if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0)
    end = jnp.maximum(position + count, 0)
    steps = jnp.where(used, lax.div(end + (tile_k - 1), tile_k) - lax.div(begin, tile_k), 0)

    # Rounding up adds less than a piece to each context, so all together have fewer than contexts
    # plus shares.
    num_contexts = jnp.sum(steps > 0, dtype=jnp.int32)
    by_rows = jnp.maximum(lax.div(num_contexts * cut.shares_per_4_rows, 4), 1)
    if cut.most_shares is not None:
        by_rows = jnp.minimum(by_rows, cut.most_shares)
    num_shares = jnp.where(num_contexts < cut.few_rows, cut.few_shares, by_rows)
    share = jnp.maximum(lax.div(jnp.sum(steps) + (num_shares - 1), num_shares), 1)
    num_pieces = jnp.maximum(lax.div(steps + (share - 1), share), used)

    # Not a sort, nor searchsorted, which is a loop on GPU.
    length = lax.div(steps, jnp.maximum(num_pieces, 1))
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    longer = length[None, :] > length[:, None]
    same = length[None, :] == length[:, None]
    before = longer | (same & (index[None, :] < index[:, None]))
    first = jnp.sum(jnp.where(before, num_pieces[None, :], 0), axis=1)
    piece = jnp.arange(num_tiles + cut.max_shares(num_tiles), dtype=jnp.int32)
    mine = (first <= piece[:, None]) & (piece[:, None] < first + num_pieces)
    tile = jnp.sum(jnp.where(mine, index + 1, 0), axis=1) - 1  # -1 past the last piece
    return jnp.concatenate(
        [
            jnp.where(tile[:, None] < 0, 0, tiles[tile]),
            jnp.stack([piece - first[tile], num_pieces[tile]], axis=1),
        ],
        axis=1,
    )


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

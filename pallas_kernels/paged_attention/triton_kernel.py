"""Paged attention in Triton, for NVIDIA GPUs of compute capability 8.0 and later.

A program has a tile of queries that share a kv head, `TILE_Q` tokens by G heads packed into the
rows of the matrix products, and walks their context through the block table with an online softmax.
A decode row may be cut into pieces of context, a program each; the last of them to finish merges
their parts (flash-decoding, in one launch).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.tuning import TritonTiling
from pallas_kernels.triton_import import jax_triton, tl, triton

_LOG2E = math.log2(math.e)


def attend(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "P K 2 S H"],
    block_tables: Int32[Array, "B M"],
    tiles: Int32[Array, "W 4"] | Int32[Array, "W 6"],
    counters: Int32[Array, "T+1 K"] | None,
    out: jax.Ref | jax.ShapeDtypeStruct,
    *,
    scale: float,
    sliding_window: int | None,
    tiling: TritonTiling,
) -> Float[Array, "T N H"] | None:
    """Attention of the tiles' queries (see `query_tiles`), into `out` or a new array like it.

    With `counters`, zeros that no other call uses, the tiles are `context_pieces` instead.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, _, block_size = kv_cache.shape[1:4]
    num_tiles = tiles.shape[0]
    in_pieces = counters is not None
    part = (num_tiles, num_heads) if in_pieces else (1,)
    scratch = (
        jax.ShapeDtypeStruct((*part, head_dim), jnp.float32),
        jax.ShapeDtypeStruct(part, jnp.float32),
    )
    in_place = isinstance(out, jax.Ref)
    results = jax_triton.triton_call(
        q,
        kv_cache,
        block_tables,
        tiles,
        block_tables.shape[1],
        jax.new_ref(counters) if in_pieces else tiles,
        *((out,) if in_place else ()),
        kernel=_attend,
        out_type=scratch if in_place else (out, *scratch),
        # The first programs start first: every head of the longest pieces.
        grid=(num_kv_heads, num_tiles) if in_pieces else (num_tiles, num_kv_heads),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        N=num_heads,
        K=num_kv_heads,
        S=block_size,
        H=head_dim,
        H_PAD=triton.next_power_of_2(head_dim),
        SCALE=scale * _LOG2E,
        WINDOW=sliding_window,
        TILE_M=tiling.tile_rows,
        TILE_K=tiling.tile_k,
        IN_PIECES=in_pieces,
        PEEL=tiling.tile_rows > 16,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )
    return None if in_place else results[0]


@triton.jit
def _attend(
    q,
    cache,
    tables,
    tiles,
    table_width,
    arrived,
    out,
    parts,
    lse,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    IN_PIECES: tl.constexpr,
    PEEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one tile's queries, which share a kv head, over their context or a piece of it.

    The only piece of a context goes to `out`. Of several, each program leaves its own in `parts`
    [W, N, H] and `lse` [W, N], and the last to arrive merges them.
    """
    G: tl.constexpr = N // K
    if IN_PIECES:
        kv_head = tl.program_id(0)
        index = tl.program_id(1)
        tile = index * 6
        piece = tl.load(tiles + tile + 4)
        num_pieces = tl.load(tiles + tile + 5)
    else:
        # The last tiles first: in prefill they have the longest contexts.
        tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
        kv_head = tl.program_id(1)
        num_pieces: tl.constexpr = 1
    row = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + tile + 1).to(tl.int64)
    count = tl.load(tiles + tile + 2)
    position = tl.load(tiles + tile + 3)
    if count == 0:
        return

    # The rows of the matrix products: each query's G heads, side by side.
    lane = tl.arange(0, TILE_M)
    query = lane // G
    in_tile = query < count
    head_row = (first + query) * N + kv_head * G + lane % G
    dim = tl.arange(0, H_PAD)
    q_mask = in_tile[:, None] & (dim < H)[None, :]
    queries = tl.load(q + head_row[:, None] * H + dim[None, :], mask=q_mask, other=0.0)

    # The context tiles that some query of the tile sees, or this piece's even share of them.
    end = tl.maximum(position + count, 0)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(position - WINDOW + 1, 0)
    first_tile = begin // TILE_K
    end_tile = tl.cdiv(end, TILE_K)
    if IN_PIECES:
        context_tile = first_tile
        length = end_tile - first_tile
        first_tile = context_tile + length * piece // num_pieces
        end_tile = context_tile + length * (piece + 1) // num_pieces

    table = tables + row * table_width
    pages = cache + kv_head.to(tl.int64) * (2 * S * H)
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, H_PAD], tl.float32)
    if PEEL:
        # Tiles that every query sees whole need no mask: those from first_full to end_full.
        end_full = tl.maximum(tl.minimum((position + 1) // TILE_K, end_tile), first_tile)
        if WINDOW is not None:
            first_full = tl.cdiv(tl.maximum(position + count - WINDOW, 0), TILE_K)
            first_full = tl.maximum(tl.minimum(first_full, end_full), first_tile)
            peak, total, acc = _walk(
                queries, pages, table, first_tile, first_full, begin, end, position, query,
                peak, total, acc, K, S, H, H_PAD, SCALE, WINDOW, TILE_K, True, PRECISION,
            )  # fmt: skip
            first_tile = first_full
        peak, total, acc = _walk(
            queries, pages, table, first_tile, end_full, begin, end, position, query,
            peak, total, acc, K, S, H, H_PAD, SCALE, WINDOW, TILE_K, False, PRECISION,
        )  # fmt: skip
        first_tile = end_full
    peak, total, acc = _walk(
        queries, pages, table, first_tile, end_tile, begin, end, position, query,
        peak, total, acc, K, S, H, H_PAD, SCALE, WINDOW, TILE_K, True, PRECISION,
    )  # fmt: skip

    # Padding tokens saw nothing: zeros.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    if num_pieces > 1:
        # A piece is of one query.
        part = index * N + kv_head * G + lane
        tl.store(parts + part[:, None] * H + dim[None, :], acc, mask=q_mask)
        tl.store(lse + part, peak + tl.log2(total), mask=in_tile)
        tl.debug_barrier()  # The whole program's stores, before one thread announces them.
        before = tl.atomic_add(arrived + first * K + kv_head, 1, sem="acq_rel")
        if before != num_pieces - 1:
            return
        acc = _merge(parts, lse, part - piece * N, num_pieces, in_tile, N, H, H_PAD, TILE_M)
    tl.store(out + head_row[:, None] * H + dim[None, :], acc.to(out.dtype.element_ty), mask=q_mask)


@triton.jit
def _merge(
    parts,
    lse,
    part,
    num_parts,
    in_tile,
    N: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """The attention over all parts of a context, of which `part` [TILE_M] are the first ones."""
    dim = tl.arange(0, H_PAD)
    mask = in_tile[:, None] & (dim < H)[None, :]
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, H_PAD], tl.float32)
    for base in range(0, num_parts, 4):
        # Four at a time, so that their loads wait together.
        for i in tl.static_range(4):
            # Past L1, which need not see what other multiprocessors wrote.
            exists = base + i < num_parts
            other = part + (base + i) * N
            log = tl.load(
                lse + other, mask=in_tile & exists, other=float("-inf"), cache_modifier=".cg"
            )
            values = tl.load(
                parts + other[:, None] * H + dim[None, :],
                mask=mask & exists,
                other=0.0,
                cache_modifier=".cg",
            )
            # The first part exists, so there is a peak.
            new_peak = tl.maximum(peak, log)
            decay = tl.exp2(peak - new_peak)
            weight = tl.exp2(log - new_peak)
            total = total * decay + weight
            acc = acc * decay[:, None] + values * weight[:, None]
            peak = new_peak
    return acc / total[:, None]


@triton.jit
def _walk(
    queries,
    pages,
    table,
    first_tile,
    end_tile,
    begin,
    end,
    position,
    query,
    peak,
    total,
    acc,
    K: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_K: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The online softmax over context tiles first_tile .. end_tile - 1, through the block table.

    Positions outside begin .. end - 1 are not read. Where not MASKED, every query sees them all.
    """
    dim = tl.arange(0, H_PAD)
    in_dim = (dim < H)[None, :]
    key = first_tile * TILE_K + tl.arange(0, TILE_K)
    block = tl.load(table + key // S, mask=(begin <= key) & (key < end), other=0)
    for _ in range(first_tile, end_tile):
        # The next block ids come in while this tile is worked on.
        later = key + TILE_K
        next_block = tl.load(table + later // S, mask=(begin <= later) & (later < end), other=0)

        # Not key % S: a key of unknown sign would take many more registers.
        page = (block.to(tl.int64) * (2 * K) * S + (key & (S - 1))) * H
        pointers = pages + page[:, None] + dim[None, :]
        in_span = (begin <= key) & (key < end)
        if MASKED:
            kv_mask = in_span[:, None] & in_dim
            keys = tl.load(pointers, mask=kv_mask, other=0.0)
            values = tl.load(pointers + S * H, mask=kv_mask, other=0.0)
        elif H == H_PAD:
            keys = tl.load(pointers)
            values = tl.load(pointers + S * H)
        else:
            keys = tl.load(pointers, mask=in_dim, other=0.0)
            values = tl.load(pointers + S * H, mask=in_dim, other=0.0)

        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            distance = position + query[:, None] - key[None, :]
            seen = (distance >= 0) & in_span[None, :]
            if WINDOW is not None:
                seen = seen & (distance < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * SCALE)
        # A row that has seen nothing yet has no peak to subtract: -inf less -inf is NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(scores * SCALE - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = new_peak
        block, key = next_block, later
    return peak, total, acc

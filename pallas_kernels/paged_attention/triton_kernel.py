"""Paged attention in Triton, for NVIDIA GPUs of compute capability 8.0 and later.

Three kernels: `_write_kv` scatters the new keys and values into the cache; `_attend` gives one
program the tile of queries that share a kv head, `TILE_Q` tokens by G heads packed into the
rows of the matrix products, and walks their context through the block table with an online
softmax; `_combine` merges the parts when a context was split between programs, as decode at
small batches needs to fill the GPU (flash-decoding).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.tiles import query_tiles
from pallas_kernels.triton_import import jax_triton, tl, triton

# Shared memory for one tile of keys, and for one of values; a tile of queries takes twice that.
# With the stages below all fits in the 99 KiB of compute capability 8.6 and 8.9.
_KV_TILE_BYTES = 16 * 1024
# A decode batch of fewer programs than this leaves a large GPU half idle: its contexts are split,
# into about so many programs altogether. From here up a split costs more than it gains (H200).
_FULL_PROGRAMS = 128
_SPLIT_PROGRAMS = 256
_MAX_SPLITS = 32
_LOG2E = math.log2(math.e)


def paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: Float[Array, "P K 2 S H"],
    block_tables: Int32[Array, "B M"],
    query_starts: Int32[Array, "B+1"],
    context_lens: Int32[Array, "B"],
    kv_slots: Int32[Array, "T"],
    num_decode_rows: Int32[Array, ""],
    *,
    scale: float,
    sliding_window: int | None,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K 2 S H"]]:
    num_tokens, num_heads, head_dim = q.shape
    num_rows = block_tables.shape[0]
    num_kv_heads, _, block_size, _ = kv_cache.shape[1:]
    group = num_heads // num_kv_heads
    padded_dim = triton.next_power_of_2(head_dim)
    dims = {"H": head_dim, "H_PAD": padded_dim}

    cache = jax.new_ref(kv_cache)
    jax_triton.triton_call(
        k,
        v,
        kv_slots,
        cache,
        kernel=_write_kv,
        out_type=(),
        grid=(num_tokens,),
        K=num_kv_heads,
        K_PAD=triton.next_power_of_2(num_kv_heads),
        S=block_size,
        **dims,
    )
    kv_cache = jax.freeze(cache)

    row_bytes = padded_dim * q.dtype.itemsize
    tile_k = min(max(_KV_TILE_BYTES // row_bytes, 16), 128)
    min_rows = max(triton.next_power_of_2(group), 16)

    def attend(tiles, tile_rows, num_splits, out):
        """Call `_attend`; `out` is a shape to make, or a ref to write into."""
        refs = (out,) if isinstance(out, jax.Ref) else ()
        lse = jax.ShapeDtypeStruct((num_tokens, num_heads, num_splits), jnp.float32)
        return jax_triton.triton_call(
            q,
            kv_cache,
            block_tables,
            tiles,
            block_tables.shape[1],
            num_splits,
            *refs,
            kernel=_attend,
            out_type=(lse,) if refs else (out, lse),
            grid=(tiles.shape[0], num_kv_heads, num_splits),
            num_warps=4 if tile_rows < 64 else 8,
            num_stages=3 if tile_rows < 64 else 2,
            N=num_heads,
            K=num_kv_heads,
            S=block_size,
            SCALE=scale * _LOG2E,
            WINDOW=sliding_window,
            TILE_M=tile_rows,
            TILE_K=tile_k,
            PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
            **dims,
        )

    # One query a tile: the decode rows, or in a batch of no more tokens than rows all tokens.
    # Decode row b's query is token b.
    only_decode = num_tokens <= num_rows
    num_tiles = min(num_tokens, num_rows)
    tiles_of = {
        "query_starts": query_starts,
        "context_lens": context_lens,
        "num_tokens": num_tokens,
    }
    tiles = query_tiles(
        **tiles_of,
        first_row=0,
        end_row=num_rows + 1 if only_decode else num_decode_rows,
        tile_q=1,
        max_tiles=num_tiles,
    )
    num_splits = _num_splits(num_tiles * num_kv_heads, block_tables.shape[1] * block_size // tile_k)
    if num_splits == 1:
        out, _ = attend(tiles, min_rows, 1, jax.typeof(q))
    else:
        parts = jax.ShapeDtypeStruct((num_tokens, num_heads, num_splits, head_dim), jnp.float32)
        parts, lse = attend(tiles, min_rows, num_splits, parts)
        out = jax_triton.triton_call(
            parts,
            lse,
            tiles,
            kernel=_combine,
            out_type=jax.typeof(q),
            grid=(num_tiles, num_heads),
            num_warps=2,
            N=num_heads,
            SPLITS=num_splits,
            **dims,
        )
    if only_decode:
        return out, kv_cache

    # The prefill rows and the padding tokens, into the rest of the same output.
    most_rows = 32 if q.dtype == jnp.float32 else 128
    tile_rows = max(min(2 * _KV_TILE_BYTES // row_bytes, most_rows), min_rows)
    tile_q = tile_rows // group
    tiles = query_tiles(
        **tiles_of,
        first_row=num_decode_rows,
        end_row=num_rows + 1,
        tile_q=tile_q,
        max_tiles=min(num_tokens, num_tokens // tile_q + num_rows + 1),
    )
    out = jax.new_ref(out)
    attend(tiles, tile_rows, 1, out)
    return jax.freeze(out), kv_cache


def _num_splits(num_programs: int, max_splits: int) -> int:
    """How many ways to split every context, a power of two."""
    if num_programs >= _FULL_PROGRAMS:
        return 1
    wanted = min(_SPLIT_PROGRAMS // num_programs, max_splits, _MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


@triton.jit
def _write_kv(
    k,
    v,
    slots,
    cache,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.arange(0, K_PAD)[:, None]
    dim = tl.arange(0, H_PAD)[None, :]
    mask = (head < K) & (dim < H)
    source = (token * K + head) * H + dim
    target = ((slot // S * K + head) * 2 * S + slot % S) * H + dim
    tl.store(cache + target, tl.load(k + source, mask=mask), mask=mask)
    tl.store(cache + target + S * H, tl.load(v + source, mask=mask), mask=mask)


@triton.jit
def _attend(
    q,
    cache,
    tables,
    tiles,
    table_width,
    num_splits,
    out,
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
    PRECISION: tl.constexpr,
):
    """out [T, N, splits, H] and lse [T, N, splits]: softmax over a split, and its log2 sum."""
    G: tl.constexpr = N // K
    tile = tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
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
    in_dim = dim < H
    q_mask = in_tile[:, None] & in_dim[None, :]
    queries = tl.load(q + head_row[:, None] * H + dim[None, :], mask=q_mask, other=0.0)

    # This split's share of the context tiles that some query of the tile sees.
    end = tl.maximum(position + count, 0)
    begin = 0
    if WINDOW is not None:
        begin = tl.maximum(position - WINDOW + 1, 0)
    first_tile = begin // TILE_K
    end_tile = tl.cdiv(end, TILE_K)
    share = tl.cdiv(end_tile - first_tile, num_splits)
    first_tile += split * share
    end_tile = tl.minimum(first_tile + share, end_tile)

    table = tables + row * table_width
    step = tl.arange(0, TILE_K)
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, H_PAD], tl.float32)
    key = first_tile * TILE_K + step
    block = tl.load(table + key // S, mask=(begin <= key) & (key < end), other=0)
    for i in range(first_tile, end_tile):
        key = i * TILE_K + step
        # The next block ids come in while this tile is worked on.
        later = key + TILE_K
        next_block = tl.load(table + later // S, mask=(begin <= later) & (later < end), other=0)

        page = ((block.to(tl.int64) * K + kv_head) * 2 * S + key % S) * H
        in_span = (begin <= key) & (key < end)
        kv_mask = in_span[:, None] & in_dim[None, :]
        pointers = cache + page[:, None] + dim[None, :]
        keys = tl.load(pointers, mask=kv_mask, other=0.0)
        values = tl.load(pointers + S * H, mask=kv_mask, other=0.0)

        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * SCALE
        distance = position + query[:, None] - key[None, :]
        seen = (distance >= 0) & in_span[None, :]
        if WINDOW is not None:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no peak to subtract: -inf less -inf is NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = new_peak
        block = next_block

    # Padding tokens, and splits past the end of a short context, saw nothing: zeros, log 0.
    total_or_one = tl.where(total == 0.0, 1.0, total)
    part = head_row * num_splits + split
    result = (acc / total_or_one[:, None]).to(out.dtype.element_ty)
    tl.store(out + part[:, None] * H + dim[None, :], result, mask=q_mask)
    tl.store(lse + part, peak + tl.log2(total_or_one), mask=in_tile)


@triton.jit
def _combine(
    parts,
    lse,
    tiles,
    out,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
):
    tile = tl.program_id(0) * 4
    token = tl.load(tiles + tile + 1).to(tl.int64)
    if tl.load(tiles + tile + 2) == 0:
        return
    head_row = token * N + tl.program_id(1)
    split = head_row * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, H_PAD)[None, :]
    logs = tl.load(lse + split)
    peak = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, axis=0)
    values = tl.load(parts + split[:, None] * H + dim, mask=dim < H, other=0.0)
    mixed = tl.sum(values * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    dim = tl.arange(0, H_PAD)
    tl.store(out + head_row * H + dim, mixed.to(out.dtype.element_ty), mask=dim < H)

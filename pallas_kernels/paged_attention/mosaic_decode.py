"""Attention of decode rows over the paged cache in Mosaic GPU, for Hopper GPUs.

A persistent grid: each block of threads takes one (piece of context, kv head) after another, the
longest pieces first. From a block's third on they are not dealt out, as memory serves some
multiprocessors faster. Of a block's two warpgroups one fetches, copying each cache block with the
TMA unit, also for the pieces to come, and one computes. The few queries that share a kv head are
the columns of the products and the keys their rows, so the tensor cores read keys and values where
the TMA unit has put them, and nothing else of the GPU touches them: at a large batch it is energy
that decode waits for.

A context may be cut into pieces; the last of them to finish merges their parts (flash-decoding, in
one launch).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic_warp import in_one_warp
from pallas_kernels.paged_attention.mosaic_block import ThreadBlock, drain
from pallas_kernels.paged_attention.mosaic_count import count, take
from pallas_kernels.paged_attention.tuning import MOSAIC_QUERIES, MosaicTiling, decode_blocks

_LOG2E = math.log2(math.e)
# A finite stand-in for minus infinity, so that what sees nothing yet stays free of NaN.
_NEVER = -1e30
_COLUMNS = MOSAIC_QUERIES
_ROW = plgpu.Layout.WGMMA.reduce(0)
"""The layout of a value for each column."""


def attend(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "P K 2 S H"],
    block_tables: Int32[Array, "B M"],
    pieces: Int32[Array, "W 6"],
    num_pieces: Int32[Array, "1"],
    counters: Int32[Array, "T+1 K"],
    *,
    scale: float,
    sliding_window: int | None,
    tiling: MosaicTiling,
) -> Float[Array, "T N H"]:
    """Attention of the queries of the first `num_pieces` of `context_pieces`; other rows of the
    result are not written. `counters` are zeros that no other call uses."""
    num_tokens, num_heads, head_dim = q.shape
    cache_blocks, num_kv_heads, _, block_size, _ = kv_cache.shape
    num_stages, tile_k = tiling.num_stages, tiling.tile_k
    # One axis of pages and one of query heads, so that a copy's index is one number.
    pages = kv_cache.reshape(cache_blocks * num_kv_heads * 2, block_size, head_dim)
    heads = q.reshape(num_tokens * num_heads, head_dim)

    def paged_decode(*refs):
        def run(*scratch):
            block = _Block(*refs, *scratch, tiling, scale * _LOG2E, sliding_window)
            wg = lax.axis_index("wg")
            pl.when(wg == 0)(block.compute)
            pl.when(wg == 1)(block.fetch)

        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        kv_tiles = plgpu.SMEM((num_stages, tile_k, head_dim), q.dtype, transforms=swizzled)
        kv_ready = plgpu.Barrier(num_arrivals=tile_k // block_size, num_barriers=num_stages)
        pl.run_scoped(
            run,
            plgpu.SMEM((2, _COLUMNS, head_dim), q.dtype),
            plgpu.SMEM((_COLUMNS, head_dim), q.dtype, transforms=swizzled),
            plgpu.SMEM((_COLUMNS, tile_k), q.dtype, transforms=swizzled),
            plgpu.SMEM((_COLUMNS, head_dim), q.dtype),
            plgpu.SMEM((1,), jnp.int32),
            plgpu.SMEM((2, 1), jnp.int32),
            kv_tiles,
            kv_tiles,
            # The queries, and which item follows.
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
            kv_ready,
            kv_ready,
            plgpu.Barrier(num_arrivals=1, num_barriers=num_stages),
            collective_axes="wg",
        )

    parts = (pieces.shape[0], num_kv_heads)
    out, _, _ = plgpu.kernel(
        paged_decode,
        out_type=(
            jax.ShapeDtypeStruct(heads.shape, q.dtype),
            jax.ShapeDtypeStruct((*parts, head_dim, _COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((*parts, 2, _COLUMNS), jnp.float32),
        ),
        grid=(decode_blocks(tiling, head_dim),),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(heads, pages, block_tables, pieces, num_pieces, jax.new_ref(counters))
    return out.reshape(q.shape)


class _Item:
    """A piece of a query's context and the kv head to work on; as the kernel sees them."""

    def __init__(self, index, head, row, query, count, position, piece, num_pieces):
        self.index, self.head, self.row, self.query = index, head, row, query
        self.end = jnp.maximum(position + count, 0)
        self.position, self.piece, self.num_pieces = position, piece, num_pieces

    def begin(self, sliding_window):
        if sliding_window is None:
            return jnp.int32(0)
        return jnp.maximum(self.position - sliding_window + 1, 0)


@dataclasses.dataclass
class _Block(ThreadBlock):
    """What one block of threads works with."""

    heads: jax.Ref
    pages: jax.Ref
    tables: jax.Ref
    pieces: jax.Ref
    num_used: jax.Ref
    counters: jax.Ref
    """[T + 1, K]: the pieces of a context that are done, and in the last row the items taken."""
    out: jax.Ref
    parts: jax.Ref
    """[W, K, H, columns]: sums of values by weight, of a piece that is not the only one."""
    sums: jax.Ref
    """[W, K, 2, columns]: their peak, and the sum of the weights."""
    rows_smem: jax.Ref
    """[2, columns, H]: the queries of this item and the next, rows one after the other: the TMA
    unit could put no rows but every eighth where the products want them."""
    q_smem: jax.Ref
    """[columns, H]"""
    weights_smem: jax.Ref
    """[columns, tile_k]"""
    out_smem: jax.Ref
    """[columns, H]"""
    arrived_smem: jax.Ref
    taken_smem: jax.Ref
    """[2, 1]: in the slot of an item's queries, the number taken for the item after it."""
    k_smem: jax.Ref
    v_smem: jax.Ref
    q_ready: jax.Ref
    q_free: jax.Ref
    k_ready: jax.Ref
    v_ready: jax.Ref
    kv_free: jax.Ref
    tiling: MosaicTiling
    scale: float
    sliding_window: int | None

    def __post_init__(self):
        self.tile_k, self.num_stages = self.tiling.tile_k, self.tiling.num_stages
        _, self.num_kv_heads, self.head_dim, _ = self.parts.shape
        num_tokens = self.counters.shape[0] - 1
        self.group = self.heads.shape[0] // (num_tokens * self.num_kv_heads)

    def load_item(self, place):
        """The fields of an item by its place among all, the longest first; past the last, some that
        nobody uses."""
        item = jnp.minimum(place, self.pieces.shape[0] * self.num_kv_heads - 1)
        index = lax.div(item, self.num_kv_heads)
        fields = (self.pieces[index, j] for j in range(6))
        return index, lax.rem(item, self.num_kv_heads), *fields

    def for_each_item(self, taken, body):
        """done = body(i, item, done) over the block's items; done counts tiles of keys. `taken(i)`,
        called before the i-th, gives the number taken for the item after it; for i = 0 anything.
        Returns how many items there were, and done."""
        block, num_blocks = lax.axis_index("block"), lax.axis_size("block")
        num_items = self.num_used[0] * self.num_kv_heads

        def step(carry):
            i, _, fields, done = carry
            # The first two are dealt, back and forth, so that the first copies do not wait for the
            # counter.
            number = taken(i)
            following = 2 * num_blocks + jnp.where(i > 0, number, -1 - block)
            # Its loads are under way while this item is worked on.
            following_fields = self.load_item(following)
            return i + 1, following, following_fields, body(i, _Item(*fields), done)

        carry = jnp.int32(0), block, self.load_item(block), jnp.int32(0)
        i, _, _, done = lax.while_loop(lambda carry: carry[1] < num_items, step, carry)
        return i, done

    def key_tiles(self, item):
        """First and end of the tiles of keys that hold the item's part of the span."""
        first = lax.div(item.begin(self.sliding_window), self.tile_k)
        length = lax.div(item.end + self.tile_k - 1, self.tile_k) - first
        return (
            first + lax.div(length * item.piece, item.num_pieces),
            first + lax.div(length * (item.piece + 1), item.num_pieces),
        )

    def rows_of(self, item):
        """(The first of `columns` rows of all query heads that have the item's; where in them)."""
        wanted = (item.query * self.num_kv_heads + item.head) * self.group
        first = jnp.minimum(wanted, self.heads.shape[0] - _COLUMNS)
        return first, wanted - first

    def fetch(self):
        """Copy queries, keys and values of all items into shared memory, as room comes free."""

        def taken(i):
            slot = lax.rem(i, 2)
            pl.when(i >= 2)(lambda: plgpu.barrier_wait(self.q_free.at[slot]))
            counter = self.counters.at[self.counters.shape[0] - 1, 0]
            return lax.cond(
                i > 0, lambda: take(counter, self.taken_smem.at[slot]), lambda: jnp.int32(0)
            )

        def fetch_item(i, item, done):
            slot = lax.rem(i, 2)
            # After what was taken is in shared memory: who waits for the queries sees it.
            plgpu.barrier_arrive(self.q_ready.at[slot])
            first, _ = self.rows_of(item)
            plgpu.copy_gmem_to_smem(
                self.heads.at[pl.ds(first, _COLUMNS)],
                self.rows_smem.at[slot],
                self.q_ready.at[slot],
            )
            span = item.begin(self.sliding_window), item.end
            first, last = self.key_tiles(item)
            self.fetch_tiles(item.row, item.head, span, (first, last), done, self.kv_free)
            return done + last - first

        num_own, done = self.for_each_item(taken, fetch_item)
        drain(self.q_free, num_own)
        in_one_warp(functools.partial(drain, self.kv_free, done))

    def compute(self):
        def taken(i):
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(self.q_ready.at[slot])
            return self.taken_smem[slot, 0]

        def compute_item(i, item, done):
            slot = lax.rem(i, 2)
            first, last = self.key_tiles(item)
            rows = self.rows_smem.at[slot].transpose((1, 0))
            self.q_smem.transpose((1, 0))[...] = plgpu.load(
                rows, layout=plgpu.Layout.WGMMA, optimized=False
            )
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.q_free.at[slot])
            acc, peak, totals = self.attend_tiles(item, first, last, done)
            total = totals.sum(axis=0)

            @pl.when(item.num_pieces == 1)
            def _():
                self.store(item, acc, total)

            @pl.when(item.num_pieces > 1)
            def _():
                self.parts[item.index, item.head] = acc
                self.sums[item.index, item.head, 0] = peak
                self.sums[item.index, item.head, 1] = total
                before = count(self.counters.at[item.query, item.head], self.arrived_smem)
                pl.when(before == item.num_pieces - 1)(lambda: self.merge(item))

            return done + last - first

        self.for_each_item(taken, compute_item)

    def attend_tiles(self, item, first, last, done):
        """(values by weight [H, columns], their peak [columns], the weights [tile_k, columns], to
        be summed) of the tiles of keys first .. last - 1, in float32."""
        begin, end = item.begin(self.sliding_window), item.end
        tile_k, head_dim = self.tile_k, self.head_dim

        def step(j, carry):
            acc, peak, totals = carry
            slot = lax.rem(done + j - first, self.num_stages)
            row = plgpu.broadcasted_iota(
                jnp.int32, (tile_k, _COLUMNS), 0, layout=plgpu.Layout.WGMMA
            )
            key = row + j * tile_k

            def scores_of(scores_acc):
                plgpu.wgmma(scores_acc, self.k_smem.at[slot], self.q_smem.transpose((1, 0)))
                return scores_acc[...]

            plgpu.barrier_wait(self.k_ready.at[slot])
            scores = pl.run_scoped(scores_of, plgpu.ACC((tile_k, _COLUMNS), jnp.float32))
            scores = jnp.where((key >= begin) & (key < end), scores, -jnp.inf)
            new_peak = jnp.maximum(peak, scores.max(axis=0) * self.scale)
            decay = jnp.exp2(peak - new_peak)
            shift = lax.broadcast_in_dim(new_peak, scores.shape, [1])
            weights = jnp.exp2(scores * self.scale - shift)
            totals = totals * lax.broadcast_in_dim(decay, totals.shape, [1]) + weights
            self.weights_smem.transpose((1, 0))[...] = weights.astype(self.heads.dtype)
            plgpu.barrier_wait(self.v_ready.at[slot])

            # Values outside the span: their weight is 0, but 0 * NaN is NaN.
            @pl.when((j * tile_k + tile_k > end) | (j * tile_k < begin))
            def _():
                values = plgpu.load(self.v_smem.at[slot], layout=plgpu.Layout.WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
                key = row + j * tile_k
                self.v_smem.at[slot][...] = jnp.where((key >= begin) & (key < end), values, 0)

            plgpu.commit_smem()

            def values_of(values_acc):
                values_acc[...] = acc * lax.broadcast_in_dim(decay, acc.shape, [1])
                plgpu.wgmma(
                    values_acc,
                    self.v_smem.at[slot].transpose((1, 0)),
                    self.weights_smem.transpose((1, 0)),
                )
                return values_acc[...]

            acc = pl.run_scoped(values_of, plgpu.ACC((head_dim, _COLUMNS), jnp.float32))
            plgpu.barrier_arrive(self.kv_free.at[slot])
            return acc, new_peak, totals

        carry = (
            _full((head_dim, _COLUMNS), 0, plgpu.Layout.WGMMA),
            _full((_COLUMNS,), _NEVER, _ROW),
            _full((tile_k, _COLUMNS), 0, plgpu.Layout.WGMMA),
        )
        return lax.fori_loop(first, last, step, carry)

    def merge(self, item):
        """The attention over all pieces of the item's context."""
        first = item.index - item.piece

        def step(i, carry):
            acc, peak, total = carry
            part = plgpu.load(
                self.parts.at[first + i, item.head], layout=plgpu.Layout.WGMMA, optimized=False
            )
            part_peak, part_total = (
                plgpu.load(self.sums.at[first + i, item.head, n], layout=_ROW, optimized=False)
                for n in range(2)
            )
            new_peak = jnp.maximum(peak, part_peak)
            decay, weight = jnp.exp2(peak - new_peak), jnp.exp2(part_peak - new_peak)
            old, new = (lax.broadcast_in_dim(x, acc.shape, [1]) for x in (decay, weight))
            return acc * old + part * new, new_peak, total * decay + part_total * weight

        carry = (
            _full((self.head_dim, _COLUMNS), 0, plgpu.Layout.WGMMA),
            _full((_COLUMNS,), _NEVER, _ROW),
            _full((_COLUMNS,), 0, _ROW),
        )
        acc, _, total = lax.fori_loop(0, item.num_pieces, step, carry)
        self.store(item, acc, total)

    def store(self, item, acc, total):
        """Write the item's result; returns when shared memory is free."""
        # Padding tokens saw nothing: zeros.
        total = jnp.where(total == 0, 1.0, total)
        result = acc / lax.broadcast_in_dim(total, acc.shape, [1])
        self.out_smem.transpose((1, 0))[...] = result.astype(self.heads.dtype)
        plgpu.commit_smem()
        first, offset = self.rows_of(item)
        plgpu.copy_smem_to_gmem(
            self.out_smem.at[pl.ds(offset, self.group)],
            self.out.at[pl.ds(first + offset, self.group)],
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

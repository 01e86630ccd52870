"""Attention of prefill rows over the paged cache in Mosaic GPU, for Hopper GPUs.

A persistent grid: each block of threads works through its share of (tile of queries, head), the
longest contexts first. Of its three warpgroups one fetches and two compute, with a queue of key
and value tiles between them (FlashAttention 3, arXiv:2407.08608). The fetching one reads the block
table and copies each cache block with the TMA unit; it runs ahead, also into the next tile of
queries. The computing ones issue the product for the next scores before the one for the last
values, so that the second product runs under the softmax.
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
from pallas_kernels.paged_attention.tuning import MosaicTiling

# Queries of one warpgroup: the rows of a wgmma instruction.
_WG_ROWS = 64
_COMPUTE_WGS = 2
TILE_Q = _COMPUTE_WGS * _WG_ROWS
# One block of threads for each multiprocessor of an H100 or H200.
_NUM_BLOCKS = 132
_LOG2E = math.log2(math.e)
# A finite stand-in for minus infinity, so that rows that see nothing yet stay free of NaN.
_NEVER = -1e30


def attend(
    q: Float[Array, "T N H"],
    kv_cache: Float[Array, "P K 2 S H"],
    block_tables: Int32[Array, "B M"],
    tiles: Int32[Array, "W 5"],
    num_tiles: Int32[Array, "1"],
    out: jax.Ref,
    *,
    scale: float,
    sliding_window: int | None,
    tiling: MosaicTiling,
) -> None:
    """Write the attention of the tiles' queries into `out` [T, N, H].

    `tiles` is what `aligned_query_tiles` makes of TILE_Q. See `tuning.fits_mosaic` for the shapes
    allowed.
    """
    head_dim = q.shape[2]
    cache_blocks, num_kv_heads, _, block_size, _ = kv_cache.shape
    num_stages, tile_k = tiling.num_stages, tiling.tile_k
    # One axis of pages, so that a copy's index is one number.
    pages = kv_cache.reshape(cache_blocks * num_kv_heads * 2, block_size, head_dim)

    def paged_prefill(*refs):
        def run(*scratch):
            block = _Block(*refs, *scratch, tiling, num_kv_heads, scale * _LOG2E, sliding_window)
            wg = lax.axis_index("wg")
            pl.when(wg < _COMPUTE_WGS)(functools.partial(block.compute, wg))
            pl.when(wg == _COMPUTE_WGS)(block.fetch)

        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        rows_shape = (_COMPUTE_WGS, _WG_ROWS, head_dim)
        kv_tiles = plgpu.SMEM((num_stages, tile_k, head_dim), q.dtype, transforms=swizzled)
        kv_ready = plgpu.Barrier(num_arrivals=tile_k // block_size, num_barriers=num_stages)
        kv_free = plgpu.Barrier(num_arrivals=_COMPUTE_WGS, num_barriers=num_stages)
        q_barrier = plgpu.Barrier(num_arrivals=_COMPUTE_WGS, num_barriers=2)
        pl.run_scoped(
            run,
            plgpu.SMEM((2, *rows_shape), q.dtype, transforms=swizzled),
            plgpu.SMEM(rows_shape, q.dtype),
            kv_tiles,
            kv_tiles,
            *(q_barrier, q_barrier, kv_ready, kv_ready, kv_free, kv_free),
            collective_axes="wg",
        )

    plgpu.kernel(
        paged_prefill,
        out_type=(),
        grid=(_NUM_BLOCKS,),
        grid_names=("block",),
        num_threads=_COMPUTE_WGS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(q, pages, block_tables, tiles, num_tiles, out)


class _Item:
    """A tile of queries, and the query head to work on; as the kernel sees them."""

    def __init__(self, head, row, start, low, high, position):
        self.head, self.row, self.start = head, row, start
        self.low, self.high, self.position = low, high, position

    def key_span(self, sliding_window):
        """First and end of the positions that some query of the tile sees."""
        end = jnp.maximum(self.position + self.high, 0)
        if sliding_window is None:
            return jnp.int32(0), end
        return jnp.maximum(self.position + self.low - sliding_window + 1, 0), end


@dataclasses.dataclass
class _Block(ThreadBlock):
    """What one block of threads works with."""

    q: jax.Ref
    pages: jax.Ref
    tables: jax.Ref
    tiles: jax.Ref
    num_tiles: jax.Ref
    out: jax.Ref
    q_smem: jax.Ref
    """[2, warpgroups, 64, H]: the queries of this item and the next; results on their way out."""
    rows_smem: jax.Ref
    """[warpgroups, 64, H], rows one after the other: results that leave row by row."""
    k_smem: jax.Ref
    v_smem: jax.Ref
    q_ready: jax.Ref
    q_free: jax.Ref
    k_ready: jax.Ref
    v_ready: jax.Ref
    k_free: jax.Ref
    v_free: jax.Ref
    tiling: MosaicTiling
    num_kv_heads: int
    scale: float
    sliding_window: int | None

    def __post_init__(self):
        _, self.num_heads, self.head_dim = self.q.shape
        self.tile_k, self.num_stages = self.tiling.tile_k, self.tiling.num_stages
        self.num_items = self.num_tiles[0] * self.num_heads

    def load_item(self, i):
        """The fields of this block's item i, the last tiles of queries first."""
        item = jnp.maximum(self.num_items - 1 - self.place(i), 0)
        tile = lax.div(item, self.num_heads)
        return lax.rem(item, self.num_heads), *(self.tiles[tile, j] for j in range(5))

    def place(self, i):
        """Where this block's item i stands among those of all blocks, the longest first."""
        # Back and forth, so that no block always gets the longest item of a round.
        block, num_blocks = lax.axis_index("block"), lax.axis_size("block")
        return i * num_blocks + block + lax.rem(i, 2) * (num_blocks - 1 - 2 * block)

    def num_own_items(self):
        rounds = lax.div(self.num_items, lax.axis_size("block"))
        return rounds + (self.place(rounds) < self.num_items).astype(jnp.int32)

    def for_each_item(self, body):
        """done = body(i, item, done) over the block's items; done counts tiles of keys."""

        def step(i, carry):
            done, fields = carry
            # Its loads are under way while this item is worked on.
            following = self.load_item(i + 1)
            return body(i, _Item(*fields), done), following

        first = (jnp.int32(0), self.load_item(0))
        return lax.fori_loop(0, self.num_own_items(), step, first)[0]

    def key_tiles(self, item):
        """First and end of the tiles of keys that hold the item's span."""
        begin, end = item.key_span(self.sliding_window)
        return lax.div(begin, self.tile_k), lax.div(end + self.tile_k - 1, self.tile_k)

    def rows_of(self, item, wg):
        """A warpgroup's share of the item's queries, in an array of all queries."""
        start = pl.multiple_of(item.start + wg * _WG_ROWS, _WG_ROWS)
        return pl.ds(start, _WG_ROWS), item.head

    def fetch(self):
        """Copy queries, keys and values of all items into shared memory, as room comes free."""
        plgpu.set_max_registers(40, action="decrease")
        group = self.num_heads // self.num_kv_heads

        def fetch_item(i, item, done):
            slot = lax.rem(i, 2)
            pl.when(i >= 2)(lambda: plgpu.barrier_wait(self.q_free.at[slot]))
            for wg in range(_COMPUTE_WGS):
                plgpu.copy_gmem_to_smem(
                    self.q.at[self.rows_of(item, wg)],
                    self.q_smem.at[slot, wg],
                    self.q_ready.at[slot],
                )

            span = item.key_span(self.sliding_window)
            kv_head = lax.div(item.head, group)
            first, last = self.key_tiles(item)
            frees = self.k_free, self.v_free
            self.fetch_tiles(item.row, kv_head, span, (first, last), done, *frees)
            return done + last - first

        done = self.for_each_item(fetch_item)
        drain(self.q_free, self.num_own_items())
        in_one_warp(functools.partial(drain, self.k_free, done))
        in_one_warp(functools.partial(drain, self.v_free, done))

    def compute(self, wg):
        plgpu.set_max_registers(232, action="increase")

        def compute_item(i, item, done):
            slot = lax.rem(i, 2)
            first, last = self.key_tiles(item)
            plgpu.barrier_wait(self.q_ready.at[slot])
            q_tile = self.q_smem.at[slot, wg]
            result = lax.cond(
                last > first,
                lambda: self.attend_tiles(item, wg, q_tile, first, last, done),
                # Padding tokens.
                lambda: _wgmma_full((_WG_ROWS, self.head_dim), 0),
            )
            self.store(item, wg, q_tile, result.astype(self.q.dtype))
            plgpu.barrier_arrive(self.q_free.at[slot])
            return done + last - first

        self.for_each_item(compute_item)

    def attend_tiles(self, item, wg, q_tile, first, last, done):
        """float32 [64, H]: attention over the tiles of keys first .. last - 1, at least one."""
        begin, end = item.key_span(self.sliding_window)
        tile_k = self.tile_k
        # Position of the warpgroup's first query, and of the item's first and last.
        position = item.position + wg * _WG_ROWS
        first_position, last_position = item.position + item.low, item.position + item.high - 1

        def slot_of(j):
            return lax.rem(done + j - first, self.num_stages)

        def mask(scores, j):
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
                for axis in (0, 1)
            )
            distance = row + (position - j * tile_k) - column
            seen = distance >= 0
            if self.sliding_window is not None:
                seen &= distance < self.sliding_window
            return jnp.where(seen, scores, -jnp.inf)

        def softmax(scores, j, peak, total):
            # Tiles that every query of the item sees whole need no mask.
            edge = j * tile_k + tile_k - 1 > first_position
            if self.sliding_window is not None:
                edge |= j * tile_k <= last_position - self.sliding_window
            scores = lax.cond(edge, lambda s: mask(s, j), lambda s: s, scores)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * self.scale)
            decay = jnp.exp2(peak - new_peak)
            shift = lax.broadcast_in_dim(new_peak, scores.shape, [0])
            weights = jnp.exp2(scores * self.scale - shift)
            total = total * decay + weights.sum(axis=1)
            return weights.astype(self.q.dtype), new_peak, total, decay

        def await_values(j):
            """Also blank values outside the span: their weight is 0, but 0 * NaN is NaN."""
            slot = slot_of(j)
            plgpu.barrier_wait(self.v_ready.at[slot])

            # Both warpgroups write the same values, each before it reads them.
            @pl.when((j * tile_k + tile_k > end) | (j * tile_k < begin))
            def _():
                for n in range(0, tile_k, _WG_ROWS):
                    part = self.v_smem.at[slot, pl.ds(n, _WG_ROWS)]
                    values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                    row = plgpu.broadcasted_iota(
                        jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA
                    )
                    key = row + (j * tile_k + n)
                    part[...] = jnp.where((key >= begin) & (key < end), values, 0)
                plgpu.commit_smem()

        def await_keys(j):
            pl.when(j < last)(lambda: plgpu.barrier_wait(self.k_ready.at[slot_of(j)]))

        def issue_scores(scores_acc, j):
            plgpu.wgmma(scores_acc, q_tile, self.k_smem.at[slot_of(j)].transpose((1, 0)))

        def first_scores(scores_acc):
            issue_scores(scores_acc, first)
            scores = scores_acc[...]
            plgpu.barrier_arrive(self.k_free.at[slot_of(first)])
            return scores

        def step(j, carry):
            acc, peak, total, weights = carry
            await_values(j - 1)

            def products(values_acc, scores_acc):
                values_acc[...] = acc
                issue_scores(scores_acc, j)
                plgpu.wgmma(values_acc, weights, self.v_smem.at[slot_of(j - 1)])
                scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
                plgpu.barrier_arrive(self.k_free.at[slot_of(j)])
                new = softmax(scores, j, peak, total)
                # Here, not at the top of the next step: the compiler moves arithmetic behind the
                # wait for the values' product, but not across this wait.
                await_keys(j + 1)
                new_acc = plgpu.wgmma_accumulator_load(values_acc, wait_n=0)
                plgpu.barrier_arrive(self.v_free.at[slot_of(j - 1)])
                return new_acc, *new

            acc, weights, peak, total, decay = pl.run_scoped(
                products, self.values_acc(), self.scores_acc()
            )
            return acc * lax.broadcast_in_dim(decay, acc.shape, [0]), peak, total, weights

        def last_values(values_acc, acc, weights):
            values_acc[...] = acc
            plgpu.wgmma(values_acc, weights, self.v_smem.at[slot_of(last - 1)])
            return values_acc[...]

        await_keys(first)
        scores = pl.run_scoped(first_scores, self.scores_acc())
        peak, total = _wgmma_full((_WG_ROWS,), _NEVER), _wgmma_full((_WG_ROWS,), 0)
        weights, peak, total, _ = softmax(scores, first, peak, total)
        await_keys(first + 1)
        carry = (_wgmma_full((_WG_ROWS, self.head_dim), 0), peak, total, weights)
        acc, _, total, weights = lax.fori_loop(first + 1, last, step, carry)
        await_values(last - 1)
        acc = pl.run_scoped(
            functools.partial(last_values, acc=acc, weights=weights), self.values_acc()
        )
        plgpu.barrier_arrive(self.v_free.at[slot_of(last - 1)])
        # Rows of the tile that are not the item's may have seen nothing.
        total = jnp.where(total == 0, 1.0, total)
        return acc / lax.broadcast_in_dim(total, acc.shape, [0])

    def scores_acc(self):
        return plgpu.ACC((_WG_ROWS, self.tile_k), jnp.float32)

    def values_acc(self):
        return plgpu.ACC((_WG_ROWS, self.head_dim), jnp.float32)

    def store(self, item, wg, q_tile, result):
        """Write the item's rows of a warpgroup's result; returns when shared memory is free."""
        low, high = item.low - wg * _WG_ROWS, item.high - wg * _WG_ROWS
        whole = (low <= 0) & (high >= _WG_ROWS)

        @pl.when(whole)
        def _():
            q_tile[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, self.out.at[self.rows_of(item, wg)])

        @pl.when(jnp.logical_not(whole))
        def _():
            # The tile's other rows belong to other items, perhaps of other blocks.
            rows = self.rows_smem.at[wg]
            rows[...] = result
            plgpu.commit_smem()

            @pl.loop(jnp.maximum(low, 0), jnp.minimum(high, _WG_ROWS))
            def _(row):
                query = pl.ds(item.start + wg * _WG_ROWS + row, 1)
                plgpu.copy_smem_to_gmem(rows.at[pl.ds(row, 1)], self.out.at[query, item.head])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _wgmma_full(shape, value):
    """A float32 constant laid out like a product, or like a column of one."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

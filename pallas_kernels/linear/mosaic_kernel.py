"""Products with a weight for many tokens in Mosaic GPU, for Hopper GPUs.

A persistent grid: each block of threads works through its share of tiles of the result. Of its
three warpgroups one fetches and two compute, with a queue of steps along the inner axis between
them. The fetching one copies a tile of tokens and a tile of the weight's rows by the TMA unit; it
runs ahead, also into the next tile of the result. Each computing one multiplies its half of the
tokens by all rows. In a gated product the up rows of the same places lie below the gate rows, so
that a gate and what it lets through are sums of the same thread, and the product [T, O] is never
written. Blocks of one cluster have the same rows, or tokens, and share their copies.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.linear.tuning import MOSAIC_TILE_IN, MosaicTiling
from pallas_kernels.mosaic_warp import in_one_warp

_COMPUTE_WGS = 2
# One block of threads for each multiprocessor of an H100 or H200.
_NUM_BLOCKS = 132


# Jitted so that a model of many layers traces and lowers it once.
@functools.partial(jax.jit, static_argnames=("gated", "out_dtype", "tiling"))
def linear(
    x: BFloat16[Array, "T I"],
    weight: BFloat16[Array, "O I"],
    *,
    gated: bool,
    out_dtype: jnp.dtype,
    tiling: MosaicTiling,
) -> Float[Array, "S T P"]:
    """As `triton_kernel.linear`. See `tuning.fits_mosaic` for the shapes allowed."""
    out_size = len(weight) // 2 if gated else len(weight)
    tiles = Tiles(len(x), out_size, tiling)
    tile_tokens, num_stages, cluster = tiling.tile_tokens, tiling.num_stages, tiling.cluster
    tile_rows = 2 * tiling.tile_out if gated else tiling.tile_out

    def mosaic_linear(*refs):
        def run(*scratch):
            block = _Block(*refs, *scratch, tiles, gated)
            wg = lax.axis_index("wg")
            pl.when(wg < _COMPUTE_WGS)(functools.partial(block.compute, wg))
            pl.when(wg == _COMPUTE_WGS)(block.fetch)

        free = {"num_arrivals": _COMPUTE_WGS, "num_barriers": num_stages}
        out_columns = tiling.out_columns(out_dtype.itemsize)
        pl.run_scoped(
            run,
            _swizzled((num_stages, tile_tokens, MOSAIC_TILE_IN), x.dtype),
            _swizzled((num_stages, tile_rows, MOSAIC_TILE_IN), x.dtype),
            _swizzled((_COMPUTE_WGS, tile_tokens // _COMPUTE_WGS, out_columns), out_dtype),
            # The copies of one step: tokens and rows, or tokens, gate rows and up rows.
            plgpu.Barrier(num_arrivals=3 if gated else 2, num_barriers=num_stages),
            # Copies go to all blocks of a cluster, so all of them must have room.
            plgpu.ClusterBarrier(collective_axes=("in_cluster",), **free)
            if cluster > 1
            else plgpu.Barrier(**free),
            collective_axes="wg",
        )

    return plgpu.kernel(
        mosaic_linear,
        out_type=jax.ShapeDtypeStruct((tiling.splits, len(x), out_size), out_dtype),
        grid=(min(_NUM_BLOCKS // cluster, tiles.count),),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("in_cluster",),
        num_threads=_COMPUTE_WGS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, weight)


def _swizzled(shape: tuple[int, ...], dtype: jnp.dtype) -> pl.MemoryRef:
    """Shared memory whose rows of 8 do not meet in its banks."""
    bits = 8 * dtype.itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of the result, and the order in which clusters make them; those of a cluster's
    blocks count as one."""

    num_tokens: int
    out_size: int
    tiling: MosaicTiling

    @property
    def share_tokens(self) -> bool:
        """Whether the blocks of a cluster have the same tokens: where a tile holds all of them.
        Else they have the same rows."""
        return self.num_tokens <= self.tiling.tile_tokens

    @property
    def height(self) -> int:
        cluster = 1 if self.share_tokens else self.tiling.cluster
        return pl.cdiv(self.num_tokens, cluster * self.tiling.tile_tokens)

    @property
    def width(self) -> int:
        cluster = self.tiling.cluster if self.share_tokens else 1
        return pl.cdiv(self.out_size, cluster * self.tiling.tile_out)

    @property
    def count(self) -> int:
        return self.tiling.splits * self.height * self.width

    def num_own(self):
        clusters = lax.axis_size("cluster")
        return lax.div(self.count - lax.axis_index("cluster") + clusters - 1, clusters)

    def place(self, i):
        """Split, first token and first row of this block's tile i.

        Bands of tokens are walked along the rows, and back in the next band: so what all blocks
        fetch at a time is about as many tokens as rows, and the L2 cache has most of it.
        """
        height, width = self.height, self.width
        tile = i * lax.axis_size("cluster") + lax.axis_index("cluster")
        split = lax.div(tile, height * width)
        tile = lax.rem(tile, height * width)
        band = lax.div(tile, self.tiling.band * width)
        top = band * self.tiling.band
        band_height = jnp.minimum(self.tiling.band, height - top)
        in_band = tile - top * width
        column = lax.div(in_band, band_height)
        column = jnp.where(lax.rem(band, 2) == 0, column, width - 1 - column)
        tile_row = top + lax.rem(in_band, band_height)
        cluster, in_cluster = self.tiling.cluster, lax.axis_index("in_cluster")
        if self.share_tokens:
            column = column * cluster + in_cluster
        else:
            tile_row = tile_row * cluster + in_cluster
        tile_tokens, tile_out = self.tiling.tile_tokens, self.tiling.tile_out
        return (
            split,
            pl.multiple_of(tile_row * tile_tokens, tile_tokens),
            pl.multiple_of(column * tile_out, tile_out),
        )


@dataclasses.dataclass
class _Block:
    """What one block of threads works with."""

    x: jax.Ref
    weight: jax.Ref
    out: jax.Ref
    x_smem: jax.Ref
    """[stages, tokens, 64]"""
    weight_smem: jax.Ref
    """[stages, rows, 64], or gate rows and then up rows"""
    out_smem: jax.Ref
    """[warpgroups, tokens of one, columns of the result]: results on their way out."""
    ready: jax.Ref
    free: jax.Ref
    tiles: Tiles
    gated: bool

    def __post_init__(self):
        self.tiling = self.tiles.tiling
        self.num_steps = self.x.shape[1] // MOSAIC_TILE_IN // self.tiling.splits
        """Of one tile."""

    def slot(self, step):
        return lax.rem(step, self.tiling.num_stages)

    def fetch(self):
        """Copy tokens and rows of all steps into shared memory, as room comes free."""
        plgpu.set_max_registers(40, action="decrease")
        tile_tokens, tile_out = self.tiling.tile_tokens, self.tiling.tile_out
        shared = {"collective_axes": "in_cluster"} if self.tiling.cluster > 1 else {}
        share_tokens, share_rows = (shared, {}) if self.tiles.share_tokens else ({}, shared)

        @pl.loop(0, self.tiles.num_own())
        def _tile(i):
            split, token, row = self.tiles.place(i)

            @in_one_warp
            def _():
                @pl.loop(0, self.num_steps)
                def _step(k):
                    step = i * self.num_steps + k
                    slot = self.slot(step)
                    ready = self.ready.at[slot]
                    columns = pl.ds((split * self.num_steps + k) * MOSAIC_TILE_IN, MOSAIC_TILE_IN)

                    @pl.when(step >= self.tiling.num_stages)
                    def _():
                        plgpu.barrier_wait(self.free.at[slot])

                    # Past the last token or row a copy in gives zeros, and one out is cut off. Past
                    # the last gate row there are up rows: what they make is cut off, too.
                    plgpu.copy_gmem_to_smem(
                        self.x.at[pl.ds(token, tile_tokens), columns],
                        self.x_smem.at[slot],
                        ready,
                        **share_tokens,
                    )
                    for half in range(2 if self.gated else 1):
                        rows = pl.ds(half * self.tiles.out_size + row, tile_out)
                        plgpu.copy_gmem_to_smem(
                            self.weight.at[rows, columns],
                            self.weight_smem.at[slot, pl.ds(half * tile_out, tile_out)],
                            ready,
                            **share_rows,
                        )

        @in_one_warp
        def _():
            # A barrier may not go away with an arrival that nobody saw.
            for slot in range(self.tiling.num_stages):
                used = self.tiles.num_own() * self.num_steps > slot
                pl.when(used)(functools.partial(plgpu.barrier_wait, self.free.at[slot]))

    def compute(self, wg):
        plgpu.set_max_registers(232, action="increase")
        wg_tokens = self.tiling.tile_tokens // _COMPUTE_WGS
        first_token = pl.multiple_of(wg * wg_tokens, wg_tokens)

        @pl.loop(0, self.tiles.num_own())
        def _tile(i):
            split, token, row = self.tiles.place(i)
            first = i * self.num_steps

            def product(acc):
                @pl.loop(0, self.num_steps)
                def _step(k):
                    slot = self.slot(first + k)
                    plgpu.barrier_wait(self.ready.at[slot])
                    plgpu.wgmma(
                        acc,
                        self.x_smem.at[slot, pl.ds(first_token, wg_tokens)],
                        self.weight_smem.at[slot].transpose((1, 0)),
                    )
                    # All but this step's product are done.
                    plgpu.wgmma_wait(1)

                    @pl.when(k > 0)
                    def _():
                        plgpu.barrier_arrive(self.free.at[self.slot(first + k - 1)])

                sums = acc[...]
                plgpu.barrier_arrive(self.free.at[self.slot(first + self.num_steps - 1)])
                return sums

            acc = plgpu.ACC((wg_tokens, self.weight_smem.shape[1]), jnp.float32)
            result = pl.run_scoped(product, acc)
            if self.gated:
                gate, up = result[:, : self.tiling.tile_out], result[:, self.tiling.tile_out :]
                result = gate / (1 + jnp.exp(-gate)) * up
            self.store(wg, result, split, token + first_token, row)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store(self, wg, result, split, token, row):
        """Write a warpgroup's tokens of a tile, by way of shared memory."""
        wg_tokens, columns = self.out_smem.shape[1:]
        for start in range(0, self.tiling.tile_out, columns):
            # What was there before has left by now.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.out_smem[wg] = result[:, start : start + columns].astype(self.out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.out_smem.at[wg],
                self.out.at[split, pl.ds(token, wg_tokens), pl.ds(row + start, columns)],
            )

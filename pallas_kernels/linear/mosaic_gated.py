"""The SwiGLU product for many tokens in Mosaic GPU, for Hopper GPUs.

A persistent grid: each block of threads works through its share of tiles of the result. Of its
three warpgroups one fetches and two compute, with a queue of steps along the inner axis between
them. The fetching one copies a tile of tokens, and a tile of gate rows with the up rows of the
same places below it, by the TMA unit; it runs ahead, also into the next tile of the result. Each
computing one multiplies its half of the tokens by all rows in one accumulator, so that a gate and
what it lets through lie in the same thread, and the product [T, O] is never written. Blocks of one
cluster have the same rows and share their copies.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from pallas_kernels.linear.tuning import MOSAIC_TILE_IN, MosaicTiling

_COMPUTE_WGS = 2
# One block of threads for each multiprocessor of an H100 or H200.
_NUM_BLOCKS = 132


# Jitted so that a model of many layers traces and lowers it once.
@functools.partial(jax.jit, static_argnames="tiling")
def gated_linear(
    x: BFloat16[Array, "T I"], weight: BFloat16[Array, "O I"], *, tiling: MosaicTiling
) -> BFloat16[Array, "T P"]:
    """silu(gate) * up of x @ weight.T, in float32 until it is stored; the first half of the
    weight's rows makes the gates, and P is O // 2. See `tuning.fits_mosaic` for the shapes allowed.
    """
    num_tokens, out_size = len(x), len(weight) // 2
    cluster, num_stages = tiling.cluster, tiling.num_stages
    tile_tokens, tile_out = tiling.tile_tokens, tiling.tile_out
    num_tiles = pl.cdiv(num_tokens, cluster * tile_tokens) * (out_size // tile_out)

    def gated_product(*refs):
        def run(*scratch):
            block = _Block(*refs, *scratch, tiling, num_tiles)
            wg = lax.axis_index("wg")
            pl.when(wg < _COMPUTE_WGS)(functools.partial(block.compute, wg))
            pl.when(wg == _COMPUTE_WGS)(block.fetch)

        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        smem = functools.partial(plgpu.SMEM, dtype=x.dtype, transforms=swizzled)
        free = {"num_arrivals": _COMPUTE_WGS, "num_barriers": num_stages}
        pl.run_scoped(
            run,
            smem((num_stages, tile_tokens, MOSAIC_TILE_IN)),
            smem((num_stages, 2 * tile_out, MOSAIC_TILE_IN)),
            smem((_COMPUTE_WGS, tile_tokens // _COMPUTE_WGS, tile_out)),
            plgpu.Barrier(num_arrivals=_Block.COPIES, num_barriers=num_stages),
            # Copies go to all blocks of a cluster, so all of them must have room.
            plgpu.ClusterBarrier(collective_axes=("in_cluster",), **free)
            if cluster > 1
            else plgpu.Barrier(**free),
            collective_axes="wg",
        )

    return plgpu.kernel(
        gated_product,
        out_type=jax.ShapeDtypeStruct((num_tokens, out_size), x.dtype),
        grid=(min(_NUM_BLOCKS // cluster, num_tiles),),
        grid_names=("cluster",),
        cluster=(cluster,),
        cluster_names=("in_cluster",),
        num_threads=_COMPUTE_WGS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, weight)


@dataclasses.dataclass
class _Block:
    """What one block of threads works with."""

    COPIES = 3
    """Of one step: tokens, gate rows, up rows."""

    x: jax.Ref
    weight: jax.Ref
    out: jax.Ref
    x_smem: jax.Ref
    """[stages, tokens, 64]"""
    weight_smem: jax.Ref
    """[stages, gate rows, then up rows, 64]"""
    out_smem: jax.Ref
    """[warpgroups, tokens of one, out]: results on their way out."""
    ready: jax.Ref
    free: jax.Ref
    tiling: MosaicTiling
    num_tiles: int
    """Of the result; those of a cluster's blocks count as one."""

    def __post_init__(self):
        self.tile_tokens, self.tile_out = self.tiling.tile_tokens, self.tiling.tile_out
        self.num_steps = self.x.shape[1] // MOSAIC_TILE_IN
        self.out_size = self.out.shape[1]

    def num_own_tiles(self):
        clusters = lax.axis_size("cluster")
        return lax.div(self.num_tiles - lax.axis_index("cluster") + clusters - 1, clusters)

    def place(self, i):
        """First token and first row of this block's tile i.

        Bands of tokens are walked along the rows, and back in the next band: so what all blocks
        fetch at a time is about as many tokens as rows, and the L2 cache has most of it.
        """
        cluster = self.tiling.cluster
        num_columns = self.out_size // self.tile_out
        height = self.num_tiles // num_columns
        tile = i * lax.axis_size("cluster") + lax.axis_index("cluster")
        band = lax.div(tile, self.tiling.band * num_columns)
        top = band * self.tiling.band
        band_height = jnp.minimum(self.tiling.band, height - top)
        in_band = tile - top * num_columns
        column = lax.div(in_band, band_height)
        column = jnp.where(lax.rem(band, 2) == 0, column, num_columns - 1 - column)
        tile_row = top + lax.rem(in_band, band_height)
        token = (tile_row * cluster + lax.axis_index("in_cluster")) * self.tile_tokens
        return (
            pl.multiple_of(token, self.tile_tokens),
            pl.multiple_of(column * self.tile_out, self.tile_out),
        )

    def slot(self, step):
        return lax.rem(step, self.tiling.num_stages)

    def fetch(self):
        """Copy tokens and rows of all steps into shared memory, as room comes free."""
        plgpu.set_max_registers(40, action="decrease")
        shared = {"collective_axes": "in_cluster"} if self.tiling.cluster > 1 else {}

        @pl.loop(0, self.num_own_tiles())
        def _tile(i):
            token, row = self.place(i)

            @pl.loop(0, self.num_steps)
            def _step(k):
                step = i * self.num_steps + k
                slot = self.slot(step)
                ready = self.ready.at[slot]
                columns = pl.ds(pl.multiple_of(k * MOSAIC_TILE_IN, MOSAIC_TILE_IN), MOSAIC_TILE_IN)

                @pl.when(step >= self.tiling.num_stages)
                def _():
                    plgpu.barrier_wait(self.free.at[slot])

                # Past the last token a copy in gives zeros, and one out is cut off.
                plgpu.copy_gmem_to_smem(
                    self.x.at[pl.ds(token, self.tile_tokens), columns], self.x_smem.at[slot], ready
                )
                for half in range(2):
                    plgpu.copy_gmem_to_smem(
                        self.weight.at[pl.ds(half * self.out_size + row, self.tile_out), columns],
                        self.weight_smem.at[slot, pl.ds(half * self.tile_out, self.tile_out)],
                        ready,
                        **shared,
                    )

        # A barrier may not go away with an arrival that nobody saw.
        for slot in range(self.tiling.num_stages):
            used = self.num_own_tiles() * self.num_steps > slot
            pl.when(used)(functools.partial(plgpu.barrier_wait, self.free.at[slot]))

    def compute(self, wg):
        plgpu.set_max_registers(232, action="increase")
        wg_tokens = self.tile_tokens // _COMPUTE_WGS
        rows = pl.ds(pl.multiple_of(wg * wg_tokens, wg_tokens), wg_tokens)

        @pl.loop(0, self.num_own_tiles())
        def _tile(i):
            token, row = self.place(i)
            first = i * self.num_steps

            def product(acc):
                @pl.loop(0, self.num_steps)
                def _step(k):
                    slot = self.slot(first + k)
                    plgpu.barrier_wait(self.ready.at[slot])
                    plgpu.wgmma(
                        acc, self.x_smem.at[slot, rows], self.weight_smem.at[slot].transpose((1, 0))
                    )
                    # All but this step's product are done.
                    plgpu.wgmma_wait(1)

                    @pl.when(k > 0)
                    def _():
                        plgpu.barrier_arrive(self.free.at[self.slot(first + k - 1)])

                gate_up = acc[...]
                plgpu.barrier_arrive(self.free.at[self.slot(first + self.num_steps - 1)])
                return gate_up

            acc = plgpu.ACC((wg_tokens, 2 * self.tile_out), jnp.float32)
            gate_up = pl.run_scoped(product, acc)
            gate, up = gate_up[:, : self.tile_out], gate_up[:, self.tile_out :]
            gated = gate / (1 + jnp.exp(-gate)) * up
            # The tile before has left by now.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.out_smem[wg] = gated.astype(self.out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.out_smem.at[wg],
                self.out.at[pl.ds(token + wg * wg_tokens, wg_tokens), pl.ds(row, self.tile_out)],
            )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

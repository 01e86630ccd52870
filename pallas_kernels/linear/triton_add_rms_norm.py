"""A product of a weight and a single token, the residual sum and the norm after it, in one kernel.

Where several programs share the columns of some rows, the last of them to finish adds up their
parts; and the last to finish its rows norms the token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.linear.triton_kernel import multiply, tile_sizes
from pallas_kernels.linear.tuning import Tiling
from pallas_kernels.triton_import import jax_triton, tl, triton


def linear_add_rms_norm(
    x: Float[Array, "1 I"],
    weight: Float[Array, "D I"],
    residual: Float[Array, "1 D"],
    norm_weight: Float[Array, "D"],
    arrived: Int32[Array, "C"],
    *,
    eps: float,
    tiling: Tiling,
) -> tuple[Float[Array, "1 D"], Float[Array, "1 D"], Int32[Array, "C"]]:
    size = residual.shape[1]
    parts = (tiling.splits, size) if tiling.splits > 1 else (1,)
    counters = jax.new_ref(arrived)
    total, normed, _ = jax_triton.triton_call(
        x,
        weight,
        residual,
        norm_weight,
        counters,
        kernel=_linear_add_rms_norm,
        out_type=(
            jax.typeof(residual),
            jax.typeof(residual),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        grid=(triton.cdiv(size, tiling.tile_out), tiling.splits),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        D=size,
        I=x.shape[1],
        D_PAD=triton.next_power_of_2(size),
        SPLITS=tiling.splits,
        EPS=eps,
        **tile_sizes(x, tiling),
    )
    return total, normed, jax.freeze(counters)


@triton.jit
def _linear_add_rms_norm(
    x,
    weight,
    residual,
    norm_weight,
    arrived,
    total,
    normed,
    parts,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    EPS: tl.constexpr,
    SHARE: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`arrived` counts the programs that are done with their rows, and from 1 on for each tile
    of rows those that have left their part."""
    tile = tl.program_id(0)
    token = tl.arange(0, TILE_T)
    row = tile * TILE_O + tl.arange(0, TILE_O)
    mask = (token < 1)[:, None] & (row < D)[None, :]
    place = token[:, None] * D + row[None, :]
    left = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    right = multiply(
        x, weight, 1, token, row, D, I, False, SHARE, TILE_T, TILE_O, TILE_I, PRECISION
    )
    dtype: tl.constexpr = total.dtype.element_ty
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1) * D + place, right, mask=mask)
        tl.debug_barrier()  # The whole program's stores, before one thread announces them.
        if tl.atomic_add(arrived + 1 + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrived + 1 + tile, 0)
        # Past L1, which need not see what other multiprocessors wrote.
        right = tl.load(parts + place, mask=mask, other=0.0, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            part = parts + split * D + place
            right += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        right = right.to(dtype).to(tl.float32)
    tl.store(total + place, (left + right).to(dtype), mask=mask)

    column = tl.arange(0, D_PAD)
    # By each, so that the last need not wait for it.
    scale = tl.load(norm_weight + column, mask=column < D, other=0.0)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") != tl.num_programs(0) - 1:
        return
    tl.store(arrived, 0)
    mask = column < D
    wide = tl.load(total + column, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / D
    result = wide * tl.rsqrt(mean_square + EPS) * scale.to(tl.float32)
    tl.store(normed + column, result.to(dtype), mask=mask)

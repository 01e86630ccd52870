"""Products with a weight for few tokens: each program streams some rows of the weight once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.linear.tuning import Tiling
from pallas_kernels.triton_import import jax_triton, tl, triton


def linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "O I"],
    *,
    gated: bool,
    out_dtype: jnp.dtype,
    tiling: Tiling,
) -> Float[Array, "S T P"]:
    num_tokens, in_size = x.shape
    out_size = len(weight) // 2 if gated else len(weight)
    return jax_triton.triton_call(
        x,
        weight,
        num_tokens,
        kernel=_linear,
        out_type=jax.ShapeDtypeStruct((tiling.splits, num_tokens, out_size), out_dtype),
        grid=(triton.cdiv(out_size, tiling.tile_out), tiling.splits),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        O=out_size,
        I=in_size,
        GATED=gated,
        **tile_sizes(x, tiling),
    )


def tile_sizes(x: Float[Array, "T I"], tiling: Tiling) -> dict[str, int | str]:
    """Of `multiply`."""
    num_tokens, in_size = x.shape
    num_steps = triton.cdiv(in_size, tiling.tile_in)
    return {
        "SHARE": triton.cdiv(num_steps, tiling.splits) * tiling.tile_in,
        "TILE_T": max(triton.next_power_of_2(num_tokens), 16),
        "TILE_O": tiling.tile_out,
        "TILE_I": tiling.tile_in,
        "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32",
    }


@triton.jit
def _linear(
    x,
    weight,
    num_tokens,
    out,
    O: tl.constexpr,  # noqa: E741
    I: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    SHARE: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.arange(0, TILE_T)
    row = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    product = multiply(
        x, weight, num_tokens, token, row, O, I, GATED, SHARE, TILE_T, TILE_O, TILE_I, PRECISION
    )
    part = (tl.program_id(1) * num_tokens + token).to(tl.int64)
    mask = (token < num_tokens)[:, None] & (row < O)[None, :]
    target = out + part[:, None] * O + row[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def multiply(
    x,
    weight,
    num_tokens,
    token,
    row,
    O: tl.constexpr,  # noqa: E741
    I: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    SHARE: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """This program's share of the columns of the tile's products, in float32."""
    in_tokens = (token < num_tokens)[:, None]
    in_rows = (row < O)[:, None]
    tokens = x + token[:, None] * I
    rows = weight + row.to(tl.int64)[:, None] * I
    acc = tl.zeros([TILE_T, TILE_O], tl.float32)
    up = tl.zeros([TILE_T, TILE_O], tl.float32)
    EVEN: tl.constexpr = I % TILE_I == 0 and O % TILE_O == 0
    split = tl.program_id(1)
    end = tl.minimum((split + 1) * SHARE, I)
    for start in range(split * SHARE, end, TILE_I):
        column = start + tl.arange(0, TILE_I)[None, :]
        in_columns = column < I
        left = tl.load(tokens + column, mask=in_tokens & in_columns, other=0.0)
        right = _load(rows + column, in_rows & in_columns, EVEN)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
        if GATED:
            right = _load(rows + O * I + column, in_rows & in_columns, EVEN)
            up = tl.dot(left, tl.trans(right), up, input_precision=PRECISION)
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    return acc


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    """What `pointers` point to; EVEN: all of it is there."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=mask, other=0.0)

"""Residual sum and norm in one pass: a program for each token, which stays in registers."""

from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.triton_import import jax_triton, tl, triton


def add_rms_norm(
    x: Float[Array, "T D"],
    delta: Float[Array, "S T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    total, normed = jax_triton.triton_call(
        x,
        delta,
        weight,
        kernel=_add_rms_norm,
        out_type=(jax.typeof(x), jax.typeof(x)),
        S=len(delta),
        **_options(x, eps),
    )
    return total, normed


def rms_norm(
    x: Float[Array, "T D"], weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "T D"]:
    return jax_triton.triton_call(
        x, weight, kernel=_rms_norm, out_type=jax.typeof(x), **_options(x, eps)
    )


def _options(x: jax.Array, eps: float) -> dict[str, Any]:
    num_tokens, size = x.shape
    padded = triton.next_power_of_2(size)
    num_warps = min(max(padded // 256, 1), 16)
    return {"grid": (num_tokens,), "num_warps": num_warps, "EPS": eps, "D": size, "D_PAD": padded}


@triton.jit
def _add_rms_norm(
    x,
    delta,
    weight,
    total,
    normed,
    S: tl.constexpr,
    EPS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    column = tl.arange(0, D_PAD)
    mask = column < D
    place = tl.program_id(0).to(tl.int64) * D + column
    # First, so that the norm need not wait for it after the sum.
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    left = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(delta + place, mask=mask, other=0.0).to(tl.float32)
    part = delta + place
    for _ in tl.static_range(S - 1):
        part += tl.num_programs(0).to(tl.int64) * D
        right += tl.load(part, mask=mask, other=0.0).to(tl.float32)
    rounded = (left + right).to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=mask)
    result = _normed(rounded.to(tl.float32), scale, EPS, D)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm(x, weight, normed, EPS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    column = tl.arange(0, D_PAD)
    mask = column < D
    place = tl.program_id(0).to(tl.int64) * D + column
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    result = _normed(wide, scale, EPS, D)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _normed(wide, scale, EPS: tl.constexpr, D: tl.constexpr):
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / D + EPS) * scale

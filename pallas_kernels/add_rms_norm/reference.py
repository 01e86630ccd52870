"""Residual sum and root mean square norm (arXiv:1910.07467) in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def add_rms_norm(
    x: Float[Array, "T D"],
    delta: Float[Array, "S T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    total = (x + jnp.sum(delta, axis=0, dtype=jnp.float32)).astype(x.dtype)
    return total, rms_norm(total, weight, eps=eps)


def rms_norm(
    x: Float[Array, "T D"], weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "T D"]:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)

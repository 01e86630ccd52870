"""Bias, head norms and rotary embedding (arXiv:2104.09864) in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def qkv_rope(
    qkv: Float[Array, "S T K G+2 H"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "T H//2"],
    sin: Float32[Array, "T H//2"],
    *,
    eps: float,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "T K*G H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    qkv = jnp.sum(qkv, axis=0).astype(dtype)
    if bias is not None:
        qkv = qkv + bias
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if q_norm is not None and k_norm is not None:
        q, k = _norm(q, q_norm, eps), _norm(k, k_norm, eps)
    num_tokens, head_dim = len(qkv), qkv.shape[-1]
    q = _turn(q, cos, sin).reshape(num_tokens, -1, head_dim)
    return q, _turn(k, cos, sin), v


def _norm(x: Float[Array, "*n H"], weight: Float[Array, "H"], eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean_square + eps) * weight).astype(x.dtype)


def _turn(x: Float[Array, "T *heads H"], cos: jax.Array, sin: jax.Array) -> jax.Array:
    heads = tuple(range(1, x.ndim - 1))
    cos, sin = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)

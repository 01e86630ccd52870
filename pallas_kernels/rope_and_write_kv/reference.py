"""Bias, head norms, rotary embedding (arXiv:2104.09864) and the cache's update in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


def rope_and_write_kv(
    qkv: Float[Array, "parts T K G+2 H"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "T H//2"],
    sin: Float32[Array, "T H//2"],
    kv_cache: Float[Array, "P K 2 S H"],
    kv_slots: Int32[Array, "T"],
    *,
    eps: float,
) -> tuple[Float[Array, "T K*G H"], Float[Array, "P K 2 S H"], Int32[Array, "T+1 K"]]:
    qkv = jnp.sum(qkv, axis=0).astype(kv_cache.dtype)
    if bias is not None:
        qkv = qkv + bias
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if q_norm is not None and k_norm is not None:
        q, k = _norm(q, q_norm, eps), _norm(k, k_norm, eps)
    num_tokens, num_kv_heads, _, head_dim = qkv.shape
    q = _turn(q, cos, sin).reshape(num_tokens, -1, head_dim)
    written = _write_kv(_turn(k, cos, sin), v, kv_cache, kv_slots)
    return q, written, jnp.zeros((num_tokens + 1, num_kv_heads), jnp.int32)


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


def _write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_cache: Float[Array, "P K 2 S H"],
    kv_slots: Int32[Array, "T"],
) -> Float[Array, "P K 2 S H"]:
    block_size = kv_cache.shape[3]
    block, offset = lax.div(kv_slots, block_size), lax.rem(kv_slots, block_size)
    written = kv_cache.at[block, :, :, offset].set(jnp.stack([k, v], axis=2))
    # Without the barrier XLA may fuse the write into each of its readers, copying the cache.
    return lax.optimization_barrier(written)

"""The layers that all architectures share, written for one shard of the tensor axis.

A layer is made with global shapes and called with its shard of them: sizes of split dimensions
come from the arrays, never from the configuration. Weights are [out, in] as in the checkpoints.
Parameters and activations are in the compute dtype; norms' statistics and logits in float32.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.model.attention import AttentionBatch, AttentionImpl, KernelImpl, attend
from jaxserve.model.config import ModelConfig
from jaxserve.model.rope import RopeAngles
from jaxserve.model.sizes import GlobalSizes
from pallas_kernels import linear as kernels
from pallas_kernels.add_rms_norm import add_rms_norm, rms_norm
from sharding import all_gather, all_reduce, num_shards, shard_index


def linear(
    x: Float[Array, "T in_size"],
    weight: Float[Array, "*out in_size"],
    impl: AttentionImpl,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "T *out"]:
    """x @ weight.T, in x's dtype unless told.

    The product is of plain matrices: XLA's CPU backend transposes a weight of more dimensions anew
    at every step.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    product = kernels.linear(x, matrix, out_dtype=out_dtype, impl=impl)
    return product.reshape(len(x), *weight.shape[:-1])


class RMSNorm(nnx.Module):
    """Root mean square norm (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, impl: KernelImpl) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps
        self.impl = impl

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return rms_norm(x, self.weight[...], eps=self.eps, impl=self.impl)

    def after_adding(
        self, x: Float[Array, "T D"], delta: Float[Array, "S T D"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + the sum of delta's parts, the norm of that)."""
        return add_rms_norm(x, delta, self.weight[...], eps=self.eps, impl=self.impl)


class Residual(NamedTuple):
    """The residual stream, and what goes along with it from layer to layer."""

    x: Float[Array, "T D"]
    normed: Float[Array, "T D"]
    """By the norm of the layer that reads it."""
    arrived: Int32[Array, "D"]
    """Zeros: see `linear_add_rms_norm`."""

    @classmethod
    def begin(cls, x: Float[Array, "T D"], norm: RMSNorm) -> "Residual":
        return cls(x, norm(x), jnp.zeros(x.shape[1:], jnp.int32))


class Linear(nnx.Module):
    """A weight [*out, in], split by output or by input, with a bias [*out] or none."""

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype, *, bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros(shape[:-1], dtype)) if bias else None

    def into_residual(
        self,
        inner: Float[Array, "T inner"],
        residual: Residual,
        norm: RMSNorm,
        impl: AttentionImpl,
    ) -> Residual:
        """Add the whole output from this shard's inputs, and norm the sum for the next layer; the
        bias is added once."""
        weight = self.weight[...]
        if num_shards() == 1 and self.bias is None:
            return Residual(
                *kernels.linear_add_rms_norm(
                    inner,
                    weight,
                    residual.x,
                    norm.weight[...],
                    residual.arrived,
                    eps=norm.eps,
                    impl=impl,
                )
            )
        if num_shards() > 1:
            parts = all_reduce(linear(inner, weight, impl))[None]
        else:
            parts = kernels.linear_parts(inner, weight, impl=impl)
        if self.bias is not None:
            parts = parts.at[0].add(self.bias[...])
        return Residual(*norm.after_adding(residual.x, parts), residual.arrived)


class HeadNorm(nnx.Module):
    """The weight of a norm of each head; `rope_and_write_kv` applies it."""

    def __init__(self, head_dim: int, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((head_dim,), dtype))


class Vocabulary(nnx.Module):
    """A row for each token, split by rows: the embedding, the head, or both when tied."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((num_rows, hidden_size), dtype))

    def embed(self, token_ids: Int32[Array, "T"]) -> Float[Array, "T D"]:
        """Each token's row; zeros for an id that no shard holds."""
        weight = self.weight[...]
        rows = token_ids - shard_index() * weight.shape[0]
        held = (rows >= 0) & (rows < weight.shape[0])
        found = weight[jnp.where(held, rows, 0)]
        return all_reduce(jnp.where(held[:, None], found, 0))

    def logits(
        self, hidden: Float[Array, "n D"], vocab_size: int, impl: AttentionImpl
    ) -> Float32[Array, "n V"]:
        """Each token's score, without the rows that fill up the last shard."""
        scores = linear(hidden, self.weight[...], impl, jnp.dtype(jnp.float32))
        return all_gather(scores, axis=1)[:, :vocab_size]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """In what the architectures' attention differs."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """Norm each query and key head before it is turned."""
    sliding_window: int | None = None
    """How many of the newest tokens, itself included, a token sees; None: all."""


class Attention(nnx.Module):
    """Self-attention over the paged KV cache.

    `qkv` holds for each KV head the rows of its query heads, its key and its value, so that a
    split by KV heads keeps each group together; K and V are never expanded to the query heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: GlobalSizes,
        options: AttentionOptions,
        dtype: jnp.dtype,
        impl: AttentionImpl,
    ) -> None:
        def head_norm() -> HeadNorm | None:
            return HeadNorm(config.head_dim, dtype) if options.qk_norm else None

        hidden, heads = config.hidden_size, (sizes.num_kv_heads, sizes.group_size + 2)
        self.qkv = Linear((*heads, config.head_dim, hidden), dtype, bias=options.qkv_bias)
        self.q_norm = head_norm()
        self.k_norm = head_norm()
        self.o = Linear((hidden, config.num_heads * config.head_dim), dtype, bias=options.o_bias)
        self.norm_eps = config.rms_norm_eps
        self.sliding_window = options.sliding_window
        self.impl = impl

    def __call__(
        self,
        residual: Residual,
        angles: RopeAngles,
        kv_cache: Float[Array, "P K 2 S H"],
        batch: AttentionBatch,
        next_norm: RMSNorm,
    ) -> tuple[Residual, Float[Array, "P K 2 S H"]]:
        """N, K and the cache are this shard's."""
        q, kv_cache, counters, arrived = kernels.linear_rope_and_write_kv(
            residual.normed,
            self.qkv.weight[...],
            None if self.qkv.bias is None else self.qkv.bias[...],
            None if self.q_norm is None else self.q_norm.weight[...],
            None if self.k_norm is None else self.k_norm.weight[...],
            *angles,
            kv_cache,
            batch.kv_slots,
            residual.arrived,
            eps=self.norm_eps,
            impl=self.impl,
        )
        attended = attend(
            q,
            kv_cache,
            counters,
            batch,
            scale=q.shape[-1] ** -0.5,
            sliding_window=self.sliding_window,
            impl=self.impl,
        )
        residual = residual._replace(arrived=arrived)
        attended = attended.reshape(len(q), -1)
        return self.o.into_residual(attended, residual, next_norm, self.impl), kv_cache


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix (SwiGLU, arXiv:2002.05202)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: jnp.dtype, impl: AttentionImpl
    ) -> None:
        self.gate_up = Linear((2, intermediate_size, hidden_size), dtype)
        self.down = Linear((hidden_size, intermediate_size), dtype)
        self.impl = impl

    def __call__(self, residual: Residual, next_norm: RMSNorm) -> Residual:
        gate_up = self.gate_up.weight[...].reshape(-1, residual.normed.shape[-1])
        gated = kernels.linear(residual.normed, gate_up, gated=True, impl=self.impl)
        return self.down.into_residual(gated, residual, next_norm, self.impl)

"""The decoder that all architectures share: pre-norm layers on a residual stream."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.model.attention import AttentionBatch, AttentionImpl, kernel_impl
from jaxserve.model.config import ModelConfig
from jaxserve.model.layers import (
    Attention,
    AttentionOptions,
    GatedMLP,
    Residual,
    RMSNorm,
    Vocabulary,
)
from jaxserve.model.rope import RopeAngles, rope_angles
from jaxserve.model.sizes import GlobalSizes


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, attn: Attention, dtype: jnp.dtype) -> None:
        def norm() -> RMSNorm:
            impl = kernel_impl(attn.impl)
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, impl)

        self.attn_norm = norm()
        self.attn = attn
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype, attn.impl)

    def __call__(
        self,
        residual: Residual,
        angles: RopeAngles,
        kv_cache: Float[Array, "P K 2 S H"],
        batch: AttentionBatch,
        next_norm: RMSNorm,
    ) -> tuple[Residual, Float[Array, "P K 2 S H"]]:
        """The residual comes normed by `attn_norm` and leaves normed by `next_norm`, so that each
        norm can be part of the product that adds to the residual before it."""
        residual, kv_cache = self.attn(residual, angles, kv_cache, batch, self.mlp_norm)
        return self.mlp(residual, next_norm), kv_cache


class CausalLM(nnx.Module):
    """A language model; each architecture says what its layers attend with.

    Made with global shapes; called inside `shard_map` over the tensor axis with this shard's
    parameters and caches. Everything else is whole and the same on every shard.
    """

    def __init__(
        self, config: ModelConfig, sizes: GlobalSizes, dtype: jnp.dtype, impl: AttentionImpl
    ) -> None:
        def layer(index: int) -> DecoderLayer:
            options = self.attention_options(config, index)
            return DecoderLayer(config, Attention(config, sizes, options, dtype, impl), dtype)

        def vocabulary() -> Vocabulary:
            return Vocabulary(sizes.num_vocab_rows, config.hidden_size, dtype)

        self.config = config
        self.attention_impl = impl
        self.impl = kernel_impl(impl)
        self.embed = vocabulary()
        self.layers = nnx.List([layer(index) for index in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, self.impl)
        self.head = None if config.tie_word_embeddings else vocabulary()

    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        """What the layer of this index attends with."""
        raise NotImplementedError

    def __call__(
        self,
        token_ids: Int32[Array, "T"],
        kv_caches: tuple[Float[Array, "P K 2 S H"], ...],
        batch: AttentionBatch,
    ) -> tuple[Float[Array, "T D"], tuple[Float[Array, "P K 2 S H"], ...]]:
        """The hidden states after the final norm, and the caches with this step's K and V.

        The layers are unrolled: a scan over stacked caches would copy the cache every layer. Those
        of one kind are traced and lowered once; XLA inlines the calls.
        """
        config = self.config
        angles = rope_angles(
            batch.positions, config.head_dim, config.rope_theta, config.rope_scaling
        )
        norms = [*(layer.attn_norm for layer in self.layers), self.norm]
        residual = Residual.begin(self.embed.embed(token_ids), norms[0])
        written = []
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, norms[1:], strict=True):
            graph, state = nnx.split((layer, next_norm))
            residual, kv_cache = _run_layer(graph, state, residual, angles, kv_cache, batch)
            written.append(kv_cache)
        # Without the barrier XLA may run the last product twice, once for each place that its
        # result goes to.
        return lax.optimization_barrier(residual.normed), tuple(written)

    def logits(self, hidden: Float[Array, "n D"]) -> Float32[Array, "n V"]:
        """The scores of the whole vocabulary, on every shard."""
        rows = self.embed if self.head is None else self.head
        return rows.logits(hidden, self.config.vocab_size, self.attention_impl)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[tuple[DecoderLayer, RMSNorm]],
    state: nnx.State,
    residual: Residual,
    angles: RopeAngles,
    kv_cache: Float[Array, "P K 2 S H"],
    batch: AttentionBatch,
) -> tuple[Residual, Float[Array, "P K 2 S H"]]:
    layer, next_norm = nnx.merge(graph, state)
    return layer(residual, angles, kv_cache, batch, next_norm)

"""A model as the engine holds it: parameters as plain dicts, the module made inside the step.

Flattening an NNX state of hundreds of arrays costs a millisecond of host time at every call of a
jitted function; plain dicts cost a tenth of that.
"""

import math
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxserve.model.attention import AttentionImpl
from jaxserve.model.config import ModelConfig
from jaxserve.model.decoder import CausalLM
from jaxserve.model.registry import MODEL_CLASSES
from jaxserve.model.sizes import GlobalSizes, global_sizes
from sharding import KV_CACHE_SPEC, map_with_path, partition_spec

Params = dict[str, Any]
"""Arrays by name: {"embed": {"weight": ...}, "layers": {"0": {"attn": ...}, ...}, ...}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefinition:
    """An architecture, for one number of devices and one dtype; holds no arrays. Hashable."""

    config: ModelConfig
    tensor_parallel_size: int
    dtype: jnp.dtype
    """Of parameters, activations and KV cache."""
    sizes: GlobalSizes
    abstract_params: Params = field(compare=False)
    """The global shape and dtype (jax.ShapeDtypeStruct) of every parameter."""
    graph: nnx.GraphDef[CausalLM] = field(repr=False)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        *,
        tensor_parallel_size: int,
        dtype: jnp.dtype | str,
        attention_impl: AttentionImpl,
    ) -> "ModelDefinition":
        """ValueError where the model cannot be divided so."""
        sizes, dtype = global_sizes(config, tensor_parallel_size), jnp.dtype(dtype)
        model_class = MODEL_CLASSES[config.architecture]
        model = nnx.eval_shape(lambda: model_class(config, sizes, dtype, attention_impl))
        graph, state = nnx.split(model)
        return cls(
            config=config,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            sizes=sizes,
            abstract_params=_string_keys(nnx.to_pure_dict(state)),
            graph=graph,
        )

    def bind(self, params: Params) -> CausalLM:
        """The model over these parameters: inside `shard_map`, over this shard's."""
        state = {**params, "layers": {int(i): layer for i, layer in params["layers"].items()}}
        return nnx.merge(self.graph, nnx.State(state))

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Global shape of one layer's cache, split as `sharding.KV_CACHE_SPEC` says."""
        return (num_blocks, self.sizes.num_kv_heads, 2, block_size, self.config.head_dim)

    def param_bytes(self, mesh: Mesh) -> int:
        """What the parameters take on each device."""
        placed = map_with_path(
            lambda path, x: (
                math.prod(NamedSharding(mesh, partition_spec(path)).shard_shape(x.shape))
                * x.dtype.itemsize
            ),
            self.abstract_params,
        )
        return sum(jax.tree.leaves(placed))

    def kv_block_bytes(self, block_size: int) -> int:
        """What one block takes on each device, all layers together."""
        kv_heads = self.sizes.num_kv_heads // self.tensor_parallel_size
        elements = kv_heads * 2 * block_size * self.config.head_dim
        return self.config.num_layers * elements * self.dtype.itemsize

    def init_kv_caches(self, num_blocks: int, block_size: int, mesh: Mesh) -> tuple[jax.Array, ...]:
        """Zeros on the mesh, one cache a layer."""
        shape = self.kv_cache_shape(num_blocks, block_size)
        sharding = NamedSharding(mesh, KV_CACHE_SPEC)
        return tuple(
            jnp.zeros(shape, self.dtype, device=sharding) for _ in range(self.config.num_layers)
        )


def init_random(abstract_params: Params, seed: int, shardings: Params) -> Params:
    """Random parameters of sane scale, each made on the devices that hold it; seed under 2**64.

    An array's values depend on the seed, its name and its global shape, not on the devices: where
    more devices only add rows to a vocabulary, the others stay.
    """
    # jax.random.key takes seeds of 63 bits only.
    halves = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    key = jax.random.wrap_key_data(halves, impl="threefry2x32")

    def init(path: str, array: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        mean, std = _mean_and_std(path, array.shape)
        array_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return _normal(array_key, mean, std, array.shape, array.dtype, sharding)

    return map_with_path(init, abstract_params, shardings)


def _mean_and_std(path: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Norms near one, small biases, and weights that keep the scale of what they multiply."""
    if path.endswith("norm.weight"):
        return 1.0, 0.1
    return 0.0, 0.1 if path.endswith("bias") else shape[-1] ** -0.5


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _normal(
    key: jax.Array,
    mean: float,
    std: float,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    values = mean + std * jax.random.normal(key, shape, jnp.float32)
    return jax.lax.with_sharding_constraint(values.astype(dtype), sharding)


def _string_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {str(key): _string_keys(value) for key, value in tree.items()}

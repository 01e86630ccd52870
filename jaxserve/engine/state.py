"""The device arrays that are handed from dispatch to dispatch, always in the same place.

A GPU's graph holds addresses: it is recorded anew, at the host's cost, where one of them is
another. So what a step leaves behind is donated to the next one, its output not excepted.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxserve.model.definition import ModelDefinition
from jaxserve.sampling import SlotState, new_slot_state
from sharding import KV_CACHE_SPEC


class StepOutput(NamedTuple):
    """What the last dispatch has left, in the first of the rows."""

    token_ids: Int32[Array, "steps R"]
    """Sampled; they mean something in rows that sample."""
    hidden: Float[Array, "T D"]
    """After the final norm, if the dispatch was a single step."""


class StepState(NamedTuple):
    kv_caches: tuple[Float[Array, "P K 2 S H"], ...]
    slots: SlotState
    output: StepOutput


@dataclass(frozen=True, slots=True)
class StateSizes:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Of one step."""
    max_num_steps: int
    """Of one dispatch."""


STATE_SPECS = StepState(KV_CACHE_SPEC, P(), P())


def _make_rest(definition: ModelDefinition, sizes: StateSizes) -> tuple[SlotState, StepOutput]:
    """All but the KV cache."""
    token_ids = jnp.zeros((sizes.max_num_steps, sizes.max_num_seqs), jnp.int32)
    shape = sizes.max_num_batched_tokens, definition.config.hidden_size
    output = StepOutput(token_ids, jnp.zeros(shape, definition.dtype))
    return new_slot_state(sizes.max_num_seqs, definition.config.vocab_size), output


def new_state(definition: ModelDefinition, mesh: Mesh, sizes: StateSizes) -> StepState:
    """Of no request, on the mesh."""
    kv_caches = definition.init_kv_caches(sizes.num_blocks, sizes.block_size, mesh)
    make = jax.jit(lambda: _make_rest(definition, sizes), out_shardings=NamedSharding(mesh, P()))
    return StepState(kv_caches, *make())


def abstract_state(definition: ModelDefinition, mesh: Mesh, sizes: StateSizes) -> StepState:
    """The shapes, types and shardings of what `new_state` makes."""

    def struct(shape: tuple[int, ...], dtype: jnp.dtype, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shape = definition.kv_cache_shape(sizes.num_blocks, sizes.block_size)
    kv_cache = struct(shape, definition.dtype, KV_CACHE_SPEC)
    rest = jax.eval_shape(lambda: _make_rest(definition, sizes))
    rest = jax.tree.map(lambda x: struct(x.shape, x.dtype, P()), rest)
    return StepState((kv_cache,) * definition.config.num_layers, *rest)


def bytes_beside_kv_cache(definition: ModelDefinition, sizes: StateSizes) -> int:
    """On each device."""
    rest = jax.eval_shape(lambda: _make_rest(definition, sizes))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(rest))

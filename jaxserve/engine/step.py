"""THE step: embed, run the layers over the paged cache, sample. One function, any mix of requests.

Shapes come from a bucket; everything else (who decodes, who prefills, how each row is sampled) is
data, so that one compiled program serves every combination.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from jaxserve.engine.forward_batch import FROM_SLOT, BatchLayout
from jaxserve.engine.state import STATE_SPECS, StepOutput, StepState
from jaxserve.model.definition import ModelDefinition
from jaxserve.sampling import SlotState, sample
from sharding import partition_specs


def make_step(
    definition: ModelDefinition, mesh: Mesh, layout: BatchLayout, num_steps: int
) -> Callable[..., StepState]:
    """The step for one bucket: (params, state, packed, token_masks) -> state.

    With `num_steps` over 1, that many steps of rows that decode, one after another: a dispatch
    costs the host more than a small step costs the device. Runs under `shard_map` over the mesh's
    tensor axis; `state` is donated.
    """

    def step(params, kv_caches, slots: SlotState, packed: Int32[Array, "size"], token_masks, index):
        batch = layout.unpack(packed, index)
        model = definition.bind(params)
        from_slot = batch.token_ids == FROM_SLOT
        token_ids = jnp.where(from_slot, slots.last_token[batch.token_slots], batch.token_ids)
        hidden, kv_caches = model(token_ids, kv_caches, batch.attention)
        logits = model.logits(hidden[batch.last_tokens])
        sampled, slots = sample(logits, batch.rows, slots, token_masks, impl=model.impl)
        # XLA puts a call into the update of a slice with its result. As the slots' update reads the
        # result too, the call is then made twice, before that update and after it, and XLA copies
        # the slots for the second one.
        sampled = lax.optimization_barrier(sampled)
        return kv_caches, slots, sampled, hidden

    def one_step(params, state: StepState, *inputs) -> StepState:
        kv_caches, slots, output = state
        kv_caches, slots, sampled, hidden = step(params, kv_caches, slots, *inputs, 0)
        token_ids = lax.dynamic_update_slice(output.token_ids, sampled[None], (0, 0))
        hidden = lax.dynamic_update_slice(output.hidden, hidden, (0, 0))
        return StepState(kv_caches, slots, StepOutput(token_ids, hidden))

    def several_steps(params, state: StepState, *inputs) -> StepState:
        def body(index, carry):
            kv_caches, slots, token_ids = carry
            kv_caches, slots, sampled, _ = step(params, kv_caches, slots, *inputs, index)
            token_ids = lax.dynamic_update_slice(token_ids, sampled[None], (index, 0))
            return kv_caches, slots, token_ids

        kv_caches, slots, output = state
        carry = (kv_caches, slots, output.token_ids)
        kv_caches, slots, token_ids = lax.fori_loop(0, num_steps, body, carry)
        return StepState(kv_caches, slots, StepOutput(token_ids, output.hidden))

    sharded = jax.shard_map(
        one_step if num_steps == 1 else several_steps,
        mesh=mesh,
        in_specs=(partition_specs(definition.abstract_params), STATE_SPECS, P(), P()),
        out_specs=STATE_SPECS,
        check_vma=False,
    )

    return jax.jit(sharded, donate_argnums=1)

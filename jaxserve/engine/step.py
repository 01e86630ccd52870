"""THE step: embed, run the layers over the paged cache, sample. One function, any mix of requests.

Shapes come from a bucket; everything else (who decodes, who prefills, how each row is sampled) is
data, so that one compiled program serves every combination.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxserve.engine.forward_batch import FROM_SLOT, BatchLayout
from jaxserve.model.definition import ModelDefinition
from jaxserve.sampling import SlotState, sample
from sharding import KV_CACHE_SPEC, partition_specs


class StepOutput(NamedTuple):
    """What a dispatch leaves on the device for the host to read one dispatch later."""

    token_ids: Int32[Array, "steps B"]
    """Sampled; they mean something in rows that sample."""
    hidden: Float[Array, "T D"] | None
    """After the final norm, where there is one step."""


def make_step(
    definition: ModelDefinition, mesh: Mesh, layout: BatchLayout, num_steps: int
) -> Callable[..., tuple[tuple[Float[Array, "P K 2 S H"], ...], SlotState, StepOutput]]:
    """The step for one bucket:
    (params, kv_caches, slots, packed, token_masks) -> (kv_caches, slots, output).

    With `num_steps` over 1, that many steps of rows that decode, one after another: a dispatch
    costs the host more than a small step costs the device. Runs under `shard_map` over the mesh's
    tensor axis; `kv_caches` and `slots` are donated.
    """

    def step(params, kv_caches, slots: SlotState, packed: Int32[Array, "size"], token_masks, index):
        batch = layout.unpack(packed, index)
        model = definition.bind(params)
        from_slot = batch.token_ids == FROM_SLOT
        token_ids = jnp.where(from_slot, slots.last_token[batch.token_slots], batch.token_ids)
        hidden, kv_caches = model(token_ids, kv_caches, batch.attention)
        logits = model.logits(hidden[batch.last_tokens])
        sampled, slots = sample(logits, batch.rows, slots, token_masks, impl=model.impl)
        return kv_caches, slots, sampled, hidden

    def one_step(params, kv_caches, slots, *inputs):
        kv_caches, slots, sampled, hidden = step(params, kv_caches, slots, *inputs, 0)
        return kv_caches, slots, StepOutput(sampled[None], hidden)

    def several_steps(params, kv_caches, slots, *inputs):
        def body(index, carry):
            kv_caches, slots, token_ids = carry
            kv_caches, slots, sampled, _ = step(params, kv_caches, slots, *inputs, index)
            return kv_caches, slots, token_ids.at[index].set(sampled)

        token_ids = jnp.zeros((num_steps, layout.bucket.num_rows), jnp.int32)
        carry = (kv_caches, slots, token_ids)
        kv_caches, slots, token_ids = jax.lax.fori_loop(0, num_steps, body, carry)
        return kv_caches, slots, StepOutput(token_ids, None)

    sharded = jax.shard_map(
        one_step if num_steps == 1 else several_steps,
        mesh=mesh,
        in_specs=(
            partition_specs(definition.abstract_params),
            KV_CACHE_SPEC,
            P(),
            P(),
            P(),
        ),
        out_specs=(KV_CACHE_SPEC, P(), P()),
        check_vma=False,
    )

    def from_host(params, kv_caches, slots, packed, token_masks):
        packed = jax.device_put(packed, jax.memory.Space.Device)
        return sharded(params, kv_caches, slots, packed, token_masks)

    on_gpu = mesh.devices.flat[0].platform == "gpu"
    return jax.jit(from_host if on_gpu else sharded, donate_argnums=(1, 2))

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

from jaxserve.engine.forward_batch import FROM_SLOT, NO_TARGET, BatchLayout, ForwardBatch
from jaxserve.model.definition import ModelDefinition
from jaxserve.sampling import SampleOutput, SlotState, sample, token_logprobs
from sharding import KV_CACHE_SPEC, partition_specs

PROMPT_LOGPROBS_TILE = 64
"""Positions whose logits exist at one time: T x V would not fit."""


class StepOutput(NamedTuple):
    """What a step leaves on the device for the host to read one step later."""

    sampled: SampleOutput
    prompt: SampleOutput
    """At each flat token: its prompt target's log-probability, rank and the candidates."""


def make_step(
    definition: ModelDefinition, mesh: Mesh, layout: BatchLayout, max_logprobs: int
) -> Callable[..., tuple[tuple[Float[Array, "P K 2 S H"], ...], SlotState, StepOutput]]:
    """The step for one bucket:
    (params, kv_caches, slots, packed, token_masks) -> (kv_caches, slots, output).

    Runs under `shard_map` over the mesh's tensor axis; `kv_caches` and `slots` are donated.
    """

    def step(params, kv_caches, slots: SlotState, packed: Int32[Array, "size"], token_masks):
        batch = layout.unpack(packed)
        model = definition.bind(params)
        from_slot = batch.token_ids == FROM_SLOT
        token_ids = jnp.where(from_slot, slots.last_token[batch.token_slots], batch.token_ids)
        hidden, kv_caches = model(token_ids, kv_caches, batch.attention)
        logits = model.logits(hidden[batch.last_tokens])
        prompt = _prompt_logprobs(model, hidden, batch, max_logprobs)
        sampled, slots = sample(logits, batch.rows, slots, token_masks, max_logprobs=max_logprobs)
        return kv_caches, slots, StepOutput(sampled, prompt)

    sharded = jax.shard_map(
        step,
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
    return jax.jit(sharded, donate_argnums=(1, 2))


def _prompt_logprobs(
    model, hidden: Float[Array, "T D"], batch: ForwardBatch, max_logprobs: int
) -> SampleOutput:
    num_tokens = hidden.shape[0]
    tile = min(PROMPT_LOGPROBS_TILE, num_tokens)
    num_tiles = -(-num_tokens // tile)
    padding = num_tiles * tile - num_tokens

    def compute() -> SampleOutput:
        tiles = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_tiles, tile, -1)
        targets = jnp.maximum(jnp.pad(batch.prompt_targets, (0, padding)), 0)
        targets = targets.reshape(num_tiles, tile)
        outputs = jax.lax.map(
            lambda x: SampleOutput(x[1], *token_logprobs(model.logits(x[0]), x[1], max_logprobs)),
            (tiles, targets),
        )
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], outputs)

    def skip() -> SampleOutput:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))

    return jax.lax.cond(jnp.any(batch.prompt_targets != NO_TARGET), compute, skip)

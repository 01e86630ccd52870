"""The log-probabilities that requests ask for: a program beside the step, run only when asked for.

It scores positions of the step's hidden states anew, a tile at a time, so that the step itself
never holds T x V logits, and one that nobody asks for costs nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.step import StepOutput
from jaxserve.model.definition import ModelDefinition, Params
from jaxserve.sampling import TokenLogprobs, token_logprobs
from scheduler import SchedulerOutput
from sharding import partition_specs

_MAX_TILE = 64


def tile_size(layout: BatchLayout) -> int:
    """Positions that are scored at once."""
    return min(_MAX_TILE, layout.bucket.num_tokens)


def make_logprobs(
    definition: ModelDefinition, mesh: Mesh, max_logprobs: int
) -> Callable[..., TokenLogprobs]:
    """(params, hidden, sampled, queries) -> log-probabilities, for one bucket's shapes.

    Each query is a flat position and a token to score there: its id, or -1 - b for the one that
    row b has sampled.
    """

    def score(
        params: Params,
        hidden: Float[Array, "T D"],
        sampled: Int32[Array, "1 B"],
        queries: Int32[Array, "n 2"],
    ) -> TokenLogprobs:
        positions, tokens = queries[:, 0], queries[:, 1]
        token_ids = jnp.where(tokens < 0, sampled[0, -1 - tokens], tokens)
        logits = definition.bind(params).logits(hidden[positions])
        return token_logprobs(logits, token_ids, max_logprobs)

    sharded = jax.shard_map(
        score,
        mesh=mesh,
        in_specs=(partition_specs(definition.abstract_params), P(), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(sharded)


@dataclass(slots=True)
class StepLogprobs:
    """What one step's rows asked for, in tiles that may be on the device yet."""

    sampled: dict[str, int]
    """Of each request that asks for its output's: the index of its sampled token."""
    prompts: dict[str, int]
    """Of each that asks for its prompt's: the index of the chunk's first position."""
    tiles: list[TokenLogprobs]

    def fetch(self) -> TokenLogprobs:
        """All tiles in one, on the host."""
        columns = zip(*self.tiles, strict=True)
        return TokenLogprobs(*(np.concatenate([np.asarray(x) for x in c]) for c in columns))


def launch_logprobs(
    program: Callable[..., TokenLogprobs],
    tile: int,
    params: Params,
    output: StepOutput,
    scheduled: SchedulerOutput,
    states: Mapping[str, RequestState],
    sharding: NamedSharding,
) -> StepLogprobs | None:
    """Score what the rows of a launched step ask for, if they do."""
    queries: list[tuple[int, int]] = []
    sampled, prompts = {}, {}
    flat = 0
    for index, row in enumerate(scheduled.scheduled):
        state = states[row.request_id]
        if state.params.prompt_logprobs is not None and row.token_ids is not None:
            prompts[row.request_id] = len(queries)
            known = state.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]
            queries += [(flat + i, token) for i, token in enumerate(known)]
        flat += row.num_tokens
        if state.params.logprobs is not None and row.samples:
            sampled[row.request_id] = len(queries)
            queries.append((flat - 1, -1 - index))
    if not queries:
        return None
    tiles = []
    for first in range(0, len(queries), tile):
        part = np.zeros((tile, 2), np.int32)
        part[: len(queries) - first] = queries[first : first + tile]
        tiles.append(
            program(params, output.hidden, output.token_ids, jax.device_put(part, sharding))
        )
    return StepLogprobs(sampled, prompts, tiles)

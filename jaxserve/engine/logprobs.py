"""The log-probabilities that requests ask for: a program beside the step, run only when asked for.

It scores positions of the step's hidden states anew, a tile at a time, so that the step itself
never holds T x V logits, and one that nobody asks for costs nothing.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from jaxserve.engine.request_state import RequestState
from jaxserve.engine.state import StepOutput
from jaxserve.model.definition import ModelDefinition, Params
from jaxserve.sampling import TokenLogprobs, token_logprobs
from scheduler import SchedulerOutput
from sharding import partition_specs

LOGPROBS_TILES = (1, 8, 64)
"""How many positions are scored at once: as few of these as hold them all."""


def make_logprobs(
    definition: ModelDefinition, mesh: Mesh, max_logprobs: int
) -> Callable[..., TokenLogprobs]:
    """(params, output, queries) -> log-probabilities, whatever the step's bucket.

    Each query is a flat position and a token to score there: its id, or -1 - b for the one that
    row b has sampled.
    """

    def score(
        params: Params,
        output: StepOutput,
        queries: Int32[Array, "n 2"],
    ) -> TokenLogprobs:
        positions, tokens = queries[:, 0], queries[:, 1]
        token_ids = jnp.where(tokens < 0, output.token_ids[0, -1 - tokens], tokens)
        logits = definition.bind(params).logits(output.hidden[positions])
        return token_logprobs(logits, token_ids, max_logprobs)

    sharded = jax.shard_map(
        score,
        mesh=mesh,
        in_specs=(partition_specs(definition.abstract_params), P(), P()),
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
    programs: Mapping[int, Callable[..., TokenLogprobs]],
    params: Params,
    output: StepOutput,
    scheduled: SchedulerOutput,
    states: Mapping[str, RequestState],
    sharding: NamedSharding,
) -> StepLogprobs | None:
    """Score what the rows of a launched step ask for, if they do; `programs` are by tile."""
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
    for part in itertools.batched(queries, max(programs)):
        tile = min(size for size in programs if size >= len(part))
        padded = np.zeros((tile, 2), np.int32)
        padded[: len(part)] = part
        padded = jax.device_put(padded, sharding)
        tiles.append(programs[tile](params, output, padded))
    return StepLogprobs(sampled, prompts, tiles)

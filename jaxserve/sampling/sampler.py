"""Logits to token ids inside the one jitted step."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.sampling_params import MIN_TEMPERATURE
from pallas_kernels.sample_tokens import SamplingRows, SlotState, sample_tokens


class TokenLogprobs(NamedTuple):
    """Of one token at each of n positions, and of the most likely ones there: natural
    log-probabilities of the raw logits. Candidates come most likely first, the lowest id first
    where they tie; a rank is 1 + the number of tokens that are more likely."""

    logprobs: Float32[Array, "n"]
    ranks: Int32[Array, "n"]
    top_token_ids: Int32[Array, "n max_logprobs"]
    top_logprobs: Float32[Array, "n max_logprobs"]


def token_logprobs(
    logits: Float32[Array, "n V"], token_ids: Int32[Array, "n"], max_logprobs: int
) -> TokenLogprobs:
    """Score `token_ids`, and find the `max_logprobs` candidates of each position."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    ranks = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top_logits, top_token_ids = jax.lax.top_k(logits, max_logprobs)
    return TokenLogprobs(chosen[:, 0] - total, ranks, top_token_ids, top_logits - total[:, None])


def sample(
    logits: Float32[Array, "B V"],
    rows: SamplingRows,
    state: SlotState,
    token_masks: Int32[Array, "B W"],
    *,
    impl: Literal["reference", "triton"],
) -> tuple[Int32[Array, "B"], SlotState]:
    """`sample_tokens`, with temperatures under MIN_TEMPERATURE made greedy."""
    greedy = rows.temperature < MIN_TEMPERATURE
    rows = rows._replace(temperature=jnp.where(greedy, 0, rows.temperature))
    return sample_tokens(logits, rows, state, token_masks, impl=impl)

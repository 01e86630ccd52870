"""Where top-k and top-p cut a row, exactly and without sorting the vocabulary.

Scores are shifted so that each row's best is 0 and no other is over it. The bits of their
magnitudes, read as unsigned integers, then order them (0 = most likely), and a cut is the integer
key up to which entries are kept. The cut is found digit by digit, most significant first, as in a
radix select: each round tries every value of the next digit at once. Entries that tie with the
last one kept are kept too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

DIGIT_BITS = 2
NUM_ROUNDS = 32 // DIGIT_BITS


def _largest_key(
    below: Callable[[UInt32[Array, "B"]], Bool[Array, "B"]], num_rows: int
) -> UInt32[Array, "B"]:
    """The largest key that `below` holds for; it holds for all keys up to that one."""

    def add_digit(round_: Int32[Array, ""], cut: UInt32[Array, "B"]) -> UInt32[Array, "B"]:
        shift = jnp.uint32(32 - DIGIT_BITS) - jnp.uint32(DIGIT_BITS) * round_.astype(jnp.uint32)
        holds = [below(cut + (jnp.uint32(digit) << shift)) for digit in range(1, 1 << DIGIT_BITS)]
        return cut + (sum(h.astype(jnp.uint32) for h in holds) << shift)

    return jax.lax.fori_loop(0, NUM_ROUNDS, add_digit, jnp.zeros(num_rows, jnp.uint32))


def _keys(scores: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    return jax.lax.bitcast_convert_type(jnp.abs(scores), jnp.uint32)


def keep_top_k(scores: Float32[Array, "B V"], top_k: UInt32[Array, "B"]) -> Bool[Array, "B V"]:
    """The `top_k` (at least 1) highest scores of each row. Scores are at most 0."""
    keys = _keys(scores)

    def below(key: UInt32[Array, "B"]) -> Bool[Array, "B"]:
        return jnp.sum(keys < key[:, None], axis=-1, dtype=jnp.uint32) < top_k

    return keys <= _largest_key(below, len(scores))[:, None]


def keep_top_p(scores: Float32[Array, "B V"], top_p: Float32[Array, "B"]) -> Bool[Array, "B V"]:
    """The fewest most likely entries whose probabilities reach `top_p`; never fewer than one.

    Scores are log-probabilities up to a constant, with each row's highest 0, or all -inf. Masses
    are summed in float32.
    """
    keys = _keys(scores)
    weights = jnp.exp(scores)
    wanted = top_p * jnp.sum(weights, axis=-1)

    def below(key: UInt32[Array, "B"]) -> Bool[Array, "B"]:
        return jnp.sum(jnp.where(keys < key[:, None], weights, 0), axis=-1) < wanted

    return keys <= _largest_key(below, len(scores))[:, None]

"""Bit masks of the vocabulary: token t is bit t % 32 of word t // 32."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """W, the words of one row's mask."""
    return -(-vocab_size // WORD_BITS)


def unpack_masks(masks: Int32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Whether each token's bit is set."""
    bits = (masks[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.int32)) & 1
    return bits.reshape(len(masks), -1)[:, :vocab_size] != 0

"""What sampling reads: a step's rows, the slots' memory, and bit masks of the vocabulary."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float32, Int32, UInt8, UInt32

IN_PROMPT = 1
IS_STOP = 2
IN_OUTPUT = 4
NO_TOKEN = -1
MASK_WORD_BITS = 32


class SamplingRows(NamedTuple):
    """One step's B rows. A padding row has `samples` False and every parameter neutral."""

    slots: Int32[Array, "B"]
    samples: Bool[Array, "B"]
    """Whether the row yields a token; its slot then occurs in no other such row."""
    temperature: Float32[Array, "B"]
    """0 = greedy."""
    top_p: Float32[Array, "B"]
    top_k: Int32[Array, "B"]
    """0 = no limit."""
    min_p: Float32[Array, "B"]
    presence_penalty: Float32[Array, "B"]
    frequency_penalty: Float32[Array, "B"]
    repetition_penalty: Float32[Array, "B"]
    seed: UInt32[Array, "B 2"]
    """The request's threefry key."""
    output_index: Int32[Array, "B"]
    """How many tokens the request has put out; folded into the key."""
    has_bias: Bool[Array, "B"]
    """Whether the slot's logit_bias applies (logit_bias, allowed_token_ids or bad_words)."""
    has_bad_words: Bool[Array, "B"]
    """Whether the slot holds bad words of several tokens."""
    has_grammar: Bool[Array, "B"]
    """Whether the row's token mask applies."""
    mask_stop_tokens: Bool[Array, "B"]
    """Whether min_tokens is not reached yet."""


class SlotState(NamedTuple):
    """R = max_num_seqs slots. Donate it to every step: each changes a few elements in place.

    Only `last_token` means something for a request that needs no slot state; the other arrays may
    still hold an earlier request's rows there, and no parameter of such a request reads them.
    """

    last_token: Int32[Array, "R"]
    logit_bias: Float32[Array, "R V"]
    """Added to the logits; -inf for a banned token."""
    token_flags: UInt8[Array, "R V"]
    """IN_PROMPT, IS_STOP and IN_OUTPUT bits."""
    output_counts: Int32[Array, "R V"]
    """Over 0 exactly where IN_OUTPUT is set, so that few of them need be read."""
    recent_tokens: Int32[Array, "R recent"]
    """Newest last, prompt and output; NO_TOKEN before the first."""
    bad_words: Int32[Array, "R words length"]
    """Right-aligned token sequences of two tokens or more, filled up with NO_TOKEN."""


def num_mask_words(vocab_size: int) -> int:
    """W, the words of one row's mask: token t is bit t % 32 of word t // 32."""
    return -(-vocab_size // MASK_WORD_BITS)

"""What sampling remembers of a running request, in its slot of device-resident arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8

from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from pallas_kernels.sample_tokens import IN_OUTPUT, IN_PROMPT, IS_STOP, NO_TOKEN, SlotState


class SlotRows(NamedTuple):
    """One slot's part of SlotState, made on the host; `load_slot` takes it."""

    logit_bias: Float32[np.ndarray, "V"]
    token_flags: UInt8[np.ndarray, "V"]
    output_counts: Int32[np.ndarray, "V"]
    recent_tokens: Int32[np.ndarray, "recent"]
    bad_words: Int32[np.ndarray, "words length"]


def new_slot_state(max_num_seqs: int, vocab_size: int) -> SlotState:
    """Slots of no request. 9 bytes a slot and vocabulary entry."""
    return SlotState(
        last_token=jnp.zeros(max_num_seqs, jnp.int32),
        logit_bias=jnp.zeros((max_num_seqs, vocab_size), jnp.float32),
        token_flags=jnp.zeros((max_num_seqs, vocab_size), jnp.uint8),
        output_counts=jnp.zeros((max_num_seqs, vocab_size), jnp.int32),
        recent_tokens=jnp.full((max_num_seqs, MAX_BAD_WORD_TOKENS - 1), NO_TOKEN, jnp.int32),
        bad_words=jnp.full((max_num_seqs, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, jnp.int32),
    )


def load_slot(
    state: SlotState,
    slot: Int32[Array, ""],
    logit_bias: Float32[Array, "V"],
    token_flags: UInt8[Array, "V"],
    output_counts: Int32[Array, "V"],
    recent_tokens: Int32[Array, "recent"],
    bad_words: Int32[Array, "words length"],
) -> SlotState:
    """The state with the rows of `slot_rows` in `slot`. To be jitted with `state` donated."""
    return SlotState(
        last_token=state.last_token,
        logit_bias=state.logit_bias.at[slot].set(logit_bias),
        token_flags=state.token_flags.at[slot].set(token_flags),
        output_counts=state.output_counts.at[slot].set(output_counts),
        recent_tokens=state.recent_tokens.at[slot].set(recent_tokens),
        bad_words=state.bad_words.at[slot].set(bad_words),
    )


def needs_slot_state(params: SamplingParams) -> bool:
    """Whether `load_slot` must run before the request's first token is sampled."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens > 0
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def check_token_ids(
    params: SamplingParams, bad_word_token_ids: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """Raises ValueError where a parameter names a token outside the vocabulary, or bad words
    exceed what a slot holds."""
    for name, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"{name} must name token ids from 0 to {vocab_size - 1}, got {outside[0]}"
            )
    longest = max((len(word) for word in bad_word_token_ids), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words must be of at most {MAX_BAD_WORD_TOKENS} tokens each, got one of {longest}"
        )
    num_sequences = sum(len(word) > 1 for word in bad_word_token_ids)
    if num_sequences > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words must make at most {MAX_BAD_WORDS} sequences of several tokens (with and "
            f"without a leading space), got {num_sequences}"
        )


def slot_rows(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    stop_token_ids: Sequence[int],
    bad_word_token_ids: Sequence[Sequence[int]],
    vocab_size: int,
) -> SlotRows:
    """The slot of a request that starts, or that resumes after `output_token_ids`.

    `stop_token_ids`: all that end the request, the end-of-sequence ids among them; `min_tokens`
    bans them. Raises ValueError as `check_token_ids` does.
    """
    check_token_ids(params, bad_word_token_ids, vocab_size)
    bias = np.zeros(vocab_size, np.float32)
    if params.logit_bias:
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
    if params.allowed_token_ids is not None:
        banned = np.ones(vocab_size, bool)
        banned[list(params.allowed_token_ids)] = False
        bias[banned] = -np.inf
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    bias[[word[0] for word in bad_word_token_ids if len(word) == 1]] = -np.inf
    for row, word in zip(words, (w for w in bad_word_token_ids if len(w) > 1), strict=False):
        row[-len(word) :] = word

    flags = np.zeros(vocab_size, np.uint8)
    flags[list(prompt_token_ids)] |= IN_PROMPT
    flags[list(stop_token_ids)] |= IS_STOP
    flags[list(output_token_ids)] |= IN_OUTPUT
    counts = np.bincount(np.asarray(output_token_ids, np.int64), minlength=vocab_size)

    num_recent = MAX_BAD_WORD_TOKENS - 1
    tail = [*prompt_token_ids[-num_recent:], *output_token_ids[-num_recent:]][-num_recent:]
    recent = np.full(num_recent, NO_TOKEN, np.int32)
    if tail:
        recent[-len(tail) :] = tail
    return SlotRows(bias, flags, counts.astype(np.int32), recent, words)

"""Sampling in plain JAX.

Each part runs only in steps in which some row asks for it, and changes only such rows, so a row's
token does not depend on what the other rows ask for.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.sample_tokens.arrays import (
    IN_OUTPUT,
    IN_PROMPT,
    IS_STOP,
    MASK_WORD_BITS,
    NO_TOKEN,
    SamplingRows,
    SlotState,
)
from pallas_kernels.sample_tokens.truncation import keep_top_k, keep_top_p

type Logits = Float32[Array, "B V"]


def choose_tokens(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    state: SlotState,
    token_masks: Int32[Array, "B W"],
) -> Int32[Array, "B"]:
    logits = logits.astype(jnp.float32)
    random = rows.samples & (rows.temperature > 0)
    penalised = rows.samples & (
        (rows.presence_penalty != 0)
        | (rows.frequency_penalty != 0)
        | (rows.repetition_penalty != 1)
    )
    banned = rows.samples & (
        rows.has_bias | rows.has_bad_words | rows.mask_stop_tokens | rows.has_grammar
    )

    def plain() -> Int32[Array, "B"]:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def shaped() -> Int32[Array, "B"]:
        allowed = _if_any(banned, _ban, logits, rows, state, token_masks)
        final = _if_any(penalised, _penalise, allowed, rows, state)
        drawn = _if_any(random, _perturb, final, rows, random)
        return jnp.argmax(drawn, axis=-1).astype(jnp.int32)

    return jax.lax.cond(jnp.any(random | penalised | banned), shaped, plain)


def _if_any(condition: Bool[Array, "B"], change, logits: Logits, *operands) -> Logits:
    return jax.lax.cond(jnp.any(condition), lambda: change(logits, *operands), lambda: logits)


def _ban(
    raw: Logits, rows: SamplingRows, state: SlotState, token_masks: Int32[Array, "B W"]
) -> Logits:
    def bias(logits: Logits) -> Logits:
        return jnp.where(rows.has_bias[:, None], logits + state.logit_bias[rows.slots], logits)

    def stop_tokens(logits: Logits) -> Logits:
        is_stop = (state.token_flags[rows.slots] & IS_STOP) != 0
        return jnp.where(rows.mask_stop_tokens[:, None] & is_stop, -jnp.inf, logits)

    def bad_words(logits: Logits) -> Logits:
        prefixes = state.bad_words[rows.slots, :, :-1]
        last = state.bad_words[rows.slots, :, -1]
        recent = state.recent_tokens[rows.slots][:, None]
        complete = jnp.all((prefixes == NO_TOKEN) | (prefixes == recent), axis=-1)
        complete &= (last != NO_TOKEN) & rows.has_bad_words[:, None]
        out_of_range = logits.shape[1]
        return logits.at[
            jnp.arange(len(logits))[:, None], jnp.where(complete, last, out_of_range)
        ].set(-jnp.inf, mode="drop")

    def grammar(logits: Logits) -> Logits:
        allowed = _unpack_masks(token_masks, logits.shape[1])
        both = jnp.where(allowed, logits, -jnp.inf)
        # A wrong text is worse than one that breaks another parameter's rule.
        any_left = jnp.any(both > -jnp.inf, axis=-1, keepdims=True)
        both = jnp.where(any_left, both, jnp.where(allowed, raw, -jnp.inf))
        return jnp.where(rows.has_grammar[:, None], both, logits)

    logits = _if_any(rows.has_bias, bias, raw)
    logits = _if_any(rows.mask_stop_tokens, stop_tokens, logits)
    logits = _if_any(rows.has_bad_words, bad_words, logits)
    return _if_any(rows.has_grammar, grammar, logits)


def _penalise(logits: Logits, rows: SamplingRows, state: SlotState) -> Logits:
    """Repetition over prompt and output (Keskar et al. 2019, arXiv:1909.05858, section 4.1);
    frequency and presence over the output alone (OpenAI's API)."""
    counts = state.output_counts[rows.slots]
    in_prompt = (state.token_flags[rows.slots] & IN_PROMPT) != 0

    repetition = rows.repetition_penalty[:, None]
    repeated = (in_prompt | (counts > 0)) & (repetition != 1)
    logits = jnp.where(
        repeated, jnp.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    present = rows.frequency_penalty[:, None] * counts + rows.presence_penalty[:, None]
    counted = (rows.frequency_penalty != 0) | (rows.presence_penalty != 0)
    return jnp.where(counted[:, None] & (counts > 0), logits - present, logits)


def _perturb(logits: Logits, rows: SamplingRows, random: Bool[Array, "B"]) -> Logits:
    """Logits whose argmax, in `random` rows, is a draw from the row's truncated distribution (the
    Gumbel-max trick)."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)  # -inf - -inf is NaN, where all is banned
    temperature = jnp.where(random, rows.temperature, 1)[:, None]
    scores = (logits - top) / temperature
    scores = jnp.where(jnp.exp(scores) < rows.min_p[:, None], -jnp.inf, scores)

    def limit_count(scores: Logits) -> Logits:
        limited = rows.top_k > 0
        kept = keep_top_k(scores, jnp.where(limited, rows.top_k, 1).astype(jnp.uint32))
        return jnp.where(kept | ~limited[:, None], scores, -jnp.inf)

    def limit_mass(scores: Logits) -> Logits:
        kept = keep_top_p(scores, rows.top_p)
        return jnp.where(kept | (rows.top_p >= 1)[:, None], scores, -jnp.inf)

    scores = _if_any(random & (rows.top_k > 0), limit_count, scores)
    scores = _if_any(random & (rows.top_p < 1), limit_mass, scores)

    def noise(seed: UInt32[Array, "2"], index: Int32[Array, ""]) -> Float32[Array, "V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    noisy = scores + jax.vmap(noise)(rows.seed, rows.output_index)
    return jnp.where(random[:, None], noisy, logits)


def note_tokens(token_ids: Int32[Array, "B"], rows: SamplingRows, state: SlotState) -> SlotState:
    no_slot = len(state.last_token)
    slots = jnp.where(rows.samples, rows.slots, no_slot)
    recent = jnp.concatenate([state.recent_tokens[rows.slots][:, 1:], token_ids[:, None]], axis=1)
    flags = state.token_flags[rows.slots, token_ids] | jnp.uint8(IN_OUTPUT)
    return state._replace(
        last_token=state.last_token.at[slots].set(token_ids, mode="drop"),
        token_flags=state.token_flags.at[slots, token_ids].set(flags, mode="drop"),
        output_counts=state.output_counts.at[slots, token_ids].add(1, mode="drop"),
        recent_tokens=state.recent_tokens.at[slots].set(recent, mode="drop"),
    )


def _unpack_masks(masks: Int32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    bits = (masks[:, :, None] >> jnp.arange(MASK_WORD_BITS, dtype=jnp.int32)) & 1
    return bits.reshape(len(masks), -1)[:, :vocab_size] != 0

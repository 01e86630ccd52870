"""A row's parameters as the kernels read them, and its logits as its bans and penalties change
them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.sample_tokens.arrays import (
    IN_OUTPUT,
    IN_PROMPT,
    IS_STOP,
    MASK_WORD_BITS,
    NO_TOKEN,
    SamplingRows,
)
from pallas_kernels.sample_tokens.triton_random import threefry
from pallas_kernels.triton_import import tl, triton

# What a row asks for, in bits.
SAMPLES = tl.constexpr(1)
RANDOM = tl.constexpr(2)
_BIAS = tl.constexpr(4)
_BAD_WORDS = tl.constexpr(8)
_STOP_TOKENS = tl.constexpr(16)
GRAMMAR = tl.constexpr(32)
_REPETITION = tl.constexpr(64)
_COUNTED = tl.constexpr(128)
CUT = tl.constexpr(256)
"""By top-k, and maybe by top-p as well."""
NUCLEUS = tl.constexpr(512)
"""By top-p alone."""
OTHER_BANS = tl.constexpr(4 | 8 | 16)
_CHANGES = tl.constexpr(4 | 8 | 16 | 32 | 64 | 128)
"""Of logits."""

# Where a row's parameters lie.
SLOT = tl.constexpr(0)
KIND = tl.constexpr(1)
TEMPERATURE = tl.constexpr(2)
TOP_P = tl.constexpr(3)
TOP_K = tl.constexpr(4)
MIN_P = tl.constexpr(5)
_PRESENCE_PENALTY = tl.constexpr(6)
_FREQUENCY_PENALTY = tl.constexpr(7)
_REPETITION_PENALTY = tl.constexpr(8)
_SEED_HIGH = tl.constexpr(9)
_SEED_LOW = tl.constexpr(10)
_OUTPUT_INDEX = tl.constexpr(11)
_NUM_PARAMS = tl.constexpr(12)

_IN_PROMPT = tl.constexpr(IN_PROMPT)
_IN_OUTPUT = tl.constexpr(IN_OUTPUT)
_IS_STOP = tl.constexpr(IS_STOP)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WORD_BITS = tl.constexpr(MASK_WORD_BITS)


def pack(rows: SamplingRows) -> Int32[Array, "B params"]:
    """A row's parameters side by side."""
    random = rows.temperature > 0
    asked = (
        (SAMPLES, rows.samples),
        (RANDOM, random),
        (_BIAS, rows.has_bias),
        (_BAD_WORDS, rows.has_bad_words),
        (_STOP_TOKENS, rows.mask_stop_tokens),
        (GRAMMAR, rows.has_grammar),
        (_REPETITION, rows.repetition_penalty != 1),
        (_COUNTED, (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)),
        (CUT, random & (rows.top_k > 0)),
        (NUCLEUS, rows.samples & random & (rows.top_k == 0) & (rows.top_p < 1)),
    )
    columns = (
        rows.slots,
        sum(jnp.where(asks, bit.value, 0) for bit, asks in asked),
        rows.temperature,
        rows.top_p,
        rows.top_k,
        rows.min_p,
        rows.presence_penalty,
        rows.frequency_penalty,
        rows.repetition_penalty,
        rows.seed[:, 0],
        rows.seed[:, 1],
        rows.output_index,
    )
    return jnp.stack([jax.lax.bitcast_convert_type(c, jnp.int32) for c in columns], axis=1)


@triton.jit
def shaped(token, valid, row, kind, inputs, sizes: tl.constexpr):
    """Logits as the row's bans and penalties change them; -inf where not valid."""
    if kind & _CHANGES == 0:
        place = inputs[0] + row * sizes[0] + token
        x = tl.load(place, mask=valid, other=float("-inf")).to(tl.float32)
    else:
        x = _changed(token, valid, row, kind, inputs, sizes)
    return x


@triton.jit
def _changed(token, valid, row, kind, inputs, sizes: tl.constexpr):
    V: tl.constexpr = sizes[0]
    MASK_WORDS: tl.constexpr = sizes[1]
    slot = integer(inputs[1], row, SLOT).to(tl.int64)
    logits = tl.load(inputs[0] + row * V + token, mask=valid, other=float("-inf"))
    # Masked, not skipped: a branch would have the logits arrive first.
    flagged = kind & (_STOP_TOKENS | _REPETITION | _COUNTED) != 0
    flags = tl.load(inputs[3] + slot * V + token, mask=valid & flagged, other=0)
    x = logits.to(tl.float32)
    if kind & _BIAS != 0:
        x += tl.load(inputs[2] + slot * V + token, mask=valid, other=0.0)
    if kind & _STOP_TOKENS != 0:
        x = tl.where(flags & _IS_STOP != 0, float("-inf"), x)
    if kind & _BAD_WORDS != 0:
        banned = _completed_words(slot, inputs, sizes)
        banned_id = tl.min(banned, axis=0)
        while banned_id < V:
            x = tl.where(token == banned_id, float("-inf"), x)
            banned_id = tl.min(tl.where(banned > banned_id, banned, V), axis=0)
    if kind & GRAMMAR != 0:
        word = row * MASK_WORDS + token // _WORD_BITS
        bits = tl.load(inputs[7] + word, mask=valid, other=0)
        x = tl.where((bits >> (token % _WORD_BITS)) & 1 != 0, x, float("-inf"))
    if kind & _REPETITION != 0:
        repetition = number(inputs[1], row, _REPETITION_PENALTY)
        penalised = tl.where(x > 0, quotient(x, repetition), x * repetition)
        x = tl.where(flags & (_IN_PROMPT | _IN_OUTPUT) != 0, penalised, x)
    if kind & _COUNTED != 0:
        present = flags & _IN_OUTPUT != 0
        counts = tl.load(inputs[4] + slot * V + token, mask=valid & present, other=0)
        frequency = number(inputs[1], row, _FREQUENCY_PENALTY)
        penalty = frequency * counts + number(inputs[1], row, _PRESENCE_PENALTY)
        x = tl.where(present, x - penalty, x)
    return x


@triton.jit
def _completed_words(slot, inputs, sizes: tl.constexpr):
    """The last token of each bad word whose others are the most recent ones, else V."""
    V: tl.constexpr = sizes[0]
    WORDS: tl.constexpr = sizes[2]
    LENGTH: tl.constexpr = sizes[3]
    place = tl.arange(0, LENGTH)
    is_last = (place == LENGTH - 1)[None, :]
    word = (slot * WORDS + tl.arange(0, WORDS)) * LENGTH
    words = tl.load(inputs[5] + word[:, None] + place[None, :])
    recent = tl.load(
        inputs[6] + slot * (LENGTH - 1) + place, mask=place < LENGTH - 1, other=_NO_TOKEN
    )
    matches = is_last | (words == _NO_TOKEN) | (words == recent[None, :])
    last = tl.sum(tl.where(is_last, words, 0), axis=1)
    complete = (tl.min(matches.to(tl.int32), axis=1) != 0) & (last != _NO_TOKEN)
    return tl.where(complete, last, V)


@triton.jit
def quotient(x, divisor):
    """x / divisor, correctly rounded, by one division for all of x (Markstein 1990, "Computation
    of elementary functions on the IBM RISC System/6000 processor", theorem 8)."""
    inverse = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    rough = x * inverse
    close = tl.fma(tl.fma(-rough, divisor, x), inverse, rough)
    exact = tl.fma(tl.fma(-close, divisor, x), inverse, close)
    return tl.where(tl.abs(rough) < float("inf"), exact, rough)


@triton.jit
def integer(params, row, COLUMN: tl.constexpr):
    return tl.load(params + row * _NUM_PARAMS + COLUMN)


@triton.jit
def number(params, row, COLUMN: tl.constexpr):
    return integer(params, row, COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def row_key(params, row):
    """`jax.random.fold_in` of the row's key and its number of outputs."""
    high = integer(params, row, _SEED_HIGH).to(tl.uint32, bitcast=True)
    low = integer(params, row, _SEED_LOW).to(tl.uint32, bitcast=True)
    index = integer(params, row, _OUTPUT_INDEX).to(tl.uint32, bitcast=True)
    return threefry(high, low, tl.zeros_like(index), index)

"""Scores in Triton: their order, the best of them, and where to cut them."""

from pallas_kernels.sample_tokens.triton_rows import quotient
from pallas_kernels.triton_import import tl, triton

_NUM_DIGITS = tl.constexpr(16)
_COARSE_BITS = tl.constexpr(16)
"""Of a key, from bit 30: exponent and eight bits of mantissa."""
SEARCH_TILE = tl.constexpr(256)


@triton.jit
def scores_of(x, top, temperature):
    """Log-probabilities up to a constant, the best 0. Rounding keeps the order of logits."""
    return quotient(x - top, temperature)


@triton.jit
def order(scores):
    """Unsigned integers that order scores up to 0: the bits of the magnitude; 0 = most likely."""
    return tl.abs(scores).to(tl.uint32, bitcast=True)


@triton.jit
def better(best, best_id, values, ids, V: tl.constexpr):
    """The better of a best so far and these values; the lower id where they tie."""
    values = tl.ravel(values)
    other = tl.max(values, axis=0)
    other_id = tl.min(tl.where(values == other, tl.ravel(ids), V), axis=0)
    wins = (other > best) | ((other == best) & (other > float("-inf")) & (other_id < best_id))
    return tl.where(wins, other, best), tl.where(wins, other_id, best_id)


@triton.jit
def coarse_cut(scores, top_k):
    """A key, not far over the least one, up to which `top_k` of the scores are or all of them."""
    keys = order(scores)
    cut = tl.zeros([], tl.uint32)
    bit = tl.full([], 1 << 30, tl.uint32)  # No key has a higher one.
    for _ in range(_COARSE_BITS):
        num_below = tl.sum((keys < (cut | bit)).to(tl.int32), axis=0)
        cut = tl.where(num_below < top_k, cut | bit, cut)
        bit >>= 1
    return cut | (2 * bit - 1)


@triton.jit
def largest_key(scores, num, limit, wanted, BY_MASS: tl.constexpr):
    """The largest key such that entries of lower keys (of the `num` scores, those of keys up to
    `limit`) are fewer, or have less mass, than `wanted`. Sixteen keys are tried at once, digit by
    digit. Few scores stay in registers meanwhile."""
    digit = tl.arange(0, _NUM_DIGITS)
    first_keys, first_amounts = _entries(scores, 0, num, limit, BY_MASS)
    cut = tl.zeros([], tl.uint32)
    for round_ in range(8):
        shift = 28 - 4 * round_
        tried = cut + (digit.to(tl.uint32) << shift)
        below = tl.where(first_keys[:, None] < tried[None, :], first_amounts[:, None], 0.0)
        for start in range(SEARCH_TILE, num, SEARCH_TILE):
            keys, amounts = _entries(scores, start, num, limit, BY_MASS)
            below += tl.where(keys[:, None] < tried[None, :], amounts[:, None], 0.0)
        holds = (tl.sum(below, axis=0) < wanted) & (digit > 0)
        cut += tl.sum(holds.to(tl.int32), axis=0).to(tl.uint32) << shift
    return cut


@triton.jit
def mass(scores, num, limit):
    """Of the entries of keys up to `limit`."""
    total = tl.zeros([SEARCH_TILE], tl.float32)
    for start in range(0, num, SEARCH_TILE):
        total += _entries(scores, start, num, limit, True)[1]
    return tl.sum(total, axis=0)


@triton.jit
def _entries(scores, start, num, limit, BY_MASS: tl.constexpr):
    """(keys, amounts) of a tile of the `num` scores; no amount is left of keys over `limit`."""
    place = start + tl.arange(0, SEARCH_TILE)
    score = tl.load(scores + place, mask=place < num, other=float("-inf"))
    keys = order(score)
    amounts = tl.where((place < num) & (keys <= limit), 1.0, 0.0)
    if BY_MASS:
        amounts *= tl.exp(score)
    return keys, amounts

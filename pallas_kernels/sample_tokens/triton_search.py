"""Scores in Triton: their order, the best of them, and where to cut them."""

from pallas_kernels.triton_import import tl, triton

_NUM_DIGITS = tl.constexpr(16)
SEARCH_TILE = tl.constexpr(256)


@triton.jit
def scores_of(x, top, temperature):
    """Log-probabilities up to a constant, the best 0. Rounding keeps the order of logits."""
    return tl.div_rn(x - top, temperature + tl.zeros_like(x))


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
def largest_key(scores, num, limit, wanted, BY_MASS: tl.constexpr):
    """The largest key such that entries of lower keys (of the `num` scores, those of keys up to
    `limit`) are fewer, or have less mass, than `wanted`. Sixteen keys are tried at once, digit by
    digit."""
    digit = tl.arange(0, _NUM_DIGITS)
    cut = tl.zeros([], tl.uint32)
    for round_ in range(8):
        shift = 28 - 4 * round_
        tried = cut + (digit.to(tl.uint32) << shift)
        amounts = tl.zeros([SEARCH_TILE, _NUM_DIGITS], tl.float32)
        for start in range(0, num, SEARCH_TILE):
            place = start + tl.arange(0, SEARCH_TILE)
            score = tl.load(scores + place, mask=place < num, other=float("-inf"))
            keys = order(score)
            amount = tl.where((place < num) & (keys <= limit), 1.0, 0.0)
            if BY_MASS:
                amount *= tl.exp(score)
            amounts += tl.where(keys[:, None] < tried[None, :], amount[:, None], 0.0)
        holds = (tl.sum(amounts, axis=0) < wanted) & (digit > 0)
        cut += tl.sum(holds.to(tl.int32), axis=0).to(tl.uint32) << shift
    return cut


@triton.jit
def mass(scores, num, limit):
    """Of the entries of keys up to `limit`."""
    total = tl.zeros([SEARCH_TILE], tl.float32)
    for start in range(0, num, SEARCH_TILE):
        place = start + tl.arange(0, SEARCH_TILE)
        score = tl.load(scores + place, mask=place < num, other=float("-inf"))
        total += tl.where((place < num) & (order(score) <= limit), tl.exp(score), 0.0)
    return tl.sum(total, axis=0)

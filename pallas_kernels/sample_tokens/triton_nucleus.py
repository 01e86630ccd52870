"""The draw of a row with top_p alone, in Triton."""

from pallas_kernels.sample_tokens.triton_random import gumbel
from pallas_kernels.sample_tokens.triton_rows import (
    MIN_P,
    TEMPERATURE,
    TOP_P,
    number,
    row_key,
    shaped,
)
from pallas_kernels.sample_tokens.triton_search import better, order, scores_of
from pallas_kernels.triton_import import tl, triton


@triton.jit
def in_nucleus(token, row, kind, top, inputs, sizes: tl.constexpr, TILE: tl.constexpr):
    """The draw from the tokens that top-p keeps, `token` being that from all."""
    V: tl.constexpr = sizes[0]
    params = inputs[1]
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    temperature, min_p = number(params, row, TEMPERATURE), number(params, row, MIN_P)
    top_p, key = number(params, row, TOP_P), row_key(params, row)
    done = top_p >= 1
    while not done:
        drawn_id = token + tl.arange(0, 1)
        drawn = shaped(drawn_id, drawn_id < V, row, kind, inputs, sizes)
        drawn_order = tl.max(order(scores_of(drawn, top, temperature)), axis=0)
        total = tl.zeros([TILE], tl.float32)
        likelier = tl.zeros([TILE], tl.float32)
        for start in range(0, V, TILE):
            ids = start + tl.arange(0, TILE)
            x = shaped(ids, ids < V, row, kind, inputs, sizes)
            scores = scores_of(x, top, temperature)
            weights = tl.exp(scores)
            weights = tl.where((x > float("-inf")) & (weights >= min_p), weights, 0.0)
            total += weights
            likelier += tl.where(order(scores) < drawn_order, weights, 0.0)
        done = tl.sum(likelier, axis=0) < top_p * tl.sum(total, axis=0)
        if not done:
            best = tl.full([], float("-inf"), tl.float32)
            token = tl.zeros([], tl.int32)
            for start in range(0, V, TILE):
                ids = start + tl.arange(0, TILE)
                x = shaped(ids, ids < V, row, kind, inputs, sizes)
                scores = scores_of(x, top, temperature)
                # What is likelier than a drawn token passes min_p, as that one did.
                keep = order(scores) < drawn_order
                noisy = tl.where(keep, scores + gumbel(key, ids), float("-inf"))
                best, token = better(best, token, noisy, ids, V)
            done = best == float("-inf")
    return token

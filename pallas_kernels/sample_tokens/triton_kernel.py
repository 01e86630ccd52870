"""Sampling in three launches, none of which sorts.

`_summarise` reads the logits, as a row's bans and penalties change them, and keeps the highest of
each block of BLOCK tokens. `_gather` reads these maxima, and then only the blocks that can hold the
row's token: the k-th highest maximum is no more than the k-th highest logit, so top-k lies in the
blocks that reach it; and no noise lifts a token by more than _MAX_NOISE, so an uncut draw lies that
close to the best. `_draw` cuts what was gathered and draws.

A row with top_p alone is drawn as if it were whole. `_draw` then adds up what is more likely than
the drawn token: if that is less than top_p the token is the one that a draw from the nucleus would
have given; if not, no less likely token is in the nucleus either, and it draws again from the rest.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.sample_tokens.arrays import SamplingRows, SlotState
from pallas_kernels.sample_tokens.triton_nucleus import in_nucleus
from pallas_kernels.sample_tokens.triton_random import gumbel
from pallas_kernels.sample_tokens.triton_rows import (
    CUT,
    GRAMMAR,
    KIND,
    MIN_P,
    NUCLEUS,
    OTHER_BANS,
    RANDOM,
    SAMPLES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    integer,
    number,
    pack,
    row_key,
    shaped,
)
from pallas_kernels.sample_tokens.triton_search import (
    SEARCH_TILE,
    better,
    coarse_cut,
    largest_key,
    mass,
    order,
    scores_of,
)
from pallas_kernels.triton_import import jax_triton, tl, triton

BLOCK = 128
"""Tokens of which one maximum is kept."""
TILE = 16
"""Blocks that a program reads at once."""
SUMMARY_WARPS = 4
SUMMARY_REGISTERS = 80
"""A thread's, so that enough programs run at once to keep the memory busy."""
GATHER_TILE = 16
GATHER_WARPS = 8
GATHER_REGISTERS = 128
"""A thread's, so that a multiprocessor has room for two rows."""
MAX_PROGRAMS = 528
"""Of `_gather`, beyond one a row: four for each multiprocessor of the largest GPU."""
MAX_SHARES = 32
DRAW_TILE = 4096
"""Tokens of a row with top_p alone that `_draw` reads at once."""
DRAW_WARPS = 8
DRAW_REGISTERS = 128
"""As for `_gather`."""

_MAX_NOISE = tl.constexpr(16.0)
"""Over the highest Gumbel noise, -log(-log(1 - 2**-23)) = 15.95."""
_KEEP_ALL = tl.constexpr(0xFFFFFFFF)


def choose_tokens(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    state: SlotState,
    token_masks: Int32[Array, "B W"],
) -> Int32[Array, "B"]:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    num_words, word_length = state.bad_words.shape[1:]
    params = pack(rows)
    inputs = (
        logits,
        params,
        state.logit_bias,
        state.token_flags,
        state.output_counts,
        state.bad_words,
        state.recent_tokens,
        token_masks,
    )
    sizes = {
        "V": vocab_size,
        "MASK_WORDS": token_masks.shape[1],
        "WORDS": num_words,
        "LENGTH": word_length,
        "NUM_BLOCKS": num_blocks,
    }
    blocks_pad = triton.next_power_of_2(num_blocks)

    def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *shape), dtype)

    # A row's programs each offer 64 bits, score over inverted id: the highest offer wins.
    maxima, offers = jax_triton.triton_call(
        inputs,
        kernel=_summarise,
        out_type=(array(jnp.float32, 2, num_blocks), array(jnp.uint32, 2)),
        grid=(triton.cdiv(num_blocks, TILE), num_rows),
        num_warps=SUMMARY_WARPS,
        backend_options={"maxnreg": SUMMARY_REGISTERS},
        BLOCK=BLOCK,
        TILE=TILE,
        **sizes,
    )
    shares = min(max(MAX_PROGRAMS // num_rows, 1), MAX_SHARES)
    offers = jax.new_ref(offers)
    scores, token_ids, num_gathered, _ = jax_triton.triton_call(
        inputs,
        maxima,
        offers,
        kernel=_gather,
        out_type=(
            array(jnp.float32, vocab_size),
            array(jnp.int32, vocab_size),
            array(jnp.int32),
            array(jnp.int32, shares, num_blocks),
        ),
        grid=(num_rows, shares),
        num_warps=GATHER_WARPS,
        backend_options={"maxnreg": GATHER_REGISTERS},
        BLOCK=BLOCK,
        TILE=GATHER_TILE,
        BLOCKS_PAD=blocks_pad,
        **sizes,
    )
    return jax_triton.triton_call(
        inputs,
        maxima,
        jax.freeze(offers),
        scores,
        token_ids,
        num_gathered,
        kernel=_draw,
        out_type=array(jnp.int32),
        grid=(num_rows,),
        num_warps=DRAW_WARPS,
        backend_options={"maxnreg": DRAW_REGISTERS},
        TILE=DRAW_TILE,
        BLOCKS_PAD=blocks_pad,
        **sizes,
    )


@triton.jit
def _summarise(
    inputs,
    maxima,
    offers,
    V: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The maxima of one tile of blocks."""
    sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH)
    row = tl.program_id(1).to(tl.int64)
    kind = integer(inputs[1], row, KIND)
    if tl.program_id(0) == 0:
        _offer(offers, row, float("-inf"), 0)
    planes = 0
    if kind & SAMPLES != 0:
        planes = 1
        if (kind & GRAMMAR != 0) & (kind & OTHER_BANS != 0):
            planes = 2
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for plane in tl.static_range(2):  # A loop's addresses would be made for every kind of row.
        if plane < planes:
            # The second is for a row that the other bans leave nothing of what the grammar allows.
            kinds = kind if plane == 0 else kind & ~OTHER_BANS
            x = shaped(token, token < V, row, kinds, inputs, sizes)
            highest = tl.max(x, axis=1)
            place = (row * 2 + plane) * NUM_BLOCKS + block
            tl.store(maxima + place, highest, mask=block < NUM_BLOCKS)


@triton.jit
def _gather(
    inputs,
    maxima,
    offers,
    gathered,
    gathered_ids,
    num_gathered,
    listed,
    V: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of a row without a cut, or else the tokens that top-k may keep.

    Each round reads a list of blocks. The first of a row without a cut holds the block of the
    highest logit: a greedy row is done then, and a draw's second round, which the row's programs
    share, need not look for less than it has. A row with a cut gathers tokens in one round, in the
    order of their ids.
    """
    sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    kind = integer(inputs[1], row, KIND)
    random = kind & RANDOM != 0
    cuts = kind & CUT != 0
    if share == 0:
        tl.store(num_gathered + row, 0)
    if (kind & SAMPLES != 0) & ((share == 0) | (random & (not cuts))):
        block = tl.arange(0, BLOCKS_PAD)
        kind, highest, top = _maxima_of(maxima, row, kind, block, NUM_BLOCKS)
        best_block = tl.min(tl.where(highest == top, block, NUM_BLOCKS - 1), axis=0)
        top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        temperature = tl.where(random, number(inputs[1], row, TEMPERATURE), 1.0)
        min_p = tl.where(random, number(inputs[1], row, MIN_P), 0.0)
        top_scores = scores_of(highest, top, temperature)
        alive = (highest > float("-inf")) & (tl.exp(top_scores) >= min_p)

        cut = tl.full([], _KEEP_ALL, tl.uint32)
        if cuts:
            top_k = integer(inputs[1], row, TOP_K)
            if top_k < NUM_BLOCKS:
                cut = coarse_cut(top_scores, top_k)

        listed += (row * tl.num_programs(1) + share) * NUM_BLOCKS
        gathered += row * V
        gathered_ids += row * V
        key = row_key(inputs[1], row)
        best = tl.full([], float("-inf"), tl.float32)
        best_id = tl.zeros([], tl.int32)
        num = tl.zeros([], tl.int32)
        first = tl.zeros([], tl.int32)
        stride = tl.full([], TILE, tl.int32)
        round_ = tl.zeros([], tl.int32)
        done = round_ > 0
        while not done:
            chosen = alive
            if cuts:
                chosen = alive & (order(top_scores) <= cut)
            elif round_ == 0:
                chosen = block == best_block
            else:
                chosen = alive & (top_scores + _MAX_NOISE >= best)
                first = share * TILE
                stride = TILE * tl.num_programs(1)
            one = chosen.to(tl.int32)
            num_listed = tl.sum(one, axis=0)
            tl.debug_barrier()  # The last round's list may still be read.
            tl.store(listed + tl.cumsum(one, axis=0) - one, block, mask=chosen)
            tl.debug_barrier()

            for start in range(first, num_listed, stride):
                place = start + tl.arange(0, TILE)
                blocks = tl.load(listed + place, mask=place < num_listed, other=NUM_BLOCKS)
                token = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                x = shaped(token, token < V, row, kind, inputs, sizes)
                scores = scores_of(x, top, temperature)
                keep = (x > float("-inf")) & (tl.exp(scores) >= min_p)
                if cuts:
                    keep = keep & (order(scores) <= cut)
                    ones = tl.ravel(keep.to(tl.int32))
                    spot = tl.reshape(num + tl.cumsum(ones, axis=0) - ones, [TILE, BLOCK])
                    tl.store(gathered + spot, scores, mask=keep)
                    tl.store(gathered_ids + spot, token, mask=keep)
                    num += tl.sum(ones, axis=0)
                else:
                    if random:
                        scores += gumbel(key, token)
                    scores = tl.where(keep, scores, float("-inf"))
                    best, best_id = better(best, best_id, scores, token, V)
            done = (not random) | cuts | (round_ == 1)
            round_ += 1
        if cuts:
            tl.store(num_gathered + row, num)
        elif random:
            _offer_shared(offers, row, best, best_id)
        else:
            _offer(offers, row, best, best_id)


@triton.jit
def _draw(
    inputs,
    maxima,
    offers,
    gathered,
    gathered_ids,
    num_gathered,
    chosen,
    V: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw from what top-k and top-p keep of the gathered tokens, or take the highest offer."""
    sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH)
    params = inputs[1]
    row = tl.program_id(0).to(tl.int64)
    token = ~tl.load(offers + row * 2).to(tl.int32, bitcast=True)
    num = tl.load(num_gathered + row)
    if num > 0:
        gathered += row * V
        gathered_ids += row * V
        top_k = integer(params, row, TOP_K)
        top_p = number(params, row, TOP_P)
        cut = tl.full([], _KEEP_ALL, tl.uint32)
        if top_k < num:
            cut = largest_key(gathered, num, cut, top_k * 1.0, False)
        if top_p < 1:
            wanted = top_p * mass(gathered, num, cut)
            cut = largest_key(gathered, num, cut, wanted, True)
        key = row_key(params, row)
        best = tl.full([], float("-inf"), tl.float32)
        token = tl.zeros([], tl.int32)
        for start in range(0, num, SEARCH_TILE):
            place = start + tl.arange(0, SEARCH_TILE)
            scores = tl.load(gathered + place, mask=place < num, other=float("-inf"))
            ids = tl.load(gathered_ids + place, mask=place < num, other=0)
            kept = (place < num) & (order(scores) <= cut)
            noisy = tl.where(kept, scores + gumbel(key, ids), float("-inf"))
            best, token = better(best, token, noisy, ids, V)
    kind = integer(params, row, KIND)
    if kind & NUCLEUS != 0:
        block = tl.arange(0, BLOCKS_PAD)
        kind, _, top = _maxima_of(maxima, row, kind, block, NUM_BLOCKS)
        token = in_nucleus(token, row, kind, top, inputs, sizes, TILE)
    tl.store(chosen + row, token)


@triton.jit
def _maxima_of(maxima, row, kind, block, NUM_BLOCKS: tl.constexpr):
    """(what the row asks for, the highest logit of each block, the highest of all)."""
    exists = block < NUM_BLOCKS
    maxima += row * 2 * NUM_BLOCKS
    highest = tl.load(maxima + block, mask=exists, other=float("-inf"))
    top = tl.max(highest, axis=0)
    if (top == float("-inf")) & (kind & GRAMMAR != 0) & (kind & OTHER_BANS != 0):
        # A wrong text is worse than one that breaks another parameter's rule.
        kind = kind & ~OTHER_BANS
        highest = tl.load(maxima + NUM_BLOCKS + block, mask=exists, other=float("-inf"))
        top = tl.max(highest, axis=0)
    return kind, highest, top


@triton.jit
def _offer(offers, row, score, token):
    tl.store(offers.to(tl.pointer_type(tl.uint64)) + row, _ranked(score, token))


@triton.jit
def _offer_shared(offers, row, score, token):
    """Where several programs offer: what is there already stays if it is higher."""
    tl.atomic_max(offers.to(tl.pointer_type(tl.uint64)) + row, _ranked(score, token))


@triton.jit
def _ranked(score, token):
    """64 bits that order tokens by score, the lower id first where they tie."""
    bits = tl.full([], score, tl.float32).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, ~bits, bits | -(2**31)).to(tl.uint32, bitcast=True)
    inverted = (~tl.full([], token, tl.int32)).to(tl.uint32, bitcast=True)
    return (rank.to(tl.uint64) << 32) | inverted.to(tl.uint64)

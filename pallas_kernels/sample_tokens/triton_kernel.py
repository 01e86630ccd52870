"""Sampling in two launches, neither of which sorts.

`_summarise` reads the logits, as every part of a row's parameters changes them, and keeps the
highest of each block of BLOCK tokens. `_choose` reads these maxima and then only the blocks that
can hold the row's token: the k-th highest maximum is no more than the k-th highest logit, so top-k
lies in the blocks that reach it; top-p, in as many of the highest blocks as hold its mass; and no
noise lifts a token by more than MAX_NOISE, so an untruncated draw lies within that of the best. All
is exact, whatever the distribution: a flat one costs more reading, not a different program.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.sample_tokens.arrays import (
    IN_OUTPUT,
    IN_PROMPT,
    IS_STOP,
    MASK_WORD_BITS,
    NO_TOKEN,
    SamplingRows,
    SlotState,
)
from pallas_kernels.triton_import import jax_triton, tl, triton

BLOCK = 128
"""Tokens of which one maximum is kept."""
TILE = 32
"""Blocks that are read at once."""
MAX_PROGRAMS = 528
"""Of `_choose`, beyond one a row: four for each multiprocessor of the largest GPU."""
MAX_SHARES = 32

# What a row asks for, in bits; and where its parameters lie.
_SAMPLES = tl.constexpr(1)
_RANDOM = tl.constexpr(2)
_BIAS = tl.constexpr(4)
_BAD_WORDS = tl.constexpr(8)
_STOP_TOKENS = tl.constexpr(16)
_GRAMMAR = tl.constexpr(32)
_REPETITION = tl.constexpr(64)
_COUNTED = tl.constexpr(128)
_NEEDS_MASS = tl.constexpr(256)
_OTHER_BANS = tl.constexpr(4 | 8 | 16)
_NUM_PARAMS = tl.constexpr(12)

_IN_PROMPT = tl.constexpr(IN_PROMPT)
_IN_OUTPUT = tl.constexpr(IN_OUTPUT)
_IS_STOP = tl.constexpr(IS_STOP)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WORD_BITS = tl.constexpr(MASK_WORD_BITS)

_MAX_NOISE = tl.constexpr(16.0)
"""Over the highest Gumbel noise, -log(-log(1 - 2**-23)) = 15.95."""
_FIRST_REACH = tl.constexpr(128)
"""Blocks that are tried first for top-p."""
_DIGITS = tl.constexpr(16)
_SEARCH_TILE = tl.constexpr(512)
_ALL = tl.constexpr(0xFFFFFFFF)
"""The cut that keeps everything."""


def sample_tokens(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    state: SlotState,
    token_masks: Int32[Array, "B W"],
) -> Int32[Array, "B"]:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    num_words, word_length = state.bad_words.shape[1:]
    inputs = (
        logits,
        _pack(rows),
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
        "BLOCK": BLOCK,
        "TILE": TILE,
    }
    by_block = jax.ShapeDtypeStruct((num_rows, num_blocks), jnp.float32)
    # A row's programs each offer 64 bits, score over inverted id: the highest offer wins.
    maxima, masses, offers = jax_triton.triton_call(
        inputs,
        kernel=_summarise,
        out_type=(by_block, by_block, jax.ShapeDtypeStruct((num_rows, 2), jnp.uint32)),
        grid=(triton.cdiv(num_blocks, TILE), num_rows),
        num_warps=4,
        **sizes,
    )
    shares = min(max(MAX_PROGRAMS // num_rows, 1), MAX_SHARES)
    offers = jax.new_ref(offers)
    jax_triton.triton_call(
        inputs,
        jax.new_ref(maxima),
        jax.new_ref(masses),
        offers,
        kernel=_choose,
        out_type=(
            jax.ShapeDtypeStruct((num_rows, shares, num_blocks), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.int32),
        ),
        grid=(num_rows, shares),
        num_warps=8,
        BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        **sizes,
    )
    return (~jax.freeze(offers)[:, 0]).astype(jnp.int32)


def _pack(rows: SamplingRows) -> Int32[Array, "B params"]:
    """A row's parameters side by side."""
    random = rows.temperature > 0
    counted = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)
    needs_mass = random & (rows.top_k == 0) & (rows.min_p == 0) & (rows.top_p < 1)
    asked = (
        (_SAMPLES, rows.samples),
        (_RANDOM, random),
        (_BIAS, rows.has_bias),
        (_BAD_WORDS, rows.has_bad_words),
        (_STOP_TOKENS, rows.mask_stop_tokens),
        (_GRAMMAR, rows.has_grammar),
        (_REPETITION, rows.repetition_penalty != 1),
        (_COUNTED, counted),
        (_NEEDS_MASS, needs_mass),
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
def _summarise(
    inputs,
    maxima,
    masses,
    offers,
    V: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The maxima of one tile of blocks and, for top-p, their masses."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kind = _integer(inputs, row, 1)
    if tile == 0:
        _offer(offers, row, float("-inf"), 0, False)
    if kind & _SAMPLES != 0:
        sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH, NUM_BLOCKS, BLOCK, TILE)
        _summarise_tile(tile, row, kind, inputs, maxima, masses, sizes)


@triton.jit
def _choose(
    inputs,
    maxima,
    masses,
    offers,
    listed,
    candidates,
    candidate_ids,
    V: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """A row's token. Only draws without top-k and top-p are shared between several programs."""
    sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH, NUM_BLOCKS, BLOCK, TILE)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    kind = _integer(inputs, row, 1)
    top_k = _integer(inputs, row, 4)
    top_p = _number(inputs, row, 3)
    cuts = (top_k > 0) | (top_p < 1)
    # A row with a grammar may summarise anew, which others must not see half done.
    alone = (kind & _RANDOM == 0) | (kind & _GRAMMAR != 0) | cuts
    if (kind & _SAMPLES != 0) & ((share == 0) | (not alone)):
        block = tl.arange(0, BLOCKS_PAD)
        exists = block < NUM_BLOCKS
        row_maxima = maxima + row * NUM_BLOCKS
        highest = tl.load(row_maxima + block, mask=exists, other=float("-inf"))
        top = tl.max(highest, axis=0)
        if (kind & _GRAMMAR != 0) & (kind & _OTHER_BANS != 0) & (top == float("-inf")):
            # A wrong text is worse than one that breaks another parameter's rule.
            kind = kind & ~_OTHER_BANS
            for tile in range((NUM_BLOCKS + TILE - 1) // TILE):
                _summarise_tile(tile, row, kind, inputs, maxima, masses, sizes)
            tl.debug_barrier()
            highest = tl.load(row_maxima + block, mask=exists, other=float("-inf"))
            top = tl.max(highest, axis=0)
        best_block = tl.min(tl.where(highest == top, block, NUM_BLOCKS - 1), axis=0)
        token = best_block * BLOCK + tl.arange(0, BLOCK)
        x = _shaped(token, token < V, row, kind, inputs, sizes)
        if kind & _RANDOM == 0:
            best, best_id = _best(x, token, V)
            _offer(offers, row, best, best_id, False)
        else:
            finite = (top > float("-inf")) & (top < float("inf"))
            top = tl.where(finite, top, 0.0)
            listed += (row * tl.num_programs(1) + share) * NUM_BLOCKS
            if cuts:
                best, best_id = _draw_truncated(
                    row,
                    kind,
                    top,
                    highest,
                    row_maxima,
                    masses + row * NUM_BLOCKS,
                    listed,
                    candidates + row * V,
                    candidate_ids + row * V,
                    inputs,
                    sizes,
                    BLOCKS_PAD,
                )
                _offer(offers, row, best, best_id, False)
            else:
                stride = tl.where(alone, 1, tl.num_programs(1))
                best, best_id = _draw(
                    share,
                    stride,
                    row,
                    kind,
                    top,
                    highest,
                    x,
                    token,
                    listed,
                    inputs,
                    sizes,
                    BLOCKS_PAD,
                )
                _offer(offers, row, best, best_id, True)


@triton.jit
def _draw(
    share,
    stride,
    row,
    kind,
    top,
    highest,
    top_logits,
    top_tokens,
    listed,
    inputs,
    sizes: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    """A draw from all tokens, or from those that min_p leaves; this program's share of it.

    `top_logits` and `top_tokens`: the block of the highest logit. No lower than what is drawn from it alone can
    the drawn score be, and so only blocks that noise can lift to there are read.
    """
    V: tl.constexpr = sizes[0]
    NUM_BLOCKS: tl.constexpr = sizes[4]
    BLOCK: tl.constexpr = sizes[5]
    TILE: tl.constexpr = sizes[6]
    temperature = _number(inputs, row, 2)
    min_p = _number(inputs, row, 5)
    key = _row_key(inputs, row)
    bound, _ = _best(_noisy(top_logits, top_tokens, top, temperature, min_p, key), top_tokens, V)
    scores = _scores(highest, top, temperature)
    can_win = (scores + _MAX_NOISE >= bound) & (tl.exp(scores) >= min_p)
    num_listed = _list(can_win & (highest > float("-inf")), listed, BLOCKS_PAD)
    best = float("-inf")
    best_id = 0
    for start in range(share * TILE, num_listed, stride * TILE):
        token, valid = _listed_tokens(start, num_listed, listed, V, NUM_BLOCKS, BLOCK, TILE)
        x = _shaped(token, valid, row, kind, inputs, sizes)
        noisy = _noisy(x, token, top, temperature, min_p, key)
        best, best_id = _better(best, best_id, noisy, token, V)
    return best, best_id


@triton.jit
def _draw_truncated(
    row,
    kind,
    top,
    highest,
    maxima,
    masses,
    listed,
    candidates,
    candidate_ids,
    inputs,
    sizes: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    """A draw from what top-k and top-p leave.

    First the tokens that can be left are gathered, in the order of their ids; then the cuts are
    searched among them.
    """
    V: tl.constexpr = sizes[0]
    NUM_BLOCKS: tl.constexpr = sizes[4]
    BLOCK: tl.constexpr = sizes[5]
    TILE: tl.constexpr = sizes[6]
    temperature = _number(inputs, row, 2)
    top_p = _number(inputs, row, 3)
    top_k = _integer(inputs, row, 4)
    min_p = _number(inputs, row, 5)
    block_scores = _scores(highest, top, temperature)
    block_keys = _order(block_scores)

    wanted = 0.0
    reach = NUM_BLOCKS
    if top_k > 0:
        reach = tl.minimum(top_k, NUM_BLOCKS)
    elif min_p == 0:
        block = tl.arange(0, BLOCKS_PAD)
        mass = tl.load(masses + block, mask=block < NUM_BLOCKS, other=0.0)
        wanted = top_p * tl.sum(mass * tl.exp(block_scores), axis=0)
        reach = tl.minimum(_FIRST_REACH, NUM_BLOCKS)

    num = 0
    complete = 0
    while complete == 0:
        cut = tl.full([], _ALL, tl.uint32)
        if reach < NUM_BLOCKS:
            cut = _largest_key(maxima, NUM_BLOCKS, top, temperature, cut, reach * 1.0, False)
        can_hold = (block_keys <= cut) & (tl.exp(block_scores) >= min_p)
        num_listed = _list(can_hold & (highest > float("-inf")), listed, BLOCKS_PAD)
        num = 0
        found = 0.0
        for start in range(0, num_listed, TILE):
            token, valid = _listed_tokens(start, num_listed, listed, V, NUM_BLOCKS, BLOCK, TILE)
            x = _shaped(token, valid, row, kind, inputs, sizes)
            scores = _scores(x, top, temperature)
            weights = tl.exp(scores)
            keep = (x > float("-inf")) & (_order(scores) <= cut) & (weights >= min_p)
            one = tl.reshape(keep.to(tl.int32), [TILE * BLOCK])
            place = tl.reshape(num + tl.cumsum(one, axis=0) - one, [TILE, BLOCK])
            tl.store(candidates + place, x, mask=keep)
            tl.store(candidate_ids + place, token, mask=keep)
            num += tl.sum(one, axis=0)
            found += tl.sum(tl.sum(tl.where(keep, weights, 0.0), axis=1), axis=0)
        tl.debug_barrier()
        if (found >= wanted) | (reach >= NUM_BLOCKS):
            complete = 1
        reach = tl.minimum(reach * 16, NUM_BLOCKS)

    cut = tl.full([], _ALL, tl.uint32)
    if (top_k > 0) & (top_k < num):
        cut = _largest_key(candidates, num, top, temperature, cut, top_k * 1.0, False)
    if top_p < 1:
        if (top_k > 0) | (min_p > 0):
            wanted = top_p * _mass(candidates, num, top, temperature, cut)
        cut = _largest_key(candidates, num, top, temperature, cut, wanted, True)

    key = _row_key(inputs, row)
    best = float("-inf")
    best_id = 0
    for start in range(0, num, _SEARCH_TILE):
        place = start + tl.arange(0, _SEARCH_TILE)
        x = tl.load(candidates + place, mask=place < num, other=float("-inf"))
        token = tl.load(candidate_ids + place, mask=place < num, other=0)
        noisy = _noisy(x, token, top, temperature, 0.0, key)
        kept = (place < num) & (_order(_scores(x, top, temperature)) <= cut)
        noisy = tl.where(kept, noisy, float("-inf"))
        best, best_id = _better(best, best_id, noisy, token, V)
    return best, best_id


@triton.jit
def _largest_key(values, num, top, temperature, limit, wanted, BY_MASS: tl.constexpr):
    """The largest key such that entries of lower keys (of the first `num` values, those of keys up
    to `limit`) are fewer, or have less mass, than `wanted`. Sixteen keys are tried at once, digit
    by digit."""
    digit = tl.arange(0, _DIGITS)
    cut = tl.zeros([], tl.uint32)
    for round_ in range(8):
        shift = 28 - 4 * round_
        tried = cut + (digit.to(tl.uint32) << shift)
        amounts = tl.zeros([_SEARCH_TILE, _DIGITS], tl.float32)
        for start in range(0, num, _SEARCH_TILE):
            place = start + tl.arange(0, _SEARCH_TILE)
            x = tl.load(values + place, mask=place < num, other=float("-inf"))
            scores = _scores(x, top, temperature)
            keys = _order(scores)
            weights = tl.where((place < num) & (keys <= limit), 1.0, 0.0)
            if BY_MASS:
                weights *= tl.exp(scores)
            amounts += tl.where(keys[:, None] < tried[None, :], weights[:, None], 0.0)
        holds = (tl.sum(amounts, axis=0) < wanted) & (digit > 0)
        cut += tl.sum(holds.to(tl.int32), axis=0).to(tl.uint32) << shift
    return cut


@triton.jit
def _mass(values, num, top, temperature, limit):
    total = tl.zeros([_SEARCH_TILE], tl.float32)
    for start in range(0, num, _SEARCH_TILE):
        place = start + tl.arange(0, _SEARCH_TILE)
        x = tl.load(values + place, mask=place < num, other=float("-inf"))
        scores = _scores(x, top, temperature)
        total += tl.where((place < num) & (_order(scores) <= limit), tl.exp(scores), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _list(chosen, listed, BLOCKS_PAD: tl.constexpr):
    """Write the indices of the chosen blocks in order; how many they are."""
    one = chosen.to(tl.int32)
    tl.debug_barrier()  # Others may be reading the list before this one.
    tl.store(listed + tl.cumsum(one, axis=0) - one, tl.arange(0, BLOCKS_PAD), mask=chosen)
    tl.debug_barrier()
    return tl.sum(one, axis=0)


@triton.jit
def _listed_tokens(
    start,
    num_listed,
    listed,
    V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tokens of TILE listed blocks, and which of them there are."""
    place = start + tl.arange(0, TILE)
    block = tl.load(listed + place, mask=place < num_listed, other=NUM_BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return token, token < V


@triton.jit
def _summarise_tile(tile, row, kind, inputs, maxima, masses, sizes: tl.constexpr):
    V: tl.constexpr = sizes[0]
    NUM_BLOCKS: tl.constexpr = sizes[4]
    BLOCK: tl.constexpr = sizes[5]
    TILE: tl.constexpr = sizes[6]
    block = tile * TILE + tl.arange(0, TILE)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _shaped(token, token < V, row, kind, inputs, sizes)
    highest = tl.max(x, axis=1)
    place = row * NUM_BLOCKS + block
    tl.store(maxima + place, highest, mask=block < NUM_BLOCKS)
    if kind & _NEEDS_MASS != 0:
        rate = 1.0 / _number(inputs, row, 2)
        origin = tl.where(highest > float("-inf"), highest, 0.0)
        mass = tl.sum(tl.exp((x - origin[:, None]) * rate), axis=1)
        tl.store(masses + place, mass, mask=block < NUM_BLOCKS)


@triton.jit
def _shaped(token, valid, row, kind, inputs, sizes: tl.constexpr):
    """Logits as the row's bans and penalties change them; -inf where not valid."""
    V: tl.constexpr = sizes[0]
    MASK_WORDS: tl.constexpr = sizes[1]
    logits = inputs[0]
    x = tl.load(logits + row * V + token, mask=valid, other=float("-inf")).to(tl.float32)
    slot = _integer(inputs, row, 0).to(tl.int64)
    if kind & _BIAS != 0:
        x += tl.load(inputs[2] + slot * V + token, mask=valid, other=0.0)
    if kind & (_STOP_TOKENS | _REPETITION | _COUNTED) != 0:
        flags = tl.load(inputs[3] + slot * V + token, mask=valid, other=0).to(tl.int32)
    else:
        flags = tl.zeros_like(token)
    if kind & _STOP_TOKENS != 0:
        x = tl.where(flags & _IS_STOP != 0, float("-inf"), x)
    if kind & _BAD_WORDS != 0:
        banned = _completed_words(slot, inputs, sizes)
        banned_id = tl.min(banned, axis=0)
        while banned_id < V:
            x = tl.where(token == banned_id, float("-inf"), x)
            banned_id = tl.min(tl.where(banned > banned_id, banned, V), axis=0)
    if kind & _GRAMMAR != 0:
        word = row * MASK_WORDS + token // _WORD_BITS
        bits = tl.load(inputs[7] + word, mask=valid, other=0)
        x = tl.where((bits >> (token % _WORD_BITS)) & 1 != 0, x, float("-inf"))
    if kind & _REPETITION != 0:
        repetition = _number(inputs, row, 8)
        penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(flags & (_IN_PROMPT | _IN_OUTPUT) != 0, penalised, x)
    if kind & _COUNTED != 0:
        present = flags & _IN_OUTPUT != 0
        counts = tl.load(inputs[4] + slot * V + token, mask=valid & present, other=0)
        penalty = _number(inputs, row, 7) * counts + _number(inputs, row, 6)
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
def _integer(inputs, row, column: tl.constexpr):
    return tl.load(inputs[1] + row * _NUM_PARAMS + column)


@triton.jit
def _number(inputs, row, column: tl.constexpr):
    return _integer(inputs, row, column).to(tl.float32, bitcast=True)


@triton.jit
def _scores(x, top, temperature):
    """Log-probabilities up to a constant, the best 0. Rounding keeps the order of logits."""
    return tl.div_rn(x - top, temperature + tl.zeros_like(x))


@triton.jit
def _order(scores):
    """Unsigned integers that order scores up to 0: the bits of the magnitude; 0 = most likely."""
    return tl.abs(scores).to(tl.uint32, bitcast=True)


@triton.jit
def _noisy(x, token, top, temperature, min_p, key):
    """Scores with the row's Gumbel noise; -inf where min_p drops the token."""
    scores = _scores(x, top, temperature)
    return tl.where(tl.exp(scores) >= min_p, scores + _gumbel(key, token), float("-inf"))


@triton.jit
def _best(values, ids, V: tl.constexpr):
    """The highest of all values, and the lowest id that has it; 0 where all are -inf."""
    values = tl.ravel(values)
    best = tl.max(values, axis=0)
    best_id = tl.min(tl.where(values == best, tl.ravel(ids), V), axis=0)
    return best, tl.where(best > float("-inf"), best_id, 0)


@triton.jit
def _better(best, best_id, values, ids, V: tl.constexpr):
    """The better of a best so far and these values; the lower id where they tie."""
    other, other_id = _best(values, ids, V)
    wins = (other > best) | ((other == best) & (other_id < best_id))
    return tl.where(wins, other, best), tl.where(wins, other_id, best_id)


@triton.jit
def _offer(offers, row, score, token, SHARED: tl.constexpr):
    """Offer a token under its score; where several programs may, the highest stays."""
    bits = tl.full([], score, tl.float32).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, ~bits, bits | -(2**31)).to(tl.uint32, bitcast=True)
    offer = (rank.to(tl.uint64) << 32) | (~tl.full([], token, tl.int32)).to(tl.uint32, bitcast=True).to(tl.uint64)
    place = offers.to(tl.pointer_type(tl.uint64)) + row
    if SHARED:
        tl.atomic_max(place, offer)
    else:
        tl.store(place, offer)


@triton.jit
def _row_key(inputs, row):
    """`jax.random.fold_in` of the row's key and its number of outputs."""
    high = _integer(inputs, row, 9).to(tl.uint32, bitcast=True)
    low = _integer(inputs, row, 10).to(tl.uint32, bitcast=True)
    index = _integer(inputs, row, 11).to(tl.uint32, bitcast=True)
    return _threefry(high, low, tl.zeros_like(index), index)


@triton.jit
def _gumbel(key, token):
    """`jax.random.gumbel` at these places of its vector, up to the rounding of logarithms."""
    count = token.to(tl.uint32)
    first, second = _threefry(key[0], key[1], tl.zeros_like(count), count)
    one_to_two = ((first ^ second) >> 9) | 0x3F800000
    uniform = one_to_two.to(tl.float32, bitcast=True) - 1.0
    uniform = tl.maximum(uniform, 2.0**-126)
    return -_log(-_log(uniform))


@triton.jit
def _log(x):
    """The natural logarithm of normal numbers, with a small relative error next to 1 too, as
    the GPU's own has not: x = m * 2**e and log m = 2 artanh((m - 1) / (m + 1))."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # so that m is from sqrt(1/2) to sqrt(2)
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
    return exponent.to(tl.float32) * 0.6931471805599453 + 2.0 * (s + s * series)


@triton.jit
def _threefry(key0, key1, x0, x1):
    """Threefry-2x32 of 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3")."""
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0 += key0
    x1 += key1
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0 += key1
    x1 += key2 + 1
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0 += key2
    x1 += key0 + 2
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0 += key0
    x1 += key1 + 3
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0 += key1
    x1 += key2 + 4
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    return x0 + key2, x1 + key0 + 5


@triton.jit
def _four_rounds(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0, x1 = _round(x0, x1, A)
    x0, x1 = _round(x0, x1, B)
    x0, x1 = _round(x0, x1, C)
    return _round(x0, x1, D)


@triton.jit
def _round(x0, x1, TURN: tl.constexpr):
    x0 += x1
    return x0, ((x1 << TURN) | (x1 >> (32 - TURN))) ^ x0

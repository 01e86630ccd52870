"""Sampling in three launches, none of which sorts.

`_summarise` reads the logits, as a row's bans and penalties change them, and keeps the highest of
each block of BLOCK tokens. `_gather` reads these maxima, and then only the blocks that can hold the
row's token: the k-th highest maximum is no more than the k-th highest logit, so top-k lies in the
blocks that reach it; top-p, in as many of the highest blocks as hold its mass; and no noise lifts a
token by more than _MAX_NOISE, so an uncut draw lies that close to the best. `_finish` cuts what was
gathered, draws, and notes the token in the row's slot. All is exact whatever the distribution: a
flat one costs more reading, not another program.
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
TILE = 16
"""Blocks that a program reads at once."""
SUMMARY_WARPS = 4
SUMMARY_REGISTERS = 80
"""A thread's, so that enough programs run at once to keep the memory busy."""
GATHER_TILE = 16
GATHER_WARPS = 8
MAX_PROGRAMS = 528
"""Of `_gather`, beyond one a row: four for each multiprocessor of the largest GPU."""
MAX_SHARES = 32
FIRST_REACH = 128
"""Blocks, of the highest maxima, that are tried first for top-p."""

# What a row asks for, in bits.
_SAMPLES = tl.constexpr(1)
_RANDOM = tl.constexpr(2)
_BIAS = tl.constexpr(4)
_BAD_WORDS = tl.constexpr(8)
_STOP_TOKENS = tl.constexpr(16)
_GRAMMAR = tl.constexpr(32)
_REPETITION = tl.constexpr(64)
_COUNTED = tl.constexpr(128)
_CUT = tl.constexpr(256)
_BLOCK_MASSES = tl.constexpr(512)
_OTHER_BANS = tl.constexpr(4 | 8 | 16)

# Where a row's parameters lie.
_SLOT = tl.constexpr(0)
_KIND = tl.constexpr(1)
_TEMPERATURE = tl.constexpr(2)
_TOP_P = tl.constexpr(3)
_TOP_K = tl.constexpr(4)
_MIN_P = tl.constexpr(5)
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

_MAX_NOISE = tl.constexpr(16.0)
"""Over the highest Gumbel noise, -log(-log(1 - 2**-23)) = 15.95."""
_NUM_DIGITS = tl.constexpr(16)
_SEARCH_TILE = tl.constexpr(256)
_KEEP_ALL = tl.constexpr(0xFFFFFFFF)


def sample_tokens(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    state: SlotState,
    token_masks: Int32[Array, "B W"],
) -> tuple[Int32[Array, "B"], SlotState]:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    num_words, word_length = state.bad_words.shape[1:]
    params = _pack(rows)
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
        "BLOCK": BLOCK,
    }

    def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *shape), dtype)

    # A row's programs each offer 64 bits, score over inverted id: the highest offer wins.
    maxima, masses, offers = jax_triton.triton_call(
        inputs,
        kernel=_summarise,
        out_type=(
            array(jnp.float32, 2, num_blocks),
            array(jnp.float32, 2, num_blocks),
            array(jnp.uint32, 2),
        ),
        grid=(triton.cdiv(num_blocks, TILE), num_rows),
        num_warps=SUMMARY_WARPS,
        backend_options={"maxnreg": SUMMARY_REGISTERS},
        TILE=TILE,
        **sizes,
    )
    shares = min(max(MAX_PROGRAMS // num_rows, 1), MAX_SHARES)
    offers = jax.new_ref(offers)
    scores, token_ids, num_gathered, _, _ = jax_triton.triton_call(
        inputs,
        maxima,
        masses,
        offers,
        kernel=_gather,
        out_type=(
            array(jnp.float32, vocab_size),
            array(jnp.int32, vocab_size),
            array(jnp.int32),
            array(jnp.float32, num_blocks),
            array(jnp.int32, shares, num_blocks),
        ),
        grid=(num_rows, shares),
        num_warps=GATHER_WARPS,
        TILE=GATHER_TILE,
        FIRST_REACH=FIRST_REACH,
        BLOCKS_PAD=triton.next_power_of_2(num_blocks),
        **sizes,
    )
    # What the two launches before have read, this one writes.
    memory = (state.last_token, state.token_flags, state.output_counts, state.recent_tokens)
    refs = tuple(jax.new_ref(array) for array in memory)
    (chosen,) = jax_triton.triton_call(
        params,
        jax.freeze(offers),
        scores,
        token_ids,
        num_gathered,
        *refs,
        kernel=_finish,
        out_type=(array(jnp.int32),),
        grid=(num_rows,),
        num_warps=4,
        V=vocab_size,
        RECENT=word_length - 1,
        RECENT_PAD=triton.next_power_of_2(word_length - 1),
    )
    last_token, token_flags, output_counts, recent_tokens = (jax.freeze(ref) for ref in refs)
    return chosen, state._replace(
        last_token=last_token,
        token_flags=token_flags,
        output_counts=output_counts,
        recent_tokens=recent_tokens,
    )


def _pack(rows: SamplingRows) -> Int32[Array, "B params"]:
    """A row's parameters side by side."""
    random = rows.temperature > 0
    cut = random & ((rows.top_k > 0) | (rows.top_p < 1))
    asked = (
        (_SAMPLES, rows.samples),
        (_RANDOM, random),
        (_BIAS, rows.has_bias),
        (_BAD_WORDS, rows.has_bad_words),
        (_STOP_TOKENS, rows.mask_stop_tokens),
        (_GRAMMAR, rows.has_grammar),
        (_REPETITION, rows.repetition_penalty != 1),
        (_COUNTED, (rows.presence_penalty != 0) | (rows.frequency_penalty != 0)),
        (_CUT, cut),
        (_BLOCK_MASSES, cut & (rows.top_k == 0) & (rows.min_p == 0)),
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
    sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH)
    row = tl.program_id(1).to(tl.int64)
    kind = _integer(inputs[1], row, _KIND)
    if tl.program_id(0) == 0:
        _offer(offers, row, float("-inf"), 0)
    planes = 0
    if kind & _SAMPLES != 0:
        planes = 1
        if (kind & _GRAMMAR != 0) & (kind & _OTHER_BANS != 0):
            planes = 2
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for plane in range(planes):
        # The second is for a row that the other bans leave nothing of what the grammar allows.
        kinds = tl.where(plane == 0, kind, kind & ~_OTHER_BANS)
        x = _shaped(token, token < V, row, kinds, inputs, sizes)
        highest = tl.max(x, axis=1)
        place = (row * 2 + plane) * NUM_BLOCKS + block
        tl.store(maxima + place, highest, mask=block < NUM_BLOCKS)
        if kind & _BLOCK_MASSES != 0:
            rate = 1.0 / _number(inputs[1], row, _TEMPERATURE)
            origin = tl.where(highest > float("-inf"), highest, 0.0)
            mass = tl.sum(tl.exp((x - origin[:, None]) * rate), axis=1)
            tl.store(masses + place, mass, mask=block < NUM_BLOCKS)


@triton.jit
def _gather(
    inputs,
    maxima,
    masses,
    offers,
    gathered,
    gathered_ids,
    num_gathered,
    block_scores,
    listed,
    V: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FIRST_REACH: tl.constexpr,
):
    """The token of a row without top-k and top-p, or else the tokens that they may keep.

    Each round reads a list of blocks. The first of a row without cuts holds the block of the
    highest logit: a greedy row is done then, and a draw's second round, which the row's programs
    share, need not look for less than it has. A row with cuts gathers tokens, in the order of
    their ids; for top-p alone it tries again with more blocks until they hold enough mass.
    """
    sizes: tl.constexpr = (V, MASK_WORDS, WORDS, LENGTH)
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    kind = _integer(inputs[1], row, _KIND)
    random = kind & _RANDOM != 0
    cuts = kind & _CUT != 0
    if share == 0:
        tl.store(num_gathered + row, 0)
    if (kind & _SAMPLES != 0) & ((share == 0) | (random & (not cuts))):
        block = tl.arange(0, BLOCKS_PAD)
        exists = block < NUM_BLOCKS
        maxima += row * 2 * NUM_BLOCKS
        masses += row * 2 * NUM_BLOCKS
        highest = tl.load(maxima + block, mask=exists, other=float("-inf"))
        top = tl.max(highest, axis=0)
        if (top == float("-inf")) & (kind & _GRAMMAR != 0) & (kind & _OTHER_BANS != 0):
            # A wrong text is worse than one that breaks another parameter's rule.
            kind = kind & ~_OTHER_BANS
            masses += NUM_BLOCKS
            highest = tl.load(maxima + NUM_BLOCKS + block, mask=exists, other=float("-inf"))
            top = tl.max(highest, axis=0)
        best_block = tl.min(tl.where(highest == top, block, NUM_BLOCKS - 1), axis=0)
        top = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        temperature = tl.where(random, _number(inputs[1], row, _TEMPERATURE), 1.0)
        min_p = tl.where(random, _number(inputs[1], row, _MIN_P), 0.0)
        top_scores = _scores(highest, top, temperature)
        alive = (highest > float("-inf")) & (tl.exp(top_scores) >= min_p)

        reach = NUM_BLOCKS + tl.zeros([], tl.int32)
        wanted = tl.zeros([], tl.float32)
        if cuts:
            block_scores += row * NUM_BLOCKS
            tl.store(block_scores + block, top_scores, mask=exists)
            tl.debug_barrier()
            top_k = _integer(inputs[1], row, _TOP_K)
            if top_k > 0:
                reach = tl.minimum(top_k, reach)
            elif kind & _BLOCK_MASSES != 0:
                mass = tl.load(masses + block, mask=exists, other=0.0)
                mass = tl.sum(mass * tl.exp(top_scores), axis=0)
                wanted = _number(inputs[1], row, _TOP_P) * mass
                reach = tl.minimum(FIRST_REACH, reach)

        listed += (row * tl.num_programs(1) + share) * NUM_BLOCKS
        gathered += row * V
        gathered_ids += row * V
        key = _row_key(inputs[1], row)
        best = tl.full([], float("-inf"), tl.float32)
        best_id = tl.zeros([], tl.int32)
        num = tl.zeros([], tl.int32)
        first = tl.zeros([], tl.int32)
        stride = tl.full([], TILE, tl.int32)
        round_ = tl.zeros([], tl.int32)
        done = round_ > 0
        while not done:
            cut = tl.full([], _KEEP_ALL, tl.uint32)
            chosen = alive
            if cuts:
                if reach < NUM_BLOCKS:
                    cut = _largest_key(block_scores, NUM_BLOCKS, cut, reach * 1.0, False)
                chosen = alive & (_order(top_scores) <= cut)
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

            num = tl.zeros([], tl.int32)
            mass = tl.zeros([], tl.float32)
            for start in range(first, num_listed, stride):
                place = start + tl.arange(0, TILE)
                blocks = tl.load(listed + place, mask=place < num_listed, other=NUM_BLOCKS)
                token = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                x = _shaped(token, token < V, row, kind, inputs, sizes)
                scores = _scores(x, top, temperature)
                weights = tl.exp(scores)
                keep = (x > float("-inf")) & (weights >= min_p)
                if cuts:
                    keep = keep & (_order(scores) <= cut)
                    ones = tl.ravel(keep.to(tl.int32))
                    spot = tl.reshape(num + tl.cumsum(ones, axis=0) - ones, [TILE, BLOCK])
                    tl.store(gathered + spot, scores, mask=keep)
                    tl.store(gathered_ids + spot, token, mask=keep)
                    num += tl.sum(ones, axis=0)
                    mass += tl.sum(tl.ravel(tl.where(keep, weights, 0.0)), axis=0)
                else:
                    if random:
                        scores += _gumbel(key, token)
                    scores = tl.where(keep, scores, float("-inf"))
                    best, best_id = _better(best, best_id, scores, token, V)
            if cuts:
                done = (mass >= wanted) | (reach == NUM_BLOCKS)
                reach = tl.minimum(reach * 16, NUM_BLOCKS)
            else:
                done = (not random) | (round_ == 1)
            round_ += 1
        if cuts:
            tl.store(num_gathered + row, num)
        elif random:
            _offer_shared(offers, row, best, best_id)
        else:
            _offer(offers, row, best, best_id)


@triton.jit
def _finish(
    params,
    offers,
    gathered,
    gathered_ids,
    num_gathered,
    last_token,
    token_flags,
    output_counts,
    recent_tokens,
    chosen,
    V: tl.constexpr,
    RECENT: tl.constexpr,
    RECENT_PAD: tl.constexpr,
):
    """Draw from what top-k and top-p keep of the gathered tokens, or take the highest offer; then
    note the token in the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    token = ~tl.load(offers + row * 2).to(tl.int32, bitcast=True)
    num = tl.load(num_gathered + row)
    if num > 0:
        token = _draw(params, gathered + row * V, gathered_ids + row * V, row, num, V)
    tl.store(chosen + row, token)
    if _integer(params, row, _KIND) & _SAMPLES != 0:
        slot = _integer(params, row, _SLOT).to(tl.int64)
        tl.store(last_token + slot, token)
        place = slot * V + token
        tl.store(output_counts + place, tl.load(output_counts + place) + 1)
        tl.store(token_flags + place, tl.load(token_flags + place) | _IN_OUTPUT)
        index = tl.arange(0, RECENT_PAD)
        place = recent_tokens + slot * RECENT + index
        newer = tl.load(place + 1, mask=index < RECENT - 1, other=0)
        tl.debug_barrier()  # A lane's neighbour has read before it writes.
        tl.store(place, tl.where(index == RECENT - 1, token, newer), mask=index < RECENT)


@triton.jit
def _draw(params, gathered, gathered_ids, row, num, V: tl.constexpr):
    """A draw from what top-k and top-p keep of `num` scored tokens."""
    top_k = _integer(params, row, _TOP_K)
    top_p = _number(params, row, _TOP_P)
    cut = tl.full([], _KEEP_ALL, tl.uint32)
    if (top_k > 0) & (top_k < num):
        cut = _largest_key(gathered, num, cut, top_k * 1.0, False)
    if top_p < 1:
        wanted = top_p * _mass(gathered, num, cut)
        cut = _largest_key(gathered, num, cut, wanted, True)
    key = _row_key(params, row)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.zeros([], tl.int32)
    for start in range(0, num, _SEARCH_TILE):
        place = start + tl.arange(0, _SEARCH_TILE)
        scores = tl.load(gathered + place, mask=place < num, other=float("-inf"))
        token = tl.load(gathered_ids + place, mask=place < num, other=0)
        kept = (place < num) & (_order(scores) <= cut)
        noisy = tl.where(kept, scores + _gumbel(key, token), float("-inf"))
        best, best_id = _better(best, best_id, noisy, token, V)
    return best_id


@triton.jit
def _largest_key(scores, num, limit, wanted, BY_MASS: tl.constexpr):
    """The largest key such that entries of lower keys (of the `num` scores, those of keys up to
    `limit`) are fewer, or have less mass, than `wanted`. Sixteen keys are tried at once, digit by
    digit."""
    digit = tl.arange(0, _NUM_DIGITS)
    cut = tl.zeros([], tl.uint32)
    for round_ in range(8):
        shift = 28 - 4 * round_
        tried = cut + (digit.to(tl.uint32) << shift)
        amounts = tl.zeros([_SEARCH_TILE, _NUM_DIGITS], tl.float32)
        for start in range(0, num, _SEARCH_TILE):
            place = start + tl.arange(0, _SEARCH_TILE)
            score = tl.load(scores + place, mask=place < num, other=float("-inf"))
            keys = _order(score)
            amount = tl.where((place < num) & (keys <= limit), 1.0, 0.0)
            if BY_MASS:
                amount *= tl.exp(score)
            amounts += tl.where(keys[:, None] < tried[None, :], amount[:, None], 0.0)
        holds = (tl.sum(amounts, axis=0) < wanted) & (digit > 0)
        cut += tl.sum(holds.to(tl.int32), axis=0).to(tl.uint32) << shift
    return cut


@triton.jit
def _mass(scores, num, limit):
    """Of the entries of keys up to `limit`."""
    total = tl.zeros([_SEARCH_TILE], tl.float32)
    for start in range(0, num, _SEARCH_TILE):
        place = start + tl.arange(0, _SEARCH_TILE)
        score = tl.load(scores + place, mask=place < num, other=float("-inf"))
        total += tl.where((place < num) & (_order(score) <= limit), tl.exp(score), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _shaped(token, valid, row, kind, inputs, sizes: tl.constexpr):
    """Logits as the row's bans and penalties change them; -inf where not valid."""
    V: tl.constexpr = sizes[0]
    MASK_WORDS: tl.constexpr = sizes[1]
    logits = inputs[0]
    x = tl.load(logits + row * V + token, mask=valid, other=float("-inf")).to(tl.float32)
    slot = _integer(inputs[1], row, _SLOT).to(tl.int64)
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
        repetition = _number(inputs[1], row, _REPETITION_PENALTY)
        penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(flags & (_IN_PROMPT | _IN_OUTPUT) != 0, penalised, x)
    if kind & _COUNTED != 0:
        present = flags & _IN_OUTPUT != 0
        counts = tl.load(inputs[4] + slot * V + token, mask=valid & present, other=0)
        frequency = _number(inputs[1], row, _FREQUENCY_PENALTY)
        penalty = frequency * counts + _number(inputs[1], row, _PRESENCE_PENALTY)
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
def _integer(params, row, COLUMN: tl.constexpr):
    return tl.load(params + row * _NUM_PARAMS + COLUMN)


@triton.jit
def _number(params, row, COLUMN: tl.constexpr):
    return _integer(params, row, COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _scores(x, top, temperature):
    """Log-probabilities up to a constant, the best 0. Rounding keeps the order of logits."""
    return tl.div_rn(x - top, temperature + tl.zeros_like(x))


@triton.jit
def _order(scores):
    """Unsigned integers that order scores up to 0: the bits of the magnitude; 0 = most likely."""
    return tl.abs(scores).to(tl.uint32, bitcast=True)


@triton.jit
def _better(best, best_id, values, ids, V: tl.constexpr):
    """The better of a best so far and these values; the lower id where they tie."""
    values = tl.ravel(values)
    other = tl.max(values, axis=0)
    other_id = tl.min(tl.where(values == other, tl.ravel(ids), V), axis=0)
    wins = (other > best) | ((other == best) & (other > float("-inf")) & (other_id < best_id))
    return tl.where(wins, other, best), tl.where(wins, other_id, best_id)


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


@triton.jit
def _row_key(params, row):
    """`jax.random.fold_in` of the row's key and its number of outputs."""
    high = _integer(params, row, _SEED_HIGH).to(tl.uint32, bitcast=True)
    low = _integer(params, row, _SEED_LOW).to(tl.uint32, bitcast=True)
    index = _integer(params, row, _OUTPUT_INDEX).to(tl.uint32, bitcast=True)
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

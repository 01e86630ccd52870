"""Paged attention in every cut that a tuning table may choose, and what it chooses."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention, tuning
from pallas_kernels.paged_attention.tiles import aligned_query_tiles, context_pieces
from pallas_kernels.paged_attention.tuning import Choice, ContextCut, MosaicTiling, TritonTiling

DECODE = TritonTiling(16, 32, num_warps=4, num_stages=2)
PREFILL = TritonTiling(32, 32, num_warps=4, num_stages=2)


def shares(count):
    """Contexts cut into pieces of about a part in `count` of all that a batch has."""
    return ContextCut(few_rows=1000, few_shares=count)


CUTS = {
    "contexts whole": Choice(DECODE, PREFILL, shares(1)),
    "contexts in 4 shares": Choice(DECODE, TritonTiling(64, 32, 4, 2), shares(4)),
    "a piece for each step": Choice(DECODE, TritonTiling(128, 32, 8, 2), shares(64)),
    "mosaic prefill": Choice(DECODE, MosaicTiling(128, 2), shares(4)),
    "mosaic prefill, small tiles": Choice(DECODE, MosaicTiling(64, 3), shares(4)),
    "mosaic decode": Choice(MosaicTiling(64, 3), PREFILL, shares(4)),
    "mosaic decode, a piece for each step": Choice(MosaicTiling(64, 2), PREFILL, shares(64)),
}
# Contexts of several tiles of keys; rows that share a tile of queries, fill one, or span several.
LONG_ROWS = [(1, 1), (1, 64), (1, 317), (5, 5), (64, 128), (70, 300), (137, 137), (30, 270)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in CUTS
        for dtype in ("float32", "bfloat16")
        if dtype == "bfloat16" or "mosaic" not in name  # its one dtype
    ],
)
def test_cuts(make_case, attention_by_choice, name, window, dtype):
    sizes = {"heads": (8, 2), "head_dim": 128, "block_size": 64}
    if window is not None:
        sizes = {"heads": (7, 1), "head_dim": 64, "block_size": 16}
    case = make_case(
        LONG_ROWS,
        num_decode=3,
        dtype=dtype,
        window=window,
        padding_rows=2,
        padding_tokens=11,
        needles=window is None,
        **sizes,
    )
    case.check(case.run(attention_by_choice(CUTS[name])))


# In steps of 32 keys: ends of steps and of pieces, a step more and less, and one very long.
SKEWED = [1, 31, 32, 33, 64, 65, 128, 129, 256, 257, 511, 1000]


@pytest.mark.parametrize("window", [None, 1, 32, 97])
@pytest.mark.parametrize("num_shares", [1, 5, 24, 100])
def test_unequal_contexts(make_case, attention_by_choice, num_shares, window):
    """Decode rows of one to 32 pieces side by side, some windows of them, padding among them."""
    case = make_case(
        [(1, context) for context in SKEWED],
        num_decode=len(SKEWED),
        heads=(6, 2),
        window=window,
        padding_rows=4,
        padding_tokens=3,
        needles=window is None,
    )
    case.check(case.run(attention_by_choice(Choice(DECODE, PREFILL, shares(num_shares)))))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("context", [32, 160, 161, 1000])
def test_one_row_in_pieces(make_case, attention_by_choice, context, padding):
    case = make_case(
        [(1, context)], num_decode=1, padding_rows=padding, padding_tokens=padding, needles=True
    )
    case.check(case.run(attention_by_choice(Choice(DECODE, PREFILL, shares(5)))))


@pytest.mark.parametrize("num_shares", [1, 24])
def test_unequal_contexts_beside_a_prompt(make_case, attention_by_choice, num_shares):
    rows = [(1, context) for context in SKEWED] + [(40, 90)]
    case = make_case(rows, num_decode=len(SKEWED), padding_rows=3, padding_tokens=6)
    case.check(case.run(attention_by_choice(Choice(DECODE, PREFILL, shares(num_shares)))))


def test_queries_of_one_row_in_pieces(make_case, attention_by_choice):
    """Each query of a row is in pieces of its own."""
    case = make_case([(3, 130), (4, 300)], padding_rows=7, padding_tokens=1)
    case.check(case.run(attention_by_choice(Choice(DECODE, PREFILL, shares(20)))))


def decode_tiles(contexts, num_unused=0):
    """The tiles of decode rows; a context of 0 is a padding token."""
    tiles = np.array([(i, i, 1, n - 1) for i, n in enumerate(contexts)] + [(0,) * 4] * num_unused)
    return jnp.asarray(tiles, jnp.int32)


CUTS = [ContextCut(8, 16), ContextCut(64, 7), ContextCut(4, 4, 2), ContextCut(0, 1, 4)]
CUTS += [ContextCut(2, 3, most_shares=4), ContextCut(2, 1, 4, most_shares=9)]


def test_pieces_hold_each_step_once():
    rng = np.random.default_rng(5)
    make = jax.jit(context_pieces, static_argnames=("cut", "tile_k", "sliding_window"))
    for cut, window, num_unused in itertools.product(CUTS, (None, 50, 64), (0, 1, 7, 19)):
        num_tiles = 24
        contexts = np.exp(rng.normal(4, 2, num_tiles - num_unused)).astype(int)
        tiles = decode_tiles(contexts, num_unused)
        pieces = np.asarray(make(tiles, cut, tile_k=32, sliding_window=window))
        assert len(pieces) == num_tiles + cut.max_shares(num_tiles)
        num_used = int((pieces[:, 2] > 0).sum())
        assert not pieces[num_used:, :4].any()

        begins = [0 if window is None else max(n - window, 0) // 32 for n in contexts]
        steps = [-(-n // 32) - begin for n, begin in zip(contexts, begins, strict=True)]
        num_rows = sum(n > 0 for n in steps)
        num_shares = max(num_rows * cut.shares_per_4_rows // 4, 1)
        if cut.most_shares is not None:
            num_shares = min(num_shares, cut.most_shares)
        num_shares = cut.few_shares if num_rows < cut.few_rows else num_shares
        share = max(-(-sum(steps) // num_shares), 1)
        lengths, i = [], 0
        while i < num_used:
            row, num_pieces = pieces[i, 0], pieces[i, 5]
            np.testing.assert_array_equal(pieces[i : i + num_pieces, 4], range(num_pieces))
            np.testing.assert_array_equal(
                pieces[i : i + num_pieces, :4], [(row, row, 1, contexts[row] - 1)] * num_pieces
            )
            assert num_pieces == max(-(-steps[row] // share), 1)
            lengths.append(steps[row] // num_pieces)
            i += num_pieces
        assert i == num_used
        assert lengths == sorted(lengths, reverse=True)
        assert sorted(set(pieces[:num_used, 0])) == list(range(len(contexts)))
        assert num_used == sum(max(-(-n // share), 1) for n in steps)


def test_which_contexts_are_cut():
    """Equal ones only where they are few; else the long ones, be the batch full or half empty. With
    Mosaic there are no more shares than blocks of threads for a kv head."""
    shape = tuning.Shape(64, 64, 32, 8, 128, 16, 256, "bfloat16")
    cut = tuning.choose("triton", "9.0", shape).cut

    def num_pieces(contexts):
        tiles = decode_tiles(contexts, 64 - len(contexts))
        pieces = np.asarray(context_pieces(tiles, cut, tile_k=64, sliding_window=None))
        counts = np.zeros(len(contexts), int)
        used = pieces[:, 2] > 0
        counts[pieces[used, 0]] = pieces[used, 5]
        return counts.tolist()

    for rows in (16, 40, 64):
        assert num_pieces([1024] * rows) == [1] * rows
        assert num_pieces([1024, 1300] * (rows // 2)) == [1] * rows
        assert num_pieces([512] * (rows - 1) + [4096]) == [1] * (rows - 1) + [
            {16: 4, 40: 5, 64: 6}[rows]
        ]
    assert num_pieces([2048]) == [32]
    assert num_pieces([64]) == [1]
    assert num_pieces([2048] * 8) == [4] * 8
    assert num_pieces([256] * 7 + [2048]) == [2] * 7 + [16]

    cut = tuning.choose("mosaic", "9.0", shape).cut
    assert cut.most_shares == 264 // 8
    for rows, pieces in ((16, 4), (40, 5), (64, 4)):
        assert num_pieces([512] * (rows - 1) + [4096]) == [1] * (rows - 1) + [pieces]


@pytest.mark.parametrize("window", [None, 20])
def test_mosaic_prefill_interpreted(make_case, mosaic_prefill_interpreted, window):
    case = make_case(
        [(40, 40), (1, 70), (17, 200), (90, 150)],
        heads=(3, 1),
        head_dim=64,
        block_size=64 if window is None else 16,
        dtype="bfloat16",
        window=window,
        padding_rows=1,
        padding_tokens=4,
    )
    case.check(case.run(mosaic_prefill_interpreted))


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "window", "num_shares"),
    [
        ((4, 1), 64, 64, None, 1),
        ((7, 1), 64, 16, 100, 5),
        ((16, 2), 128, 32, None, 9),
        ((8, 1), 64, 8, 20, 4),
    ],
)
def test_mosaic_decode_interpreted(
    make_case, mosaic_decode_interpreted, heads, head_dim, block_size, window, num_shares
):
    """Nothing is read past a block table; the longest context fills it, but no tile of keys."""
    case = make_case(
        [(1, 1), (1, 64), (3, 224), (1, 130), (1, 63)],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        table_width=-(-224 // block_size),
        dtype="bfloat16",
        window=window,
        padding_rows=1,
        padding_tokens=2,
        needles=window is None,
    )
    case.check(case.run(mosaic_decode_interpreted(shares(num_shares))))


def test_mosaic_decode_of_one_row_interpreted(make_case, mosaic_decode_interpreted):
    """No more query heads than one copy brings, a piece of work for more than each block, and a
    score that is infinite unless the peak is taken off."""
    case = make_case(
        [(1, 384)],
        heads=(8, 1),
        head_dim=64,
        block_size=64,
        dtype="bfloat16",
        needles=True,
        needle=200,
    )
    case.check(case.run(mosaic_decode_interpreted(shares(6))))


@pytest.mark.parametrize("num_decode", [0, 1, 3])
def test_mosaic_decode_beside_prompts_interpreted(make_case, mosaic_decode_interpreted, num_decode):
    case = make_case(
        [*[(1, 130), (1, 40), (1, 64)][:num_decode], (20, 60), (9 - num_decode, 30)],
        heads=(4, 1),
        head_dim=64,
        block_size=16,
        dtype="bfloat16",
        padding_rows=2,
        padding_tokens=3,
    )
    case.check(case.run(mosaic_decode_interpreted(shares(3), beside_prompts=True)))


def test_aligned_tiles_hold_each_query_once():
    rng = np.random.default_rng(3)
    make = jax.jit(aligned_query_tiles, static_argnames=("num_tokens", "tile_q"))
    for _ in range(20):
        counts = rng.integers(0, 50, 6) * rng.integers(0, 2, 6)
        num_tokens, first_row = 320, int(rng.integers(0, 4))
        starts = np.concatenate([[0], np.cumsum(counts)])
        contexts = np.where(counts, counts + rng.integers(0, 90, 6), 0)
        tiles, (num_tiles,) = make(
            jnp.asarray(starts), jnp.asarray(contexts), first_row, num_tokens=num_tokens, tile_q=16
        )
        seen = []
        for row, start, low, high, position in np.asarray(tiles)[:num_tiles].tolist():
            assert start % 16 == 0
            assert 0 <= low < high <= 16
            for query in range(start + low, start + high):
                end = num_tokens if row == 6 else starts[row + 1]
                context = 0 if row == 6 else contexts[row]
                assert starts[row] <= query < end
                assert position + query - start == context - end + query
                seen.append(query)
        assert seen == list(range(starts[first_row], num_tokens))


def test_choices_for_decode():
    shape = tuning.Shape(64, 64, 32, 8, 128, 16, 32, "bfloat16")
    for change in ({}, {"num_tokens": 2048}, {"num_tokens": 32}, {"num_rows": 32}):
        choice = tuning.choose("mosaic", "9.0", dataclasses.replace(shape, **change))
        assert isinstance(choice.decode, MosaicTiling)
    few, mixed = (dataclasses.replace(shape, num_tokens=n, num_rows=16) for n in (16, 2048))
    few, mixed = (tuning.choose("triton", "9.0", change) for change in (few, mixed))
    assert few.decode == mixed.decode != tuning.choose("triton", "9.0", shape).decode
    for impl, capability, change in [
        ("triton", "9.0", {}),
        ("mosaic", "8.9", {}),
        ("mosaic", "9.0", {"dtype": "float32"}),
        ("mosaic", "9.0", {"head_dim": 80}),
        ("mosaic", "9.0", {"num_tokens": 31}),
        ("mosaic", "9.0", {"num_rows": 31}),
        ("mosaic", "9.0", {"block_size": 128}),
        ("mosaic", "9.0", {"num_heads": 9 * 8}),
        ("mosaic", "9.0", {"num_heads": 4, "num_kv_heads": 1, "num_tokens": 1, "num_rows": 1}),
    ]:
        choice = tuning.choose(impl, capability, dataclasses.replace(shape, **change))
        assert isinstance(choice.decode, TritonTiling)


def test_choices():
    shape = tuning.Shape(2048, 64, 32, 8, 128, 64, 32, "bfloat16")
    assert isinstance(tuning.choose("mosaic", "9.0", shape).prefill, MosaicTiling)
    for impl, capability, change in [
        ("triton", "9.0", {}),
        ("mosaic", "8.9", {}),
        ("mosaic", "9.0", {"dtype": "float32"}),
        ("mosaic", "9.0", {"head_dim": 80}),
        ("mosaic", "9.0", {"num_tokens": 2044}),
        ("mosaic", "9.0", {"num_tokens": 32}),
    ]:
        choice = tuning.choose(impl, capability, dataclasses.replace(shape, **change))
        assert isinstance(choice.prefill, TritonTiling)
    odd = dataclasses.replace(shape, num_heads=7 * 8)
    assert tuning.choose("triton", "8.0", odd).decode.tile_rows == 16


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine that cannot")
def test_mosaic_elsewhere_names_the_gpu_it_needs(make_case):
    case = make_case([(4, 4)])
    with pytest.raises(ValueError, match=r"impl='mosaic' needs a GPU of compute capability 9.0"):
        paged_attention(**case.arrays, **case.options, impl="mosaic")

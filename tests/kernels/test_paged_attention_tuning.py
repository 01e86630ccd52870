"""Paged attention in every cut that a tuning table may choose, and what it chooses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention, tuning
from pallas_kernels.paged_attention.tiles import aligned_query_tiles
from pallas_kernels.paged_attention.tuning import Choice, MosaicTiling, TritonTiling

DECODE = TritonTiling(16, 32, num_warps=4, num_stages=2)
CUTS = {
    "decode in one part": Choice(DECODE, TritonTiling(32, 32, 4, 2)),
    "decode in 4 parts": Choice(dataclasses.replace(DECODE, splits=4), TritonTiling(64, 32, 4, 2)),
    "decode in 32 parts": Choice(
        dataclasses.replace(DECODE, splits=32), TritonTiling(128, 32, 8, 2)
    ),
    "mosaic": Choice(DECODE, MosaicTiling(128, 2)),
    "mosaic, small tiles": Choice(DECODE, MosaicTiling(64, 3)),
}
# Contexts of several tiles of keys; rows that share a tile of queries, fill one, or span several.
LONG_ROWS = [(1, 1), (1, 64), (1, 317), (5, 5), (64, 128), (70, 300), (137, 137), (30, 270)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name, choice in CUTS.items()
        for dtype in ("float32", "bfloat16")
        if dtype == "bfloat16" or isinstance(choice.prefill, TritonTiling)  # Mosaic's one dtype
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
    case.check(*case.run(attention_by_choice(CUTS[name])))


@pytest.mark.parametrize("window", [None, 20])
def test_mosaic_prefill_interpreted(make_case, mosaic_interpreted, window):
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
    case.check(*case.run(mosaic_interpreted))


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
    few = dataclasses.replace(shape, num_rows=1)
    assert tuning.choose("triton", "8.0", few).decode.splits == 32
    many = dataclasses.replace(shape, num_rows=512)
    assert tuning.choose("triton", "8.0", many).decode.splits == 1
    odd = dataclasses.replace(shape, num_heads=7 * 8)
    assert tuning.choose("triton", "8.0", odd).decode.tile_rows == 16


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine that cannot")
def test_mosaic_elsewhere_names_the_gpu_it_needs(make_case):
    case = make_case([(4, 4)])
    with pytest.raises(ValueError, match=r"impl='mosaic' needs a GPU of compute capability 9.0"):
        paged_attention(**case.arrays, **case.options, impl="mosaic")

"""Paged attention against a dense float64 oracle, and the oracle's power against wrong code."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.paged_attention
from pallas_kernels.paged_attention import paged_attention, tuning
from pallas_kernels.paged_attention.tiles import aligned_query_tiles
from pallas_kernels.paged_attention.tuning import Choice, MosaicTiling, TritonTiling

# Largest error of one query head's output, relative to its norm.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}


@dataclasses.dataclass
class Case:
    """One call's arguments, and what a dense evaluation of each request gives."""

    arrays: dict[str, jax.Array]
    options: dict
    expected: np.ndarray
    expected_cache: np.ndarray

    def run(self, attention, **changes):
        """Call `attention` with some arguments changed; returns output and cache as float32."""
        arguments = self.arrays | self.options | changes
        # The cache may be donated: give away a copy.
        arguments["kv_cache"] = jnp.array(arguments["kv_cache"], copy=True)
        out, cache = attention(**arguments)
        assert out.dtype == self.arrays["q"].dtype
        assert cache.dtype == self.arrays["kv_cache"].dtype
        return np.asarray(out, np.float32), np.asarray(cache, np.float32)

    def check(self, out, cache):
        """The one check: right and finite outputs, zeros for padding, right cache contents."""
        assert np.isfinite(out).all()
        error = np.linalg.norm(out - self.expected, axis=-1)
        bound = TOLERANCE[str(self.arrays["q"].dtype)] * np.linalg.norm(self.expected, axis=-1)
        wrong = np.argwhere(error > bound)
        assert not len(wrong), f"(token, head) pairs {wrong[:8].tolist()} and others are wrong"
        # Padding tokens write to block 0, in no particular order.
        np.testing.assert_array_equal(cache[1:], self.expected_cache[1:])

    def passes(self, out, cache):
        try:
            self.check(out, cache)
        except AssertionError:
            return False
        return True


def make_case(
    rows,
    *,
    num_decode=0,
    heads=(4, 2),
    head_dim=16,
    block_size=16,
    dtype="float32",
    window=None,
    padding_rows=0,
    padding_tokens=0,
    needles=False,
    table_width=None,
    num_blocks=None,
    seed=0,
):
    """rows: (number of queries, context length) of each request, decode rows first.

    All that a request does not own is NaN, or garbage in the block tables. With `needles` each
    query's oldest visible, newest visible or a middle key is its own direction, 6 times over.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    num_rows = len(rows) + padding_rows
    num_queries = sum(count for count, _ in rows)
    num_tokens = num_queries + padding_tokens

    def normal(*shape):
        return np.array(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)

    blocks_of = [-(-context // block_size) for _, context in rows]
    width = table_width or max(blocks_of) + 2
    num_blocks = num_blocks or sum(blocks_of) + 4
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((num_rows, width), np.int32)
    cache = np.full((num_blocks, num_kv_heads, 2, block_size, head_dim), np.nan)
    q = normal(num_tokens, num_heads, head_dim)
    k, v = normal(2, num_tokens, num_kv_heads, head_dim)
    slots = rng.integers(0, block_size, num_tokens).astype(np.int32)
    expected = np.zeros_like(q)
    expected_cache = cache.copy()
    scale = head_dim**-0.5
    start = 0
    for row, (count, context) in enumerate(rows):
        tables[row] = rng.integers(-(2**31), 2**31, width)
        tables[row, : blocks_of[row]] = [next(free) for _ in range(blocks_of[row])]
        keys, values = normal(2, context, num_kv_heads, head_dim)
        past = context - count
        if needles:
            for i in range(count):
                position = past + i
                oldest = 0 if window is None else max(position - window + 1, 0)
                target = [oldest, position, (oldest + position) // 2][(row + i) % 3]
                keys[target] = 6 * q[start + i, ::group] / scale / head_dim
            keys = np.array(jnp.asarray(keys, dtype), np.float64)
        k[start : start + count], v[start : start + count] = keys[past:], values[past:]
        position = np.arange(context)
        block, offset = tables[row, position // block_size], position % block_size
        expected_cache[block, :, 0, offset] = keys
        expected_cache[block, :, 1, offset] = values
        cache[block[:past], :, 0, offset[:past]] = keys[:past]
        cache[block[:past], :, 1, offset[:past]] = values[:past]
        slots[start : start + count] = (block * block_size + offset)[past:]
        for i in range(count):
            seen = position <= past + i
            if window is not None:
                seen &= past + i - position < window
            for head in range(num_heads):
                scores = keys[seen, head // group] @ q[start + i, head] * scale
                weights = np.exp(scores - scores.max())
                expected[start + i, head] = weights @ values[seen, head // group] / weights.sum()
        start += count

    # What a finished request leaves behind a window is not owned either: poison it.
    if window is not None:
        for row, (count, context) in enumerate(rows):
            for position in range(max(context - count - window + 1, 0)):
                block, offset = tables[row, position // block_size], position % block_size
                cache[block, :, :, offset] = expected_cache[block, :, :, offset] = np.nan
    counts = [count for count, _ in rows] + [0] * padding_rows
    contexts = [context for _, context in rows] + [0] * padding_rows
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    arrays = {
        "q": jnp.asarray(q, dtype),
        "k": jnp.asarray(k, dtype),
        "v": jnp.asarray(v, dtype),
        "kv_cache": jnp.asarray(cache, dtype),
        "block_tables": ints(tables),
        "query_starts": ints(np.cumsum([0, *counts])),
        "context_lens": ints(contexts),
        "kv_slots": ints(slots),
        "num_decode_rows": ints(num_decode),
    }
    options = {"scale": scale, "sliding_window": window}
    return Case(arrays, options, expected, np.array(expected_cache, np.float32))


def mixed_rows(block_size):
    """(rows, how many of them decode): every kind of row in one batch."""
    s = block_size
    decode = [(1, 1), (1, s), (1, s + 1), (1, 5 * s - 3)]
    prefill = [(5, 5), (s, 2 * s), (1, 3 * s), (s + 3, 3 * s + 2), (2, s + 1)]
    return decode + prefill, len(decode)


SHAPES = [
    # heads (N, K), head_dim, block_size
    ((3, 3), 16, 8),
    ((4, 2), 48, 16),
    ((9, 3), 64, 16),
    ((8, 2), 80, 32),
    ((7, 1), 64, 8),
    ((16, 2), 128, 16),
    ((2, 1), 256, 16),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES)
def test_mixed_batch(attention, heads, head_dim, block_size, dtype):
    rows, num_decode = mixed_rows(block_size)
    case = make_case(
        rows,
        num_decode=num_decode,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        padding_rows=2,
        padding_tokens=7,
    )
    case.check(*case.run(attention))


DECODE = [(1, n) for n in (1, 15, 16, 17, 31, 33, 64, 100)]
BATCHES = {
    "decode": {"rows": DECODE, "num_decode": 8},
    "decode, padded": {"rows": DECODE, "num_decode": 8, "padding_rows": 3, "padding_tokens": 3},
    "one token": {"rows": [(1, 70)], "num_decode": 1},
    "one token, many rows": {"rows": [(1, 70)], "num_decode": 1, "padding_rows": 3},
    "first token, not a decode row": {"rows": [(1, 1)], "num_decode": 0},
    "prefill in a decode batch's shape": {"rows": [(3, 3), (4, 30)], "padding_rows": 7},
    "prefill": {"rows": [(40, 40), (16, 16), (1, 1), (17, 17)]},
    "prefill, over one tile": {"rows": [(150, 150), (64, 64), (3, 3)], "padding_tokens": 5},
    "decode, long and short contexts": {"rows": [(1, 700), (1, 3), (1, 129)], "num_decode": 3},
    "chunk of a long context": {"rows": [(70, 300)], "padding_rows": 1, "padding_tokens": 2},
    "mostly padding": {"rows": [(1, 1)], "num_decode": 1, "padding_tokens": 9},
    "all padding": {"rows": [], "padding_rows": 2, "padding_tokens": 5, "table_width": 2},
}


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(attention, name, window):
    case = make_case(**BATCHES[name], window=window)
    case.check(*case.run(attention))


@pytest.mark.parametrize("window", [1, 16, 17, 1000])
def test_sliding_windows(attention, window):
    rows, num_decode = mixed_rows(16)
    case = make_case(rows, num_decode=num_decode, window=window)
    case.check(*case.run(attention))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 19])
def test_one_key_dominates(attention, window, dtype):
    rows, num_decode = mixed_rows(16)
    case = make_case(
        rows, num_decode=num_decode, head_dim=64, window=window, dtype=dtype, needles=True
    )
    case.check(*case.run(attention))


def test_random_batches(attention):
    """Many ragged batches in one compiled shape."""
    rng = np.random.default_rng(7)
    for seed in range(12):
        num_decode = int(rng.integers(0, 4))
        rows = [(1, int(rng.integers(1, 90))) for _ in range(num_decode)]
        for _ in range(int(rng.integers(1, 4))):
            count = int(rng.integers(1, 24))
            rows.append((count, count + int(rng.integers(0, 60))))
        case = make_case(
            rows,
            num_decode=num_decode,
            padding_rows=6 - len(rows),
            padding_tokens=80 - sum(count for count, _ in rows),
            table_width=8,
            num_blocks=48,
            seed=seed,
        )
        case.check(*case.run(attention))


def test_layers_in_one_program(attention):
    """A chain of layers, each with its own cache, over steps that reuse the caches."""
    if not hasattr(attention, "lower"):
        pytest.skip("the interpreter does not run inside jit")
    rows, num_decode = mixed_rows(16)
    case = make_case(rows, num_decode=num_decode, head_dim=64, dtype="bfloat16", padding_tokens=6)
    names = [name for name in case.arrays if name not in ("q", "kv_cache")]

    def step(impl, q, caches, others):
        outs = []
        for i, cache in enumerate(caches):
            out, caches[i] = impl(q=q, kv_cache=cache, **others, **case.options)
            outs.append(out)
            q = q + out
        return outs, caches

    others = {name: case.arrays[name] for name in names}
    got_step = jax.jit(functools.partial(step, attention), donate_argnums=1)
    reference = functools.partial(paged_attention, impl="reference")
    want_step = jax.jit(functools.partial(step, reference))
    got = want = [jnp.roll(case.arrays["kv_cache"], i, axis=-1) for i in range(4)]
    got = [jnp.array(cache, copy=True) for cache in got]
    for _ in range(3):
        got_outs, got = got_step(case.arrays["q"], got, others)
        want_outs, want = want_step(case.arrays["q"], want, others)
        for out, expected in zip(got_outs, want_outs, strict=True):
            out, expected = np.asarray(out, np.float32), np.asarray(expected, np.float32)
            assert np.isfinite(out).all()
            assert np.linalg.norm(out - expected) <= 2e-2 * np.linalg.norm(expected)
        for cache, expected in zip(got, want, strict=True):
            cache, expected = np.asarray(cache, np.float32), np.asarray(expected, np.float32)
            np.testing.assert_array_equal(cache[1:], expected[1:])  # block 0 takes the padding


# What a tuning table may choose. Contexts of several tiles of keys; rows that share a tile of
# queries, fill one, or span several.
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
LONG_ROWS = [(1, 1), (1, 64), (1, 317), (5, 5), (64, 128), (70, 300), (137, 137), (30, 270)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", CUTS)
def test_cuts(attention_by_choice, name, window, dtype):
    if name.startswith("mosaic") and dtype == "float32":
        pytest.skip("Mosaic prefill is for bfloat16")
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
def test_mosaic_prefill_interpreted(mosaic_interpreted, window):
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
def test_mosaic_elsewhere_names_the_gpu_it_needs():
    case = make_case([(4, 4)])
    with pytest.raises(ValueError, match=r"impl='mosaic' needs a GPU of compute capability 9.0"):
        paged_attention(**case.arrays, **case.options, impl="mosaic")


def _no_causal_mask(attention, *, q, block_tables, query_starts, context_lens, **rest):
    # Every query becomes a decode row at the end of its request's context.
    row = np.searchsorted(np.asarray(query_starts), np.arange(len(q)), side="right") - 1
    return attention(
        q=q,
        block_tables=block_tables[row],
        query_starts=jnp.arange(len(q) + 1),
        context_lens=context_lens[row],
        **rest | {"num_decode_rows": jnp.int32(len(q))},
    )


def _changed(name, change):
    def mutant(attention, **arguments):
        return attention(**arguments | {name: change(arguments[name])})

    return mutant


def _interleaved_heads(attention, *, q, **rest):
    # Head n reads kv head n % K, not n // G.
    order = np.arange(q.shape[1]).reshape(-1, rest["k"].shape[1]).T.ravel()
    out, cache = attention(q=q[:, order], **rest)
    return out[:, np.argsort(order)], cache


MUTANTS = {
    "no causal mask": _no_causal_mask,
    "newest key dropped": _changed("context_lens", lambda x: x - 1),
    "wrong block": _changed("block_tables", lambda x: x.at[:, 0].set(x[::-1, 0])),
    "blocks out of order": _changed("block_tables", lambda x: x.at[:, :2].set(x[:, 1::-1])),
    "window one too wide": _changed("sliding_window", lambda x: x + 1),
    "window one too narrow": _changed("sliding_window", lambda x: x - 1),
    "keys and values not written": _changed("kv_slots", jnp.zeros_like),
    "written one slot off": _changed("kv_slots", lambda x: x ^ 1),
    "keys and values swapped": _changed("k", lambda x: x + 1),
    "query heads interleaved": _interleaved_heads,
    "wrong scale": _changed("scale", lambda x: x * 1.05),
}


reference = jax.jit(
    functools.partial(paged_attention, impl="reference"),
    static_argnames=("scale", "sliding_window"),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_code_fails_the_check(dtype):
    rows = [(1, 40), (1, 33), (20, 36), (24, 50)]
    for needles in (False, True):
        case = make_case(rows, num_decode=2, dtype=dtype, window=18, needles=needles)
        case.check(*case.run(reference))
        survivors = [
            name
            for name, mutant in MUTANTS.items()
            if case.passes(*case.run(functools.partial(mutant, reference)))
        ]
        assert not survivors


@pytest.mark.parametrize("name", ["one token", "decode", "prefill"])
def test_cache_is_updated_in_place(name):
    case = make_case(**BATCHES[name], num_blocks=2048)

    def layers(caches, arrays):
        for i, cache in enumerate(caches):
            out, caches[i] = reference(**arrays | {"kv_cache": cache}, **case.options)
            arrays = arrays | {"q": arrays["q"] + out}
        return arrays["q"], caches

    caches = [case.arrays["kv_cache"]] * 3
    compiled = jax.jit(layers, donate_argnums=0).lower(caches, case.arrays).compile()
    shape = f"f32[{','.join(map(str, caches[0].shape))}]"
    lines = [line for line in compiled.as_text().splitlines() if shape in line]
    assert lines, "the cache's shape is not in the compiled program"
    assert not [line for line in lines if " copy(" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < caches[0].nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((4, 3, 16))}, "3 query heads do not divide into 2 kv heads"),
        ({"q": jnp.zeros((4, 4, 24))}, "head_dim 24 is not a multiple of 16"),
        ({"kv_cache": jnp.zeros((9, 2, 2, 12, 16))}, "block size 12"),
        ({"kv_cache": jnp.zeros((9, 1, 2, 16, 16))}, "shapes disagree"),
        ({"k": jnp.zeros((4, 2, 16), jnp.bfloat16)}, "must share dtype"),
        ({"sliding_window": 0}, "sliding_window 0 must be at least 1"),
        ({"impl": "fast"}, "impl='fast' is unknown: choose 'reference', 'triton' or 'mosaic'"),
    ],
)
def test_arguments_outside_the_contract_are_named(change, message):
    case = make_case([(4, 4)])
    arguments = case.arrays | case.options | {"impl": "reference"} | change
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


def test_without_triton_the_error_names_the_extra(monkeypatch):
    for name in ("paged_attention.gpu", "paged_attention.triton_kernel", "triton_import"):
        monkeypatch.delitem(sys.modules, f"pallas_kernels.{name}", raising=False)
    for name in ("gpu", "triton_kernel"):
        monkeypatch.delattr(pallas_kernels.paged_attention, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # makes its import fail
    case = make_case([(4, 4)])
    with pytest.raises(
        ImportError, match=r"triton >= 3.7, but found .*: pip install 'jaxserve\[cuda"
    ):
        paged_attention(**case.arrays, **case.options, impl="triton")

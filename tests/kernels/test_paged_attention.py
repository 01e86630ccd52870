"""Paged attention against a dense float64 oracle, and the oracle's power against wrong code."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.paged_attention
from pallas_kernels.paged_attention import paged_attention


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
def test_mixed_batch(make_case, attention, heads, head_dim, block_size, dtype):
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
    case.check(case.run(attention))


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
def test_batches(make_case, attention, name, window):
    case = make_case(**BATCHES[name], window=window)
    case.check(case.run(attention))


@pytest.mark.parametrize("window", [1, 16, 17, 1000])
def test_sliding_windows(make_case, attention, window):
    rows, num_decode = mixed_rows(16)
    case = make_case(rows, num_decode=num_decode, window=window)
    case.check(case.run(attention))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 19])
def test_one_key_dominates(make_case, attention, window, dtype):
    rows, num_decode = mixed_rows(16)
    case = make_case(
        rows, num_decode=num_decode, head_dim=64, window=window, dtype=dtype, needles=True
    )
    case.check(case.run(attention))


def test_random_batches(make_case, attention):
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
        case.check(case.run(attention))


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
    order = np.arange(q.shape[1]).reshape(-1, rest["kv_cache"].shape[1]).T.ravel()
    return attention(q=q[:, order], **rest)[:, np.argsort(order)]


MUTANTS = {
    "no causal mask": _no_causal_mask,
    "newest key dropped": _changed("context_lens", lambda x: x - 1),
    "wrong block": _changed("block_tables", lambda x: x.at[:, 0].set(x[::-1, 0])),
    "blocks out of order": _changed("block_tables", lambda x: x.at[:, :2].set(x[:, 1::-1])),
    "window one too wide": _changed("sliding_window", lambda x: x + 1),
    "window one too narrow": _changed("sliding_window", lambda x: x - 1),
    "keys and values swapped": _changed("kv_cache", lambda x: x[:, :, ::-1]),
    "offsets in a block swapped": _changed("kv_cache", lambda x: x[:, :, :, ::-1]),
    "query heads interleaved": _interleaved_heads,
    "wrong scale": _changed("scale", lambda x: x * 1.05),
}


reference = jax.jit(
    functools.partial(paged_attention, impl="reference"),
    static_argnames=("scale", "sliding_window"),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_code_fails_the_check(make_case, dtype):
    rows = [(1, 40), (1, 33), (20, 36), (24, 50)]
    for needles in (False, True):
        case = make_case(rows, num_decode=2, dtype=dtype, window=18, needles=needles)
        case.check(case.run(reference))
        survivors = [
            name
            for name, mutant in MUTANTS.items()
            if case.passes(case.run(functools.partial(mutant, reference)))
        ]
        assert not survivors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((4, 3, 16))}, "3 query heads do not divide into 2 kv heads"),
        ({"q": jnp.zeros((4, 4, 24))}, "head_dim 24 is not a multiple of 16"),
        ({"kv_cache": jnp.zeros((9, 2, 2, 12, 16))}, "block size 12"),
        ({"kv_cache": jnp.zeros((9, 1, 2, 16, 16))}, "shapes disagree"),
        ({"counters": jnp.zeros((4, 2), jnp.int32)}, "shapes disagree"),
        ({"q": jnp.zeros((4, 4, 16), jnp.bfloat16)}, "must share dtype"),
        ({"sliding_window": 0}, "sliding_window 0 must be at least 1"),
        ({"impl": "fast"}, "impl='fast' is unknown: choose 'reference', 'triton' or 'mosaic'"),
    ],
)
def test_arguments_outside_the_contract_are_named(make_case, change, message):
    case = make_case([(4, 4)])
    arguments = case.arrays | case.options | {"impl": "reference"} | change
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)


def test_without_triton_the_error_names_the_extra(make_case, monkeypatch):
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

"""Rotation and the cache's update against float64, and with attention in a chain of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_and_write_kv import rope_and_write_kv

EPS = 1e-6
NUM_TOKENS, NUM_PADDING, NUM_BLOCKS, BLOCK_SIZE = 19, 5, 7, 8
NAMES = ("qkv", "bias", "q_norm", "k_norm", "cos", "sin", "kv_cache", "kv_slots")
# parts, K, G, head_dim, has_bias, has_norms
SHAPES = [
    (1, 2, 7, 64, True, False),
    (4, 8, 4, 128, False, False),
    (1, 8, 2, 128, False, True),
    (2, 3, 1, 96, True, True),
    (1, 1, 1, 16, False, False),
]


def make_arguments(parts, num_kv_heads, group, head_dim, has_bias, has_norms, dtype="float32"):
    """The last tokens are padding, several to a slot of block 0."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    heads = (num_kv_heads, group + 2, head_dim)
    angles = normal(NUM_TOKENS, head_dim // 2, dtype="float32")
    owned = rng.permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))
    slots = [*owned[: NUM_TOKENS - NUM_PADDING], *rng.integers(0, 3, NUM_PADDING)]
    values = (
        normal(parts, NUM_TOKENS, *heads, dtype=dtype if parts == 1 else "float32"),
        normal(*heads) if has_bias else None,
        1 + normal(head_dim) if has_norms else None,
        1 + normal(head_dim) if has_norms else None,
        jnp.cos(angles),
        jnp.sin(angles),
        normal(NUM_BLOCKS, num_kv_heads, 2, BLOCK_SIZE, head_dim),
        jnp.asarray(slots, jnp.int32),
    )
    return dict(zip(NAMES, values, strict=True))


def expected_from(arguments):
    """q and the cache in float64; block 0 may hold anything."""
    wide = {name: None if a is None else np.asarray(a, np.float64) for name, a in arguments.items()}
    qkv, cache = wide["qkv"].sum(axis=0), wide["kv_cache"]
    if wide["bias"] is not None:
        qkv = qkv + wide["bias"]
    turned = qkv[:, :, :-1]
    if wide["q_norm"] is not None:
        norms = np.array([wide["q_norm"]] * (turned.shape[2] - 1) + [wide["k_norm"]])
        turned = turned / np.sqrt((turned**2).mean(axis=-1, keepdims=True) + EPS) * norms
    half = turned.shape[-1] // 2
    angle = (wide["cos"] + 1j * wide["sin"])[:, None, None]
    turned = (turned[..., :half] + 1j * turned[..., half:]) * angle
    turned = np.concatenate([turned.real, turned.imag], axis=-1)
    for token, slot in enumerate(np.asarray(arguments["kv_slots"])):
        page = cache[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE]
        page[:, 0], page[:, 1] = turned[token, :, -1], qkv[token, :, -1]
    return turned[:, :, :-1].reshape(len(turned), -1, 2 * half), cache


def check(results, arguments):
    q, cache, counters = results
    expected_q, expected_cache = expected_from(arguments)
    dtype = arguments["kv_cache"].dtype
    assert q.dtype == cache.dtype == dtype
    np.testing.assert_array_equal(counters, np.zeros((NUM_TOKENS + 1, cache.shape[1]), np.int32))
    assert counters.dtype == np.int32

    owned = np.asarray(arguments["kv_slots"])[: NUM_TOKENS - NUM_PADDING]
    written = np.zeros((NUM_BLOCKS, BLOCK_SIZE), bool)
    written[owned // BLOCK_SIZE, owned % BLOCK_SIZE] = True
    # [P, S, K, 2, H]
    cache, before, expected_cache = (
        np.moveaxis(np.asarray(a, np.float64), 3, 1)
        for a in (cache, arguments["kv_cache"], expected_cache)
    )
    np.testing.assert_array_equal(cache[1:][~written[1:]], before[1:][~written[1:]])
    tolerance = 6e-3 if dtype == jnp.bfloat16 else 2e-6
    close(q, expected_q, tolerance)
    close(cache[written], expected_cache[written], tolerance)


def close(found, expected, tolerance):
    """Every head by itself."""
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    error = np.linalg.norm(found - expected, axis=-1)
    assert (error <= tolerance * np.linalg.norm(expected, axis=-1)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotated_and_written(by_each, shape, dtype):
    arguments = make_arguments(*shape, dtype)
    check(by_each(rope_and_write_kv, eps=EPS)(*arguments.values()), arguments)


MUTANTS = {
    "one slot off": ("kv_slots", lambda x: x ^ 1),
    "not written": ("kv_slots", jnp.zeros_like),
    "padding out of block 0": ("kv_slots", lambda x: x.at[-NUM_PADDING:].add(2 * BLOCK_SIZE)),
    "keys and values swapped": ("qkv", lambda x: x.at[:, :, :, -2:].set(x[:, :, :, :-3:-1])),
    "kv heads swapped": ("qkv", lambda x: x.at[:, :, :, -2:].set(x[:, :, ::-1, -2:])),
    "a part dropped": ("qkv", lambda x: x[:1]),
    "turned backwards": ("sin", jnp.negative),
    "no bias": ("bias", lambda x: None),
    "another norm": ("k_norm", lambda x: x[::-1]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_code_fails_the_check(name):
    argument, change = MUTANTS[name]
    arguments = make_arguments(2, 3, 2, 32, True, True)
    changed = arguments | {argument: change(arguments[argument])}
    results = rope_and_write_kv(**changed, eps=EPS, impl="reference")
    with pytest.raises(AssertionError):
        check(results, arguments)


def make_layers(make_case, rows, *, num_padding=0, dtype="float32", **sizes):
    """(qkv, cos, sin, the layers' caches, kv_slots, batch, options) of a step whose keys and
    values are yet to be written."""
    num_decode = sum(count == 1 for count, _ in rows)
    sizes |= {"heads": (6, 3), "head_dim": 32, "padding_tokens": num_padding}
    case = make_case(rows, num_decode=num_decode, dtype=dtype, **sizes)
    batch = {name: a for name, a in case.arrays.items() if name not in ("q", "kv_cache")}
    del batch["counters"]
    tables = np.asarray(batch["block_tables"])
    slots = [
        tables[row, position // 16] * 16 + position % 16
        for row, (count, context) in enumerate(rows)
        for position in range(context - count, context)
    ]
    block, offset = np.divmod(np.array(slots), 16)
    cache = case.arrays["kv_cache"].at[block, :, :, offset].set(jnp.nan)
    caches = [jnp.roll(cache, i, axis=-1) for i in range(3)]
    rng = np.random.default_rng(1)
    num_tokens = len(case.arrays["q"])
    qkv = jnp.asarray(rng.standard_normal((1, num_tokens, 3, 4, 32)), dtype)
    angles = jnp.asarray(rng.standard_normal((num_tokens, 16)), jnp.float32)
    slots = jnp.asarray([*slots, *range(num_padding)], jnp.int32)
    return qkv, jnp.cos(angles), jnp.sin(angles), caches, slots, batch, case.options


def step(rope, attention, qkv, cos, sin, caches, slots, batch):
    """Each layer's output goes into the next one's queries, keys and values."""
    outs, written = [], []
    for cache in caches:
        q, cache, counters = rope(qkv, None, None, None, cos, sin, cache, slots)
        out = attention(q=q, kv_cache=cache, counters=counters, **batch)
        outs.append(out)
        written.append(cache)
        heads = out.reshape(*qkv.shape[1:3], -1, qkv.shape[-1])
        qkv = qkv + jnp.mean(heads, axis=2, keepdims=True)[None]
    return outs, written


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_in_one_program(make_case, by_triton, dtype):
    """Each layer with its own cache, over steps that reuse the caches."""
    rows = [(1, 450), (1, 3), (1, 129), (5, 5), (16, 32), (2, 17)]
    qkv, cos, sin, caches, slots, batch, options = make_layers(
        make_case, rows, num_padding=6, dtype=dtype
    )
    kernels = by_triton(rope_and_write_kv, eps=EPS), by_triton(paged_attention, **options)
    ours = functools.partial(step, *kernels)
    if hasattr(kernels[0], "lower"):  # the interpreter does not run inside jit
        ours = jax.jit(ours, donate_argnums=3)
    rope = functools.partial(rope_and_write_kv, eps=EPS, impl="reference")
    attention = functools.partial(paged_attention, **options, impl="reference")
    theirs = jax.jit(functools.partial(step, rope, attention))

    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    want, got = caches, [jnp.array(cache, copy=True) for cache in caches]
    for i in range(2):
        got_outs, got = ours(qkv + i, cos, sin, got, slots, batch)
        want_outs, want = theirs(qkv + i, cos, sin, want, slots, batch)
        for out, expected in zip(got_outs, want_outs, strict=True):
            out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
            assert np.isfinite(out).all()
            assert np.linalg.norm(out - expected) <= tolerance * np.linalg.norm(expected)
        for cache, expected in zip(got, want, strict=True):
            # Block 0 takes the padding.
            cache, expected = np.asarray(cache[1:], np.float64), np.asarray(expected[1:])
            owned = np.isfinite(expected)
            np.testing.assert_array_equal(np.isfinite(cache), owned)
            error = np.linalg.norm(cache[owned] - expected[owned])
            assert error <= tolerance * np.linalg.norm(expected[owned])


@pytest.mark.parametrize(
    "rows",
    [[(1, 70)], [(1, 70), (1, 3), (1, 33)], [(1, 70), (40, 40), (17, 30)]],
    ids=["one token", "decode", "prefill"],
)
def test_cache_is_updated_in_place(make_case, by_each, rows):
    *arguments, batch, options = make_layers(make_case, rows, num_blocks=2048)
    kernels = by_each(rope_and_write_kv, eps=EPS), by_each(paged_attention, **options)
    if not hasattr(kernels[0], "lower"):
        pytest.skip("the interpreter does not run inside jit")
    program = jax.jit(functools.partial(step, *kernels), donate_argnums=3)
    compiled = program.lower(*arguments, batch).compile()
    cache = arguments[3][0]
    shape = f"f32[{','.join(map(str, cache.shape))}]"
    lines = [line for line in compiled.as_text().splitlines() if shape in line]
    assert lines, "the cache's shape is not in the compiled program"
    assert not [line for line in lines if " copy(" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < cache.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache": jnp.zeros((7, 2, 2, 8, 32))}, "shapes disagree"),
        ({"kv_slots": jnp.zeros((18,), jnp.int32)}, "shapes disagree"),
        ({"impl": "cuda"}, "impl='cuda' is unknown: choose 'reference' or 'triton'"),
    ],
)
def test_arguments_outside_the_contract_are_named(change, message):
    arguments = make_arguments(1, 3, 2, 32, False, False) | {"impl": "reference"} | change
    with pytest.raises(ValueError, match=message):
        rope_and_write_kv(**arguments, eps=EPS)

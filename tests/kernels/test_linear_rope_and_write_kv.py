"""The QKV projection with the rotation and the cache's update, against the kernels that it is one
of."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import linear_parts, linear_rope_and_write_kv, tuning
from pallas_kernels.rope_and_write_kv import rope_and_write_kv

EPS = 1e-6
NUM_BLOCKS, BLOCK_SIZE, IN_SIZE = 5, 8, 70
# K, G, head_dim, has_bias, has_norms
SHAPES = [(1, 3, 32, True, False), (3, 2, 16, False, True), (2, 1, 24, True, True)]


def make_arguments(num_tokens, shape, dtype="float32", seed=0):
    """Of `linear_rope_and_write_kv`, but for what it counts in."""
    num_kv_heads, group, head_dim, has_bias, has_norms = shape
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    heads = (num_kv_heads, group + 2, head_dim)
    angles = normal(num_tokens, head_dim // 2, dtype="float32")
    owned = rng.permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))
    return (
        normal(num_tokens, IN_SIZE),
        normal(*heads, IN_SIZE) / 8,
        normal(*heads) if has_bias else None,
        1 + normal(head_dim) / 8 if has_norms else None,
        1 + normal(head_dim) / 8 if has_norms else None,
        jnp.cos(angles),
        jnp.sin(angles),
        normal(NUM_BLOCKS, num_kv_heads, 2, BLOCK_SIZE, head_dim),
        jnp.asarray(owned[:num_tokens], jnp.int32),
    )


def cut(monkeypatch, splits, tile_out=16):
    tiling = tuning.Tiling(tile_out, 32, 4, 3, splits)
    monkeypatch.setattr(tuning, "choose", lambda *_: tiling)


def zeros():
    return jnp.zeros((9,), jnp.int32)


def close(found, expected, tolerance):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        assert mine.shape == theirs.shape
        assert np.isfinite(mine).all()
        assert np.linalg.norm(mine - theirs) <= tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_kernel_does_what_two_do(by_triton, monkeypatch, shape, dtype, splits):
    """Over several calls that count in the same array."""
    cut(monkeypatch, splits)
    ours = by_triton(linear_rope_and_write_kv, eps=EPS)
    parts_of, rope = by_triton(linear_parts), by_triton(rope_and_write_kv, eps=EPS)
    arrived = zeros()
    for seed in range(2):
        arguments = make_arguments(1, shape, dtype, seed)
        *found, arrived = ours(*arguments, arrived)
        x, weight, *others = arguments
        parts = parts_of(x, weight.reshape(-1, IN_SIZE))
        two = rope(parts.reshape(-1, 1, *weight.shape[:-1]), *others)
        close(found, two, 5e-3 if dtype == "bfloat16" else 1e-6)
        np.testing.assert_array_equal(arrived, 0)
    wide = [a.astype(jnp.float32) if a is not None else a for a in arguments[:-1]]
    *expected, _ = linear_rope_and_write_kv(
        *wide, arguments[-1], arrived, eps=EPS, impl="reference"
    )
    found = [a.astype(b.dtype) for a, b in zip(found, expected, strict=True)]
    close(found, expected, 2e-2 if dtype == "bfloat16" else 1e-5)
    untouched = np.ones((NUM_BLOCKS, BLOCK_SIZE), bool)
    untouched[np.divmod(np.asarray(arguments[-1]), BLOCK_SIZE)] = False
    before, after = (np.asarray(a, np.float64).swapaxes(1, 3) for a in (arguments[7], found[1]))
    np.testing.assert_array_equal(after[untouched], before[untouched])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("splits", [1, 3])
def test_any_program_may_be_the_last(by_triton, in_random_order, monkeypatch, splits, seed):
    cut(monkeypatch, splits)
    arguments = make_arguments(1, SHAPES[1])
    ours = by_triton(linear_rope_and_write_kv, eps=EPS)
    *found, arrived = in_random_order(ours, (12, splits), seed, *arguments, zeros())
    np.testing.assert_array_equal(arrived, 0)
    *expected, _ = linear_rope_and_write_kv(*arguments, zeros(), eps=EPS, impl="reference")
    close(found, expected, 1e-5)


def test_none_is_the_last_while_one_is_missing(by_triton, monkeypatch):
    cut(monkeypatch, 3)
    arguments = make_arguments(1, SHAPES[1])
    *found, arrived = by_triton(linear_rope_and_write_kv, eps=EPS)(*arguments, zeros() - 1)
    assert arrived.tolist() == [11, 11, 11, *[-1] * 6]
    np.testing.assert_array_equal(found[1], arguments[7])


@pytest.mark.parametrize(("num_tokens", "tile_out"), [(1, 128), (2, 16)])
def test_two_kernels_where_one_cannot(by_triton, monkeypatch, num_tokens, tile_out):
    """Tiles that hold rows of two kv heads, and more tokens."""
    cut(monkeypatch, 2, tile_out)
    arguments = make_arguments(num_tokens, SHAPES[1])
    *found, arrived = by_triton(linear_rope_and_write_kv, eps=EPS)(*arguments, zeros())
    np.testing.assert_array_equal(arrived, 0)
    *expected, _ = linear_rope_and_write_kv(*arguments, zeros(), eps=EPS, impl="reference")
    close(found, expected, 1e-5)


def test_unknown_implementations_are_refused():
    arguments = make_arguments(1, SHAPES[0])
    with pytest.raises(ValueError, match="impl='cuda' is unknown: choose 'reference', 'triton'"):
        linear_rope_and_write_kv(*arguments, zeros(), eps=EPS, impl="cuda")

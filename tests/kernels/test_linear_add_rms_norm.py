"""A product with the residual sum and the norm after it, against the kernels that it is one of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm, reference
from pallas_kernels.linear import dispatch, linear_add_rms_norm, linear_parts, tuning

EPS = 1e-6


def normal(seed, shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def make_arguments(num_tokens, out_size, in_size, dtype, seed=0):
    """x, weight, residual and norm weight."""
    shapes = ((num_tokens, in_size), (out_size, in_size), (num_tokens, out_size), (out_size,))
    arrays = [normal(10 * seed + i, shape, dtype) for i, shape in enumerate(shapes)]
    return *arrays[:3], 1 + 0.1 * arrays[3]


def cut(monkeypatch, tiling):
    monkeypatch.setattr(tuning, "choose", lambda *_: tiling)


def check(found, total, normed):
    """The sum bit by bit; the norm but for the order in which its squares are added up."""
    np.testing.assert_array_equal(np.asarray(found[0], np.float64), np.asarray(total, np.float64))
    assert found[1].dtype == normed.dtype == total.dtype
    found, normed = (np.asarray(a, np.float64) for a in (found[1], normed))
    tolerance = 5e-3 if total.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(found, normed, rtol=tolerance, atol=1e-6)


SHAPES = [(96, 896), (50, 192), (40, 130), (64, 256), (16, 16)]


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_one_kernel_does_what_two_do(by_triton, monkeypatch, dtype, out_size, in_size, splits):
    """Over several calls that count in the same array."""
    cut(monkeypatch, tuning.Tiling(16, 32, 4, 3, splits))
    ours = by_triton(linear_add_rms_norm, eps=EPS)
    parts_of, add = by_triton(linear_parts), by_triton(add_rms_norm, eps=EPS)
    arrived = jnp.zeros((out_size,), jnp.int32)
    for seed in range(3):
        arguments = make_arguments(1, out_size, in_size, dtype, seed)
        *found, arrived = ours(*arguments, arrived)
        x, weight, residual, norm_weight = arguments
        check(found, *add(residual, parts_of(x, weight), norm_weight))
        np.testing.assert_array_equal(arrived, 0)
    wide = [a.astype(jnp.float32) for a in arguments]
    expected = linear_add_rms_norm(*wide, arrived, eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected[:2], strict=True):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
        assert np.linalg.norm(mine - theirs) <= tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("splits", [1, 3])
def test_any_program_may_be_the_last(by_triton, in_random_order, monkeypatch, splits, seed):
    cut(monkeypatch, tuning.Tiling(16, 32, 4, 3, splits))
    arguments = make_arguments(1, 70, 100, "float32")
    ours = by_triton(linear_add_rms_norm, eps=EPS)
    arrived = jnp.zeros((70,), jnp.int32)
    *found, arrived = in_random_order(ours, (5, splits), seed, *arguments, arrived)
    np.testing.assert_array_equal(arrived, 0)
    expected = linear_add_rms_norm(*arguments, arrived, eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_none_is_the_last_while_one_is_missing(by_triton, monkeypatch):
    """Of the programs of a tile's rows, and of all."""
    cut(monkeypatch, tuning.Tiling(16, 32, 4, 3, 3))
    ours = by_triton(linear_add_rms_norm, eps=EPS)
    for missing, left in (([-1, 0, 0, 0], [2, 0, 0, 0]), ([0, -1, 0, 0], [2, 2, 0, 0])):
        arrived = jnp.zeros((48,), jnp.int32).at[:4].set(jnp.asarray(missing))
        *_, arrived = ours(*make_arguments(1, 48, 100, "float32"), arrived)
        assert arrived[:4].tolist() == left


def test_a_single_token_only_and_where_it_was_faster():
    def fused(capability, num_tokens, in_size, dtype="bfloat16"):
        shape = tuning.Shape("normed", num_tokens, 4096, in_size, dtype)
        return tuning.choose(capability, shape) is not None

    assert fused("9.0", 1, 14336)
    assert not any(fused("9.0", n, 14336) for n in range(2, tuning.MAX_TOKENS + 2))
    assert not fused("9.0", 1, 4096)
    assert not fused("9.0", 1, 14336, "float32")
    assert not fused("8.0", 1, 14336)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_where_it_is_two_kernels_it_counts_nothing(by_triton, monkeypatch, num_tokens):
    tiling = tuning.Tiling(16, 32, 4, 3, 2)
    monkeypatch.setattr(
        tuning, "choose", lambda _, shape: None if shape.kind == "normed" else tiling
    )
    arguments = make_arguments(num_tokens, 48, 96, "float32")
    arrived = jnp.zeros((48,), jnp.int32)
    *found, after = by_triton(linear_add_rms_norm, eps=EPS)(*arguments, arrived)
    np.testing.assert_array_equal(after, 0)
    expected = linear_add_rms_norm(*arguments, arrived, eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def size_in_bytes(array):
    return array.size * array.dtype.itemsize


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_large_sum_is_the_products(by_triton, monkeypatch, dtype):
    cut(monkeypatch, None)
    x, weight, residual, norm_weight = arguments = make_arguments(130, 48, 96, dtype)
    monkeypatch.setattr(dispatch, "CACHED_BYTES", size_in_bytes(residual) - 1)
    monkeypatch.delattr(dispatch, "add_rms_norm")
    monkeypatch.delattr(reference, "rms_norm")  # a GPU has its own
    arrived = jnp.zeros((48,), jnp.int32)
    *found, after = by_triton(linear_add_rms_norm, eps=EPS)(*arguments, arrived)
    np.testing.assert_array_equal(after, 0)
    monkeypatch.undo()
    wide = [a.astype(jnp.float32) for a in (residual, x, weight, norm_weight)]
    parts = linear_parts(*wide[1:3], impl="reference")
    expected = add_rms_norm(wide[0], parts, wide[3], eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
        assert np.linalg.norm(mine - theirs) <= tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("why", ["small", "in parts", "reference"])
def test_another_sum_is_the_norms(by_triton, monkeypatch, why):
    tiling = tuning.Tiling(16, 32, 4, 3, 2) if why == "in parts" else None
    monkeypatch.setattr(
        tuning, "choose", lambda _, shape: tiling if shape.kind == "parts" else None
    )
    arguments = make_arguments(33, 48, 96, "float32")
    largest = size_in_bytes(arguments[2]) if why == "small" else 0
    monkeypatch.setattr(dispatch, "CACHED_BYTES", largest)
    monkeypatch.delattr(dispatch, "rms_norm")
    arguments = *arguments, jnp.zeros((48,), jnp.int32)
    if why == "reference":
        linear_add_rms_norm(*arguments, eps=EPS, impl="reference")
    else:
        by_triton(linear_add_rms_norm, eps=EPS)(*arguments)


def test_unknown_implementations_are_refused():
    arguments = make_arguments(1, 16, 32, "float32")
    with pytest.raises(ValueError, match="impl='cuda' is unknown: choose 'reference', 'triton'"):
        linear_add_rms_norm(*arguments, jnp.zeros((16,), jnp.int32), eps=EPS, impl="cuda")

"""A product with the residual sum and the norm after it, against the kernels that it is one of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.linear import linear_add_rms_norm, linear_parts, tuning

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


SHAPES = [(1, 96, 896), (2, 50, 192), (3, 40, 130), (4, 64, 256), (4, 16, 16)]


@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), SHAPES)
def test_one_kernel_does_what_two_do(
    by_triton, monkeypatch, dtype, num_tokens, out_size, in_size, splits
):
    """Over several calls that count with the same counters."""
    cut(monkeypatch, tuning.Tiling(16, 32, 4, 3, splits))
    ours = by_triton(linear_add_rms_norm, eps=EPS)
    parts_of, add = by_triton(linear_parts), by_triton(add_rms_norm, eps=EPS)
    counters = jnp.zeros((out_size,), jnp.int32)
    for seed in range(3):
        arguments = make_arguments(num_tokens, out_size, in_size, dtype, seed)
        *found, counters = ours(*arguments, counters)
        x, weight, residual, norm_weight = arguments
        check(found, *add(residual, parts_of(x, weight), norm_weight))
        np.testing.assert_array_equal(counters, 0)
    wide = [a.astype(jnp.float32) for a in arguments]
    expected = linear_add_rms_norm(*wide, counters, eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected[:2], strict=True):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
        assert np.linalg.norm(mine - theirs) <= tolerance * np.linalg.norm(theirs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("splits", [1, 3])
def test_any_program_may_be_the_last(by_triton, monkeypatch, splits, seed):
    """In the interpreter, where they run one after another."""
    num_tokens, out_size, in_size = 3, 70, 100
    cut(monkeypatch, tuning.Tiling(16, 32, 4, 3, splits))
    ours = by_triton(linear_add_rms_norm, eps=EPS)
    if hasattr(ours, "lower"):
        pytest.skip("a GPU has its own order")
    from triton.runtime.interpreter import interpreter_builder

    places = [(tile, split, 0) for tile in range(5) for split in range(splits)]
    order = iter(np.random.default_rng(seed).permutation(places).tolist())
    set_place = interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: set_place(*next(order)))
    arguments = make_arguments(num_tokens, out_size, in_size, "float32")
    counters = jnp.zeros((out_size,), jnp.int32)
    *found, counters = ours(*arguments, counters)
    assert next(order, None) is None
    np.testing.assert_array_equal(counters, 0)
    expected = linear_add_rms_norm(*arguments, counters, eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_few_tokens_only():
    for num_tokens in range(1, tuning.MAX_TOKENS + 2):
        shape = tuning.Shape("normed", num_tokens, 32, 32, "bfloat16")
        fused = tuning.choose("none", shape) is not None
        assert fused == (num_tokens <= tuning.MAX_NORMED_TOKENS)


@pytest.mark.parametrize("num_tokens", [3, tuning.MAX_NORMED_TOKENS + 1])
def test_where_it_is_two_kernels_it_leaves_the_counters(by_triton, monkeypatch, num_tokens):
    tiling = tuning.Tiling(16, 32, 4, 3, 2)
    monkeypatch.setattr(
        tuning, "choose", lambda _, shape: None if shape.kind == "normed" else tiling
    )
    arguments = make_arguments(num_tokens, 48, 96, "float32")
    counters = jnp.zeros((48,), jnp.int32)
    *found, after = by_triton(linear_add_rms_norm, eps=EPS)(*arguments, counters)
    np.testing.assert_array_equal(after, 0)
    expected = linear_add_rms_norm(*arguments, counters, eps=EPS, impl="reference")
    for mine, theirs in zip(found, expected[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_unknown_implementations_are_refused():
    arguments = make_arguments(1, 16, 32, "float32")
    with pytest.raises(ValueError, match="impl='cuda' is unknown: choose 'reference' or 'triton'"):
        linear_add_rms_norm(*arguments, jnp.zeros((16,), jnp.int32), eps=EPS, impl="cuda")

"""The kernels beside attention: each against its reference, at the shapes of real models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm, rms_norm
from pallas_kernels.linear import linear, linear_parts, tuning


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def close(found: jax.Array, expected: jax.Array, tolerance: float) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("num_parts", "num_tokens", "size"), [(1, 1, 896), (1, 37, 4096), (4, 3, 576)]
)
def test_add_rms_norm(by_triton, dtype, num_parts, num_tokens, size):
    x = normal(0, (num_tokens, size), dtype)
    delta = normal(1, (num_parts, num_tokens, size), dtype if num_parts == 1 else "float32")
    weight = 1 + 0.1 * normal(2, (size,), dtype)
    ours = by_triton(add_rms_norm, eps=1e-6)(x, delta, weight)
    wide = [a.astype(jnp.float32) for a in (x, delta, weight)]
    theirs = add_rms_norm(*wide, eps=1e-6, impl="reference")
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == dtype
        close(found, expected, 5e-3 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 896), (37, 4096), (3, 576)])
def test_rms_norm(by_triton, dtype, num_tokens, size):
    x = 1e-3 * normal(0, (num_tokens, size), dtype)  # of eps' size when it is squared
    weight = 1 + 0.1 * normal(2, (size,), dtype)
    found = by_triton(rms_norm, eps=1e-6)(x, weight)
    expected = rms_norm(*(a.astype(jnp.float32) for a in (x, weight)), eps=1e-6, impl="reference")
    assert found.dtype == dtype
    close(found, expected, 5e-3 if dtype == "bfloat16" else 1e-6)


LINEAR_SHAPES = [(1, 96, 896), (5, 64, 384), (16, 50, 192), (33, 32, 130), (64, 32, 256)]


@pytest.mark.parametrize(("gated", "out_dtype"), [(False, "float32"), (False, None), (True, None)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), LINEAR_SHAPES)
def test_linear(by_triton, dtype, num_tokens, out_size, in_size, gated, out_dtype):
    x, weight = normal(0, (num_tokens, in_size), dtype), normal(1, (out_size, in_size))
    # As large as trained ones: so gates are neither open nor shut.
    weight = (weight * in_size**-0.5).astype(dtype)
    found = by_triton(linear, gated=gated, out_dtype=out_dtype)(x, weight)
    wide = [a.astype(jnp.float32) for a in (x, weight)]
    assert found.dtype == (out_dtype or dtype)
    close(
        found,
        linear(*wide, gated=gated, impl="reference"),
        5e-3 if found.dtype == "bfloat16" else 1e-5,
    )


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "out_size", "in_size"), LINEAR_SHAPES)
def test_linear_parts(by_triton, monkeypatch, dtype, num_tokens, out_size, in_size, splits):
    tiling = tuning.Tiling(16, 32, 4, 3, splits)
    monkeypatch.setattr(tuning, "choose", lambda *_: tiling)
    x, weight = normal(0, (num_tokens, in_size), dtype), normal(1, (out_size, in_size), dtype)
    parts = by_triton(linear_parts)(x, weight)
    assert parts.shape == (splits, num_tokens, out_size)
    assert parts.dtype == (dtype if splits == 1 else "float32")
    wide = [a.astype(jnp.float32) for a in (x, weight)]
    found = jnp.sum(parts.astype(jnp.float32), axis=0)
    expected = linear(*wide, impl="reference")
    close(found, expected, 5e-3 if parts.dtype == "bfloat16" else 1e-5)


def test_the_reference_makes_one_part():
    x, weight = normal(0, (5, 48)), normal(1, (32, 48))
    (part,) = linear_parts(x, weight, impl="reference")
    close(part, linear(x, weight, impl="reference"), 0.0)


def test_many_tokens_are_left_to_xla():
    for num_tokens in (tuning.MAX_TOKENS, tuning.MAX_TOKENS + 1):
        shape = tuning.Shape("plain", num_tokens, 32, 32, "bfloat16")
        ours = tuning.choose("none", shape)
        assert (ours is None) == (num_tokens > tuning.MAX_TOKENS)


def test_the_nearest_known_shape_decides(monkeypatch):
    def entry(out_size, tile_out, **changes):
        tiling = {"tile_out": tile_out, "tile_in": 64, "num_warps": 4, "num_stages": 3}
        known = {"compute_capability": "9.0", "tile_tokens": 32, "kind": "plain"}
        return known | {"out_size": out_size, "in_size": 100, "tiling": tiling} | changes

    entries = [
        entry(100, 16),
        entry(1000, 32),
        entry(1000, 64, kind="gated"),
        entry(1000, 99, compute_capability="8.0"),
        entry(9000, 0, tiling=None),
        entry(1000, 128, tile_tokens=64),
        entry(9000, 256, tile_tokens=1),
    ]
    monkeypatch.setattr(tuning, "_table", lambda: entries)

    def tile_out(capability, kind, *sizes):
        choice = tuning.choose(capability, tuning.Shape(kind, *sizes, "bfloat16"))
        return choice and choice.tile_out

    assert tile_out("9.0", "plain", 32, 200, 100) == 16
    assert tile_out("9.0", "plain", 16, 900, 110) == 32  # of more tokens, but not of one
    assert tile_out("9.0", "gated", 16, 100, 100) == 64
    assert tile_out("9.0", "plain", 17, 7000, 100) is None
    assert tile_out("9.0", "plain", 64, 100, 100) == 128
    assert tile_out("9.0", "plain", 1, 100, 100) == 256
    assert tile_out("9.0", "gated", 1, 100, 100) == tuning.DEFAULT.tile_out
    assert tile_out("8.6", "plain", 3, 200, 100) == tuning.DEFAULT.tile_out


def test_unknown_implementations_are_refused():
    x = normal(0, (2, 8))
    with pytest.raises(ValueError, match="impl='cuda' is unknown: choose 'reference' or 'triton'"):
        add_rms_norm(x, x[None], x[0], eps=1e-6, impl="cuda")

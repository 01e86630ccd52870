"""The kernels beside attention: each against its reference, at the shapes of real models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.qkv_rope import qkv_rope


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def close(found: jax.Array, expected: jax.Array, tolerance: float) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 896), (37, 4096), (3, 576)])
def test_add_rms_norm(by_triton, dtype, num_tokens, size):
    x, delta = normal(0, (num_tokens, size), dtype), normal(1, (num_tokens, size), dtype)
    weight = 1 + 0.1 * normal(2, (size,), dtype)
    ours = by_triton(add_rms_norm, eps=1e-6)(x, delta, weight)
    wide = [a.astype(jnp.float32) for a in (x, delta, weight)]
    theirs = add_rms_norm(*wide, eps=1e-6, impl="reference")
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == dtype
        close(found, expected, 5e-3 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim", "has_bias", "has_norms"),
    [
        (2, 7, 64, True, False),
        (8, 4, 128, False, False),
        (8, 2, 128, False, True),
        (3, 1, 96, True, True),
    ],
)
def test_qkv_rope(by_triton, dtype, num_kv_heads, group, head_dim, has_bias, has_norms):
    num_tokens, heads = 19, (num_kv_heads, group + 2, head_dim)
    arrays = [
        normal(0, (num_tokens, *heads), dtype),
        normal(1, heads, dtype) if has_bias else None,
        1 + normal(2, (head_dim,), dtype) if has_norms else None,
        1 + normal(3, (head_dim,), dtype) if has_norms else None,
    ]
    angles = normal(4, (num_tokens, head_dim // 2))
    turn = (jnp.cos(angles), jnp.sin(angles))
    ours = by_triton(qkv_rope, eps=1e-6)(*arrays, *turn)
    wide = [None if a is None else a.astype(jnp.float32) for a in arrays]
    theirs = qkv_rope(*wide, *turn, eps=1e-6, impl="reference")
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == dtype
        close(found, expected, 5e-3 if dtype == "bfloat16" else 1e-6)


def test_unknown_implementations_are_refused():
    x = normal(0, (2, 8))
    with pytest.raises(ValueError, match="impl='cuda' is unknown: choose 'reference' or 'triton'"):
        add_rms_norm(x, x, x[0], eps=1e-6, impl="cuda")
    with pytest.raises(ValueError, match="impl='cuda' is unknown"):
        qkv_rope(x[:, None, None], None, None, None, x, x, eps=1e-6, impl="cuda")

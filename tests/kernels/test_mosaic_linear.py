"""The gated product of many tokens by Mosaic GPU: on a GPU of compute capability 9.0, and at small
sizes in Pallas' interpreter."""

import dataclasses
import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import linear, mosaic_gated, tuning
from pallas_kernels.linear.tuning import MosaicTiling

TILINGS = {
    "wide": MosaicTiling(128, 128, num_stages=4, band=8, cluster=1),
    "wide, shared": MosaicTiling(128, 128, num_stages=4, band=3, cluster=2),
    "tall": MosaicTiling(256, 64, num_stages=4, band=2, cluster=1),
    "tall, shared": MosaicTiling(256, 64, num_stages=3, band=4, cluster=2),
    "small, shared": MosaicTiling(128, 64, num_stages=6, band=16, cluster=2),
}
SHARED_MEMORY = 227 * 1024
"""Of one block of threads, in bytes."""


def arguments(num_tokens: int, out_size: int, in_size: int) -> tuple[jax.Array, jax.Array]:
    x_key, weight_key = jax.random.split(jax.random.key(num_tokens))
    x = jax.random.normal(x_key, (num_tokens, in_size), jnp.bfloat16)
    # As large as trained ones: so gates are neither open nor shut.
    weight = jax.random.normal(weight_key, (2 * out_size, in_size)) * in_size**-0.5
    return x, weight.astype(jnp.bfloat16)


def check(found: jax.Array, x: jax.Array, weight: jax.Array) -> None:
    """Each token's outputs and each output's tokens are right."""
    expected = linear(*(a.astype(jnp.float32) for a in (x, weight)), gated=True, impl="reference")
    assert found.dtype == jnp.bfloat16
    assert found.shape == expected.shape
    assert jnp.isfinite(found).all()
    for axis in range(2):
        error = jnp.linalg.norm(found.astype(jnp.float32) - expected, axis=axis)
        wrong = np.flatnonzero(error > 5e-3 * jnp.linalg.norm(expected, axis=axis))
        assert not len(wrong), f"along axis {axis}: {wrong[:8].tolist()} and others are wrong"


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(mosaic_gated, "_NUM_BLOCKS", 4)
    with plgpu.force_gpu_interpret_mode():
        yield


@pytest.fixture
def hopper():
    capability = jax.devices()[0].compute_capability
    if capability != "9.0":
        pytest.skip(f"needs a GPU of compute capability 9.0, not {capability}")


@pytest.mark.parametrize(
    ("name", "num_tokens", "out_size", "in_size"),
    [
        ("wide", 200, 384, 320),  # a queue that is not full at the end of a tile
        ("wide, shared", 904, 256, 128),  # bands of 3 rows and of 1; a block without tokens
        ("tall", 648, 192, 64),  # a single step a tile
        ("small, shared", 136, 64, 448),
    ],
)
def test_interpreted(interpreted, name, num_tokens, out_size, in_size):
    x, weight = arguments(num_tokens, out_size, in_size)
    check(mosaic_gated.gated_linear(x, weight, tiling=TILINGS[name]), x, weight)


def test_linear_takes_it_where_chosen(interpreted, monkeypatch):
    monkeypatch.setattr(tuning, "choose", lambda *_: TILINGS["wide"])
    x, weight = arguments(136, 128, 64)
    found = linear(x, weight, gated=True, impl="triton")
    check(found, x, weight)
    ours = mosaic_gated.gated_linear(x, weight, tiling=TILINGS["wide"])
    np.testing.assert_array_equal(found, ours)
    # The kernel writes bfloat16 only.
    wide = linear(x, weight, gated=True, out_dtype="float32", impl="triton")
    assert wide.dtype == "float32"


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize(
    ("num_tokens", "out_size", "in_size"),
    [
        (2000, 4864, 896),
        (1032, 14336, 4096),
        (4056, 1792, 4096),  # a shard's rows
        (64, 128, 64),  # less than a tile, in one step
    ],
)
def test_on_hopper(hopper, name, num_tokens, out_size, in_size):
    x, weight = arguments(num_tokens, out_size, in_size)
    check(mosaic_gated.gated_linear(x, weight, tiling=TILINGS[name]), x, weight)


@pytest.mark.gpu
def test_the_model_gets_it_on_hopper(hopper):
    x, weight = arguments(8192, 14336, 4096)
    product = jax.jit(lambda *arrays: linear(*arrays, gated=True, impl="triton"))
    shape = tuning.Shape("gated", len(x), *weight.shape, "bfloat16")
    chosen = tuning.choose("9.0", shape)
    assert ("gated_product" in product.lower(x, weight).as_text()) == (chosen is not None)
    check(product(x, weight), x, weight)


@pytest.mark.parametrize(
    "plant",
    [
        lambda found, out: jnp.roll(found, 1, axis=0),
        lambda found, out: jnp.roll(found, 64, axis=1),
        lambda found, out: found.at[8:16, :64].set(found[:8, :64]),
        lambda found, out: found.at[-1].set(0),
        lambda found, out: out,
    ],
    ids=["token", "tile", "swizzled rows", "last token", "gate and up exchanged"],
)
def test_the_check_sees_a_wrong_layout(plant):
    x, weight = arguments(136, 128, 64)
    exchanged = jnp.roll(weight, 128, axis=0)
    found, out = (linear(x, w, gated=True, impl="reference") for w in (weight, exchanged))
    with pytest.raises(AssertionError):
        check(plant(found, out), x, weight)


def test_the_nearest_shape_and_most_tokens_decide(monkeypatch):
    def entry(out_size, min_tokens, band, **changes):
        tiling = band and dataclasses.asdict(MosaicTiling(128, 128, 4, band, 1))
        known = {"compute_capability": "9.0", "kind": "gated", "in_size": 128}
        return known | {"out_size": out_size, "min_tokens": min_tokens, "tiling": tiling} | changes

    entries = [
        entry(1024, 512, 1),
        entry(1024, 2048, 2),
        entry(8192, 4096, 3),
        entry(8192, 1024, None),
        entry(1024, 512, 4, compute_capability="10.0"),
    ]
    monkeypatch.setattr(tuning, "_table", lambda: entries)
    shape = tuning.Shape("gated", 2048, 1024, 128, "bfloat16")

    def band(capability="9.0", **changes):
        choice = tuning.choose(capability, dataclasses.replace(shape, **changes))
        return choice and choice.band

    assert band() == 2
    assert band(num_tokens=2040) == 1
    assert band(num_tokens=504) is None
    assert band(out_size=16384) is None
    assert band(out_size=16384, num_tokens=8192) == 3
    assert band("10.0") == 4
    assert band("8.9") is None
    # What the kernel cannot do.
    assert band(kind="plain") is None
    assert band(dtype="float32") is None
    assert band(num_tokens=2052) is None
    assert band(in_size=160) is None
    assert band(out_size=1152) is None


def test_every_cut_has_room():
    table = json.loads(resources.files("pallas_kernels.linear").joinpath("tuning.json").read_text())
    known = [entry for entry in table["entries"] if "min_tokens" in entry and entry["tiling"]]
    for tiling in (*TILINGS.values(), *(MosaicTiling(**entry["tiling"]) for entry in known)):
        steps = (tiling.tile_tokens + 2 * tiling.tile_out) * tuning.MOSAIC_TILE_IN
        values = tiling.num_stages * steps + tiling.tile_tokens * tiling.tile_out
        assert 2 * values < SHARED_MEMORY
        assert tiling.tile_tokens * tiling.tile_out <= 128 * 128

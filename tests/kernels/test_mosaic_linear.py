"""Products of many tokens by Mosaic GPU: on a GPU of compute capability 9.0, and at small sizes in
Pallas' interpreter."""

import dataclasses
import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear import linear, linear_parts, mosaic_kernel, tuning
from pallas_kernels.linear.tuning import MosaicTiling

SHARED_MEMORY = 227 * 1024
"""Of one block of threads, in bytes."""


def arguments(num_tokens: int, out_size: int, in_size: int) -> tuple[jax.Array, jax.Array]:
    """Sizes as the weight has them."""
    x_key, weight_key = jax.random.split(jax.random.key(num_tokens))
    x = jax.random.normal(x_key, (num_tokens, in_size), jnp.bfloat16)
    # As large as trained ones: so gates are neither open nor shut.
    weight = jax.random.normal(weight_key, (out_size, in_size)) * in_size**-0.5
    return x, weight.astype(jnp.bfloat16)


def check(found: jax.Array, x: jax.Array, weight: jax.Array, *, gated: bool) -> None:
    """Each token's outputs and each output's tokens are right."""
    wide = (a.astype(jnp.float32) for a in (x, weight))
    expected = linear(*wide, gated=gated, impl="reference")
    assert found.shape == expected.shape
    assert jnp.isfinite(found).all()
    tolerance = 5e-3 if found.dtype == jnp.bfloat16 else 1e-4
    for axis in range(2):
        error = jnp.linalg.norm(found.astype(jnp.float32) - expected, axis=axis)
        wrong = np.flatnonzero(error > tolerance * jnp.linalg.norm(expected, axis=axis))
        assert not len(wrong), f"along axis {axis}: {wrong[:8].tolist()} and others are wrong"


def check_kernel(
    kind: tuning.Kind, tiling: MosaicTiling, sizes: tuple[int, int, int], out_dtype: str
) -> None:
    assert tuning.fits_mosaic(tuning.Shape(kind, *sizes, "bfloat16"), tiling)
    x, weight = arguments(*sizes)
    gated = kind == "gated"
    parts = mosaic_kernel.linear(
        x, weight, gated=gated, out_dtype=jnp.dtype(out_dtype), tiling=tiling
    )
    assert parts.shape[0] == tiling.splits
    assert parts.dtype == out_dtype
    check(parts[0] if tiling.splits == 1 else parts.sum(0), x, weight, gated=gated)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(mosaic_kernel, "_NUM_BLOCKS", 4)
    with plgpu.force_gpu_interpret_mode():
        yield


@pytest.fixture
def hopper():
    capability = jax.devices()[0].compute_capability
    if capability != "9.0":
        pytest.skip(f"needs a GPU of compute capability 9.0, not {capability}")


@pytest.mark.parametrize(
    ("kind", "tiling", "sizes", "out_dtype"),
    [
        # A queue that is not full at the end of a tile.
        ("gated", MosaicTiling(128, 128, 4, band=8), (200, 512, 320), "bfloat16"),
        # Bands of 2 rows and of 1; a block without tokens; rows that end in the midst of a tile.
        ("gated", MosaicTiling(128, 112, 4, band=2, cluster=2), (520, 384, 128), "bfloat16"),
        # Blocks that share tokens, and one without rows.
        ("gated", MosaicTiling(128, 112, 3, cluster=2), (128, 640, 128), "bfloat16"),
        # A single step a tile.
        ("plain", MosaicTiling(256, 64, 4, band=2), (648, 192, 64), "float32"),
        # Tiles that leave in several pieces.
        ("plain", MosaicTiling(128, 256, 3), (72, 320, 128), "bfloat16"),
        ("plain", MosaicTiling(128, 112, 4, band=2, cluster=2), (264, 320, 128), "float32"),
        ("parts", MosaicTiling(128, 64, 6, band=16, cluster=2), (136, 128, 448), "bfloat16"),
        ("parts", MosaicTiling(128, 96, 4, cluster=2, splits=2), (264, 320, 256), "float32"),
        ("parts", MosaicTiling(256, 48, 3, cluster=2, splits=4), (256, 192, 512), "float32"),
    ],
)
def test_interpreted(interpreted, kind, tiling, sizes, out_dtype):
    check_kernel(kind, tiling, sizes, out_dtype)


@pytest.mark.parametrize(("num_tokens", "shared"), [(128, {128}), (136, {112})])
def test_a_cluster_shares_what_its_blocks_have_in_common(monkeypatch, num_tokens, shared):
    # The interpreter copies for each block by itself.
    sizes = {True: set(), False: set()}
    copy = plgpu.copy_gmem_to_smem

    def spy(source, target, barrier, **options):
        sizes["collective_axes" in options].add(target.shape[0])
        copy(source, target, barrier, **options)

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", spy)
    x, weight = arguments(num_tokens, 640, 64)
    tiling = MosaicTiling(128, 112, 4, cluster=2)
    options = {"gated": True, "out_dtype": jnp.dtype("bfloat16"), "tiling": tiling}
    jax.make_jaxpr(lambda *arrays: mosaic_kernel.linear(*arrays, **options))(x, weight)
    assert sizes == {True: shared, False: {112, 128} - shared}


@pytest.mark.parametrize(("gated", "out_dtype"), [(False, "float32"), (True, "bfloat16")])
def test_linear_takes_it_where_chosen(interpreted, monkeypatch, gated, out_dtype):
    tiling = MosaicTiling(128, 64, 4)
    monkeypatch.setattr(tuning, "choose", lambda *_: tiling)
    x, weight = arguments(136, 128, 64)
    found = linear(x, weight, gated=gated, out_dtype=out_dtype, impl="mosaic")
    check(found, x, weight, gated=gated)
    by_xla = linear(x, weight, gated=gated, out_dtype=out_dtype, impl="triton")
    by_reference = linear(x, weight, gated=gated, out_dtype=out_dtype, impl="reference")
    np.testing.assert_array_equal(by_xla, by_reference)
    options = {"gated": gated, "out_dtype": jnp.dtype(out_dtype), "tiling": tiling}
    np.testing.assert_array_equal(found, mosaic_kernel.linear(x, weight, **options)[0])


@pytest.mark.parametrize(("splits", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_linear_parts_takes_it_where_chosen(interpreted, monkeypatch, splits, dtype):
    monkeypatch.setattr(tuning, "choose", lambda *_: MosaicTiling(128, 64, 4, splits=splits))
    x, weight = arguments(136, 128, 128)
    parts = linear_parts(x, weight, impl="mosaic")
    assert parts.shape == (splits, 136, 128)
    assert parts.dtype == dtype
    check(parts.sum(0), x, weight, gated=False)
    if splits > 1:
        # Each is over its own columns.
        check(parts[0], x[:, :64], weight[:, :64], gated=False)


TABLE = json.loads(resources.files("pallas_kernels.linear").joinpath("tuning.json").read_text())
CHOSEN = [entry for entry in TABLE["entries"] if "min_tokens" in entry and entry["tiling"]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "tiling", "sizes"),
    [
        pytest.param(
            entry["kind"],
            MosaicTiling(**entry["tiling"]),
            # A tile of tokens that is not full.
            (entry["min_tokens"] + 8, entry["out_size"], entry["in_size"]),
            id=f"{entry['kind']}-{entry['min_tokens']}-{entry['out_size']}-{entry['in_size']}",
        )
        for entry in CHOSEN
    ]
    + [
        ("gated", MosaicTiling(128, 48, 6, band=8, cluster=2), (72, 3584, 4096)),
        ("gated", MosaicTiling(256, 64, 3, band=4, cluster=2), (2000, 9728, 896)),
        ("gated", MosaicTiling(128, 128, 4, band=3), (2000, 28672, 4096)),
        ("parts", MosaicTiling(128, 16, 6, band=8, cluster=2, splits=2), (72, 1152, 896)),
        ("parts", MosaicTiling(128, 96, 6, band=8, cluster=2), (128, 6144, 4096)),
        ("parts", MosaicTiling(256, 32, 5, band=8, cluster=2, splits=2), (256, 896, 4864)),
        ("parts", MosaicTiling(128, 192, 4, band=2, splits=2), (2000, 4096, 14336)),
        ("plain", MosaicTiling(128, 112, 6, band=8), (72, 151936, 896)),
        ("plain", MosaicTiling(128, 128, 5, band=8, cluster=2), (2000, 151936, 896)),
    ],
)
def test_on_hopper(hopper, kind, tiling, sizes):
    out_dtype = "float32" if kind == "plain" or tiling.splits > 1 else "bfloat16"
    check_kernel(kind, tiling, sizes, out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [128, 8192])
def test_the_model_gets_it_on_hopper(hopper, num_tokens):
    x, weight = arguments(num_tokens, 28672, 4096)
    product = jax.jit(lambda *arrays: linear(*arrays, gated=True, impl="mosaic"))
    assert "mosaic_linear" in product.lower(x, weight).as_text()
    check(product(x, weight), x, weight, gated=True)


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
    x, weight = arguments(136, 256, 64)
    exchanged = jnp.roll(weight, 128, axis=0)
    found, out = (linear(x, w, gated=True, impl="reference") for w in (weight, exchanged))
    with pytest.raises(AssertionError):
        check(plant(found, out), x, weight, gated=True)


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
    # Far from all.
    assert band(out_size=65536, num_tokens=8192) is None
    assert band(in_size=1024) is None
    assert band("10.0") == 4
    assert band("8.9") is None
    # What the kernel cannot do.
    assert band(dtype="float32") is None
    assert band(num_tokens=2052) is None
    assert band(in_size=160) is None
    assert band(out_size=1088) is None
    # Other kinds have other entries.
    assert band(kind="parts") is None
    entries.append(entry(1024, 512, 5, kind="parts"))
    assert band(kind="parts", out_size=1088) == 5
    entries[-1]["tiling"]["splits"] = 2
    assert band(kind="parts", out_size=1088) == 5
    entries[-1]["tiling"]["splits"] = 4
    assert band(kind="parts", out_size=1088) is None


def test_every_cut_has_room():
    for entry in CHOSEN:
        tiling = MosaicTiling(**entry["tiling"])
        rows = 2 * tiling.tile_out if entry["kind"] == "gated" else tiling.tile_out
        assert tiling.tile_out % 16 == 0
        assert rows <= 256
        assert tiling.tile_tokens * rows <= 128 * 256
        steps = tiling.num_stages * (tiling.tile_tokens + rows) * tuning.MOSAIC_TILE_IN
        itemsize = 4 if entry["kind"] == "plain" or tiling.splits > 1 else 2
        out_bytes = tiling.tile_tokens * tiling.out_columns(itemsize) * itemsize
        assert 2 * steps + out_bytes < SHARED_MEMORY

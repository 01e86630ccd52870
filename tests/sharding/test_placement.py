"""Mesh, rules and placement, by array names alone; the collectives on four CPU devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import (
    TENSOR_AXIS,
    all_gather,
    all_reduce,
    make_mesh,
    partition_spec,
    partition_specs,
    place,
    place_array,
    shard_index,
)


def normal(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def test_mesh_is_of_the_first_devices() -> None:
    mesh = make_mesh(2)
    assert dict(mesh.shape) == {TENSOR_AXIS: 2}
    assert list(mesh.devices) == jax.devices()[:2]
    assert list(make_mesh(1, jax.devices()[3:]).devices) == jax.devices()[3:]


@pytest.mark.parametrize("size", [0, 3])
def test_mesh_names_both_numbers(size: int) -> None:
    with pytest.raises(ValueError, match=f"number of devices, 2, got {size}"):
        make_mesh(size, jax.devices()[:2])


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("embed.weight", P(TENSOR_AXIS)),
        ("head.weight", P(TENSOR_AXIS)),
        ("norm.weight", P()),
        ("layers.12.attn.qkv.weight", P(TENSOR_AXIS)),
        ("layers.12.attn.qkv.bias", P(TENSOR_AXIS)),
        ("layers.0.attn.o.weight", P(None, TENSOR_AXIS)),
        ("layers.0.attn.o.bias", P()),
        ("layers.0.attn.q_norm.weight", P()),
        ("layers.0.attn_norm.weight", P()),
        ("layers.0.mlp.gate_up.weight", P(None, TENSOR_AXIS)),
        ("layers.0.mlp.down.weight", P(None, TENSOR_AXIS)),
    ],
)
def test_rules(path: str, spec: P) -> None:
    assert partition_spec(path) == spec


@pytest.mark.parametrize("path", ["layers.0.moe.weight", "norm.weight.scale", "layers.norm.weight"])
def test_a_path_without_a_rule_is_named(path: str) -> None:
    with pytest.raises(ValueError, match=path):
        partition_spec(path)


def test_specs_keep_the_nesting() -> None:
    arrays = {"embed": {"weight": 1}, "layers": {"0": {"attn": {"o": {"weight": 2}}}}}
    assert partition_specs(arrays) == {
        "embed": {"weight": P(TENSOR_AXIS)},
        "layers": {"0": {"attn": {"o": {"weight": P(None, TENSOR_AXIS)}}}},
    }


def test_each_device_holds_its_slice() -> None:
    host = {"layers": {"0": {"mlp": {"gate_up": {"weight": normal(2, 8, 3)}}}}}
    placed = place(host, make_mesh(4))["layers"]["0"]["mlp"]["gate_up"]["weight"]
    for index, shard in enumerate(placed.addressable_shards):
        expected = host["layers"]["0"]["mlp"]["gate_up"]["weight"][:, 2 * index : 2 * index + 2]
        np.testing.assert_array_equal(shard.data, expected)


def test_an_uneven_split_names_the_array() -> None:
    with pytest.raises(ValueError, match=r"'embed.weight' of shape \(6, 3\).* over 4 devices"):
        place_array("embed.weight", normal(6, 3), make_mesh(4))


def test_collectives() -> None:
    x = normal(4, 3)

    def body(shard: jax.Array):
        return all_reduce(shard), all_gather(shard, axis=1), shard_index().reshape(1)

    total, row, indices = jax.shard_map(
        body,
        mesh=make_mesh(4),
        in_specs=P(TENSOR_AXIS),
        out_specs=(P(), P(), P(TENSOR_AXIS)),
        check_vma=False,
    )(x)
    np.testing.assert_allclose(total, x.sum(0, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(row, x.reshape(1, 12))
    np.testing.assert_array_equal(indices, np.arange(4))

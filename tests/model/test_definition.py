"""Shapes and names of the parameters, their split, and random weights."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.model.config import ARCHITECTURES, ModelConfig
from jaxserve.model.definition import ModelDefinition, init_random
from sharding import make_mesh, map_with_path, partition_spec, shardings

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "attention_bias": True,
    }
)


def define(config: ModelConfig, tensor_parallel_size: int = 1, dtype: str = "float32"):
    return ModelDefinition.create(
        config,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        attention_impl="reference",
    )


def flat(tree: dict) -> dict:
    leaves = {}
    map_with_path(lambda path, leaf: leaves.update({path: leaf}), tree)
    return leaves


def shapes(definition: ModelDefinition) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in flat(definition.abstract_params).items()}


def test_names_and_shapes() -> None:
    layer = {
        "attn_norm.weight": (64,),
        "attn.qkv.weight": (4, 4, 16, 64),
        "attn.qkv.bias": (4, 4, 16),
        "attn.o.weight": (64, 128),
        "attn.o.bias": (64,),
        "mlp_norm.weight": (64,),
        "mlp.gate_up.weight": (2, 96, 64),
        "mlp.down.weight": (64, 96),
    }
    expected = {"embed.weight": (132, 64), "norm.weight": (64,), "head.weight": (132, 64)}
    for index in range(2):
        expected |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    assert shapes(define(CONFIG, tensor_parallel_size=2)) == expected


def test_only_what_the_architecture_has() -> None:
    plain = {"attention_bias": False}
    assert "head.weight" not in shapes(define(replace(CONFIG, tie_word_embeddings=True)))
    qwen2 = shapes(define(replace(CONFIG, architecture="Qwen2ForCausalLM", **plain)))
    assert {name for name in qwen2 if "layers.0" in name and "bias" in name} == {
        "layers.0.attn.qkv.bias"
    }
    qwen3 = shapes(define(replace(CONFIG, architecture="Qwen3ForCausalLM", **plain)))
    assert qwen3["layers.1.attn.q_norm.weight"] == qwen3["layers.1.attn.k_norm.weight"] == (16,)
    assert not any("bias" in name for name in qwen3)


def test_kv_heads_are_repeated_where_devices_outnumber_them() -> None:
    definition = define(CONFIG, tensor_parallel_size=8)
    assert shapes(definition)["layers.0.attn.qkv.weight"] == (8, 3, 16, 64)
    assert definition.kv_cache_shape(num_blocks=10, block_size=8) == (10, 8, 2, 8, 16)
    # One head's K and V of 8 tokens in 2 layers on each device.
    assert definition.kv_block_bytes(block_size=8) == 2 * 1 * 2 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "size", "allowed"),
    [
        ({}, 3, "8 heads, 4 KV heads, intermediate size 96.*allowed: 1, 2, 4, 8$"),
        ({}, 16, "allowed: 1, 2, 4, 8$"),
        ({"intermediate_size": 98}, 4, "allowed: 1, 2$"),
        ({"num_heads": 9, "num_kv_heads": 3}, 9, "allowed: 1, 3$"),
    ],
)
def test_refuses_sizes_that_do_not_divide(changes: dict, size: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        define(replace(CONFIG, **changes), tensor_parallel_size=size)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_has_a_rule_and_splits_evenly(architecture: str) -> None:
    definition = define(replace(CONFIG, architecture=architecture), tensor_parallel_size=4)
    mesh = make_mesh(4)
    for path, leaf in flat(definition.abstract_params).items():
        sharding = jax.sharding.NamedSharding(mesh, partition_spec(path))
        whole = leaf.size if sharding.is_fully_replicated else leaf.size / 4
        assert np.prod(sharding.shard_shape(leaf.shape)) == whole, path
        assert sharding.is_fully_replicated == ("norm" in path or path.endswith("o.bias")), path


def test_kv_caches_are_split_by_heads() -> None:
    definition = define(CONFIG, tensor_parallel_size=2, dtype="bfloat16")
    caches = definition.init_kv_caches(num_blocks=5, block_size=8, mesh=make_mesh(2))
    assert len(caches) == 2
    assert caches[0].shape == (5, 4, 2, 8, 16)
    on_device = sum(cache.addressable_shards[0].data.nbytes for cache in caches)
    assert on_device == 5 * definition.kv_block_bytes(block_size=8)


def random_params(config: ModelConfig, size: int, seed: int = 0, dtype: str = "float32") -> dict:
    definition = define(config, size, dtype)
    placed = shardings(definition.abstract_params, make_mesh(size))
    return init_random(definition.abstract_params, seed, placed)


def test_random_weights_do_not_depend_on_the_devices() -> None:
    whole, split = (flat(random_params(CONFIG, size)) for size in (1, 4))
    for path, array in whole.items():
        assert len(split[path].sharding.device_set) == 4
        np.testing.assert_array_equal(array, split[path][: len(array)], err_msg=path)


def test_random_weights_differ_by_seed_and_name() -> None:
    one, other = (flat(random_params(CONFIG, 1, seed)) for seed in (0, 2**64 - 1))
    assert not any(np.array_equal(one[path], other[path]) for path in one)
    layers = [one[f"layers.{index}.mlp.down.weight"] for index in range(2)]
    assert not np.array_equal(*layers)


def test_random_weights_have_sane_scale() -> None:
    for path, array in flat(random_params(CONFIG, 1, dtype="bfloat16")).items():
        assert array.dtype == "bfloat16"
        values = np.asarray(array, np.float32)
        mean, std = (1, 0.1) if "norm" in path else (0, array.shape[-1] ** -0.5)
        std = 0.1 if path.endswith("bias") else std
        assert abs(values.mean() - mean) < 5 * std / values.size**0.5, path
        assert 0.6 < values.std() / std < 1.4, path


def test_definitions_of_one_model_are_equal() -> None:
    assert define(CONFIG) == define(CONFIG)
    assert hash(define(CONFIG)) == hash(define(CONFIG))
    assert define(CONFIG) != define(CONFIG, tensor_parallel_size=2)

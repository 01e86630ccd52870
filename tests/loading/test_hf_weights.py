"""Safetensors become the engine's arrays: right values, right devices, little memory."""

import gc
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model.definition import ModelDefinition
from jaxserve.model.errors import ModelError
from jaxserve.model.hf_weights import load_params
from jaxserve.model.loader import load_model_params, read_config
from sharding import make_mesh, shardings

N, K, H = 4, 2, 16


def load(folder, *, tp=1, dtype="float32", load_format="auto"):
    definition = ModelDefinition.create(
        read_config(folder), tensor_parallel_size=tp, dtype=dtype, attention_impl="reference"
    )
    params = load_model_params(folder, definition, make_mesh(tp), load_format, seed=0)
    return definition, params


def flatten(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name in tree for k, v in flatten(tree[name], f"{prefix}.{name}").items()}


def qkv_by_hand(weights, layer, kind, tp):
    """Head by head: of each KV head (repeated over the devices) its query heads, K, V."""
    prefix = f"model.layers.{layer}.self_attn"
    q, k, v = (weights[f"{prefix}.{name}_proj.{kind}"] for name in "qkv")

    def head(tensor, index):
        return tensor[index * H : (index + 1) * H]

    copies = max(1, tp // K)
    rows = []
    next_query = 0
    for kv_head in range(K):
        for _ in range(copies):
            group = []
            for _ in range(N // (K * copies)):
                group.append(head(q, next_query))
                next_query += 1
            rows.append([*group, head(k, kv_head), head(v, kv_head)])
    return np.array(rows)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_every_parameter_is_the_checkpoints(architecture, tp, tmp_path, write_hf):
    weights = write_hf(tmp_path, architecture)
    definition, params = load(tmp_path, tp=tp)
    seen = set()
    for layer in range(2):
        found = params["layers"][str(layer)]
        prefix = f"model.layers.{layer}."

        def same(array, name, prefix=prefix, seen=seen):
            np.testing.assert_array_equal(array, weights[prefix + name])
            seen.add(prefix + name)

        for kind, array in found["attn"]["qkv"].items():
            np.testing.assert_array_equal(array, qkv_by_hand(weights, layer, kind, tp))
            seen |= {f"{prefix}self_attn.{name}_proj.{kind}" for name in "qkv"}
        same(found["attn"]["o"]["weight"], "self_attn.o_proj.weight")
        same(found["attn_norm"]["weight"], "input_layernorm.weight")
        same(found["mlp_norm"]["weight"], "post_attention_layernorm.weight")
        same(found["mlp"]["gate_up"]["weight"][0], "mlp.gate_proj.weight")
        same(found["mlp"]["gate_up"]["weight"][1], "mlp.up_proj.weight")
        same(found["mlp"]["down"]["weight"], "mlp.down_proj.weight")
        if "q_norm" in found["attn"]:
            same(found["attn"]["q_norm"]["weight"], "self_attn.q_norm.weight")
            same(found["attn"]["k_norm"]["weight"], "self_attn.k_norm.weight")
    for path, name in (("embed", "model.embed_tokens"), ("head", "lm_head")):
        array = np.asarray(params[path]["weight"])
        np.testing.assert_array_equal(array[:97], weights[f"{name}.weight"])
        assert array.shape[0] == -(-97 // tp) * tp
        assert not array[97:].any()
        seen.add(f"{name}.weight")
    np.testing.assert_array_equal(params["norm"]["weight"], weights["model.norm.weight"])
    assert seen | {"model.norm.weight"} == weights.keys()
    expected = shardings(definition.abstract_params, make_mesh(tp))
    for path, array in flatten(params).items():
        assert array.sharding == flatten(expected)[path], path


def test_more_shards_than_files_load_alike(tmp_path, write_hf):
    write_hf(tmp_path / "one")
    write_hf(tmp_path / "three", num_shards=3)
    (_, one), (_, three) = load(tmp_path / "one"), load(tmp_path / "three")
    jax.tree.map(np.testing.assert_array_equal, one, three)


@pytest.mark.parametrize("stored", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cast_to_the_target_dtype(stored, dtype, tmp_path, write_hf):
    weights = write_hf(tmp_path, dtype=stored)
    _, params = load(tmp_path, dtype=dtype)
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    expected = weights["model.layers.1.mlp.down_proj.weight"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(params["layers"]["1"]["mlp"]["down"]["weight"], expected)


def test_known_leftovers_are_ignored(tmp_path, write_hf):
    def change(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    write_hf(tmp_path, tied=True, change=change)
    _, params = load(tmp_path)
    assert "head" not in params


def test_wrong_tensors_are_all_named(tmp_path, write_hf):
    def change(weights):
        del weights["model.layers.0.mlp.up_proj.weight"]
        del weights["lm_head.weight"]
        weights["model.norm.weight"] = np.ones(63, np.float32)
        weights["model.layers.1.self_attn.k_proj.weight"] = np.ones((64, 64), np.float32)
        weights["model.layers.2.mlp.up_proj.weight"] = np.ones(3, np.float32)
        weights["model.layers.1.mlp.down_proj.weight"] = np.ones((64, 96), np.int8)

    write_hf(tmp_path, change=change)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    for expected in (
        "model.layers.0.mlp.up_proj.weight is missing",
        "lm_head.weight is missing",
        "model.norm.weight has shape (63,), the model's config makes it (64,)",
        "model.layers.1.self_attn.k_proj.weight has shape (64, 64)",
        "model.layers.2.mlp.up_proj.weight is not a tensor of this model",
        "model.layers.1.mlp.down_proj.weight has type I8",
    ):
        assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_long_list_of_problems_is_cut(tmp_path, write_hf):
    def change(weights):
        weights |= {f"extra.{i}": np.ones(1, np.float32) for i in range(25)}

    write_hf(tmp_path, change=change)
    with pytest.raises(ModelError, match="and 15 more"):
        load(tmp_path)


def test_truncated_and_missing_files_are_named(tmp_path, write_hf):
    write_hf(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 7, 500, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors is cut short or no safetensors"):
            load(tmp_path / "m")
    file.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.ind"):
        load(tmp_path / "m")


def test_a_missing_part_and_a_damaged_index_are_named(tmp_path, write_hf):
    write_hf(tmp_path, num_shards=2)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors is missing"):
        load(tmp_path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
            load(tmp_path)


def test_bad_configs_are_named(tmp_path, write_hf):
    write_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for content, message in (
        ("{", "is no JSON"),
        (json.dumps({**config, "architectures": ["OddForCausalLM"]}), "OddForCausalLM"),
        (json.dumps({**config, "hidden_act": "gelu"}), "hidden_act"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=message) as error:
            read_config(tmp_path)
        assert str(tmp_path / "config.json") in str(error.value)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_end_tokens_of_both_configs_count(tmp_path, write_hf):
    write_hf(tmp_path)
    assert read_config(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert read_config(tmp_path).eos_token_ids == (3, 5)


def test_dummy_weights_need_no_weights(tmp_path, write_hf):
    write_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    definition, params = load(tmp_path, load_format="dummy")
    shapes = jax.tree.map(lambda array: array.shape, params)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, definition.abstract_params)


def test_host_memory_is_the_model_and_one_parameter(tmp_path, write_hf):
    write_hf(tmp_path, num_layers=24, mlp_size=2048, tied=True)
    definition = ModelDefinition.create(
        read_config(tmp_path), tensor_parallel_size=1, dtype="float32", attention_impl="reference"
    )
    sizes = [leaf.size * 4 for leaf in jax.tree.leaves(definition.abstract_params)]
    model_bytes, largest_bytes = sum(sizes), max(sizes)
    assert model_bytes > 20 * largest_bytes
    mesh = make_mesh(1)

    def peak_bytes():
        gc.collect()
        tracemalloc.start()
        params = load_params(tmp_path, definition, mesh)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del params
        return peak

    # One parameter is there twice while it is fused: as the checkpoint's tensors and as itself.
    slack = 2 * largest_bytes + 2**20
    assert peak_bytes() < model_bytes + slack

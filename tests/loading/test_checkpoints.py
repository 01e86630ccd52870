"""Checkpoints in the engine's own layout, as `jaxserve convert` writes them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.model import checkpoint as checkpoint_module
from jaxserve.model import hf_weights
from jaxserve.model.definition import ModelDefinition
from jaxserve.model.errors import ModelError
from jaxserve.model.loader import convert, load_model_params, read_config
from jaxserve.model.resolve import resolve_model
from sharding import make_mesh, shardings


def load(folder, *, tp=1, dtype="float32"):
    definition = ModelDefinition.create(
        read_config(folder), tensor_parallel_size=tp, dtype=dtype, attention_impl="reference"
    )
    return load_model_params(folder, definition, make_mesh(tp), "auto", seed=0)


@pytest.fixture
def model(tmp_path, write_hf):
    folder = tmp_path / "model"
    write_hf(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_checkpoint_restores_what_the_folder_loads(tp, tmp_path, model):
    convert(str(model), tmp_path / "out", tensor_parallel_size=tp)
    found, expected = load(tmp_path / "out", tp=tp), load(model, tp=tp)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda a: a.sharding, found) == shardings(expected, make_mesh(tp))


def test_a_checkpoint_is_self_contained(tmp_path, model):
    convert(str(model), tmp_path / "out")
    shutil.rmtree(model)
    out = resolve_model(str(tmp_path / "out"))
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "jaxserve_checkpoint.json",
        "params",
    }
    load(out)


def test_restoring_fuses_nothing(tmp_path, model, monkeypatch):
    convert(str(model), tmp_path / "out", tensor_parallel_size=2)
    monkeypatch.setattr(hf_weights, "_fuse_qkv", None)
    monkeypatch.setattr(hf_weights, "place_array", None)
    load(tmp_path / "out", tp=2)


@pytest.mark.parametrize(
    ("stored", "asked", "written"),
    [
        (np.float32, "auto", "float32"),
        (np.float16, "auto", "bfloat16"),
        (jnp.bfloat16, "auto", "bfloat16"),
        (np.float32, "bfloat16", "bfloat16"),
    ],
)
def test_dtype_of_a_checkpoint(stored, asked, written, tmp_path, write_hf):
    write_hf(tmp_path / "model", dtype=stored)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["dtype"] = jnp.dtype(stored).name
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    convert(str(tmp_path / "model"), tmp_path / "out", dtype=asked)
    marker = json.loads((tmp_path / "out" / "jaxserve_checkpoint.json").read_text())
    assert marker["dtype"] == written
    for dtype in ("float32", "bfloat16"):
        params = load(tmp_path / "out", dtype=dtype)
        assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        expected = jax.tree.map(
            lambda array: array.astype(written).astype(dtype),  # noqa: B023
            load(tmp_path / "model", dtype="float32"),
        )
        jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(("converted", "loaded", "needs"), [(1, 4, 4), (4, 1, 2), (2, 4, 4)])
def test_another_layout_names_the_size_to_convert_with(converted, loaded, needs, tmp_path, model):
    convert(str(model), tmp_path / "out", tensor_parallel_size=converted)
    with pytest.raises(ModelError) as error:
        load(tmp_path / "out", tp=loaded)
    assert f"size {loaded} needs {needs} KV heads" in str(error.value)
    assert f"convert the model with --tensor-parallel-size {loaded}" in str(error.value)
    assert "\n" not in str(error.value)


def test_sizes_of_one_layout_share_a_checkpoint(tmp_path, write_hf):
    """With a vocabulary that both divide, sizes up to the number of KV heads lay out alike."""

    def change(weights):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:96].copy()

    write_hf(tmp_path / "model", change=change)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 96}))
    convert(str(tmp_path / "model"), tmp_path / "out", tensor_parallel_size=2)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out"), load(tmp_path / "model"))


def test_an_existing_target_is_refused_and_untouched(tmp_path, model):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(ModelError, match="out exists already"):
        convert(str(model), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_failing_conversion_leaves_nothing(tmp_path, model, monkeypatch):
    class Failing:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def save(self, path, params):
            path.mkdir()
            (path / "half").write_text("half")
            raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_module.ocp, "StandardCheckpointer", Failing)
    with pytest.raises(OSError, match="no space left"):
        convert(str(model), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_damaged_checkpoints_are_named(tmp_path, model):
    out = tmp_path / "out"
    convert(str(model), out)
    marker = (out / "jaxserve_checkpoint.json").read_text()
    (out / "jaxserve_checkpoint.json").write_text(marker.replace('"format": 1', '"format": 99'))
    with pytest.raises(ModelError, match="format 99; supported is 1"):
        load(out)
    (out / "jaxserve_checkpoint.json").write_text("{")
    with pytest.raises(ModelError, match=r"jaxserve_checkpoint\.json is no JSON"):
        load(out)
    (out / "jaxserve_checkpoint.json").write_text(marker)
    largest = max((out / "params").rglob("*"), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-1])
    with pytest.raises(ModelError) as error:
        load(out)
    found = f"{largest} should have {len(whole)} bytes, it has {len(whole) - 1}"
    assert str(error.value) == found
    largest.unlink()
    with pytest.raises(ModelError, match="it is missing"):
        load(out)


def test_what_orbax_refuses_is_one_line(tmp_path, model, monkeypatch):
    convert(str(model), tmp_path / "out")

    def restore(self, path, abstract):
        raise ValueError("checksum\nmismatch")

    monkeypatch.setattr(checkpoint_module.ocp.StandardCheckpointer, "restore", restore)
    with pytest.raises(ModelError, match="out cannot be restored: checksum mismatch"):
        load(tmp_path / "out")

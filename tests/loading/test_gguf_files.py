"""GGUF files become Hugging Face folders with the same weights, or one clear error."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from safetensors.numpy import load_file

from jaxserve.model import gguf as gguf_module
from jaxserve.model.errors import ModelError
from jaxserve.model.folders import make_folder
from jaxserve.model.gguf import convert_gguf
from jaxserve.model.loader import read_config
from jaxserve.model.rope import LinearScaling, Llama3Scaling


@pytest.fixture
def convert(tmp_path):
    def convert(path: Path) -> Path:
        return make_folder(tmp_path / "made" / "model", lambda folder: convert_gguf(path, folder))

    return convert


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("qtype", [QType.Q4_1, QType.Q8_0, QType.F16, QType.BF16, QType.F32])
def test_weights_are_those_before_llama_cpp(architecture, qtype, tmp_path, write_gguf, convert):
    expected = write_gguf(tmp_path / "m.gguf", architecture, qtype=qtype)
    found = load_file(convert(tmp_path / "m.gguf") / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_config(tied, tmp_path, write_gguf, convert):
    write_gguf(tmp_path / "m.gguf", "qwen3", tied=tied)
    config = read_config(convert(tmp_path / "m.gguf"))
    assert config.architecture == "Qwen3ForCausalLM"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope_theta == 50000.0
    assert config.max_position_embeddings == 512
    assert config.tie_word_embeddings is tied
    assert len(config.eos_token_ids) == 1


def test_linear_scaling(tmp_path, write_gguf, convert):
    write_gguf(
        tmp_path / "m.gguf", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    )
    assert read_config(convert(tmp_path / "m.gguf")).rope_scaling == LinearScaling(4.0)


def test_yarn_scaling(tmp_path, write_gguf, convert):
    scaling = {"type": "yarn", "factor": 8.0, "original_context_length": 64}
    metadata = {f"rope.scaling.{name}": value for name, value in scaling.items()}
    write_gguf(tmp_path / "m.gguf", "qwen2", metadata=metadata)
    found = read_config(convert(tmp_path / "m.gguf")).rope_scaling
    assert (found.factor, found.original_max_position_embeddings) == (8.0, 64)


def llama3_factors(factor: float, high: float = 4.0) -> np.ndarray:
    """As llama.cpp's converter writes them, for head_dim 16 and theta 50000."""
    factors = []
    for i in range(0, 16, 2):
        wavelen = 2 * np.pi * 50000.0 ** (i / 16)
        if wavelen < 8192 / high:
            factors.append(1.0)
        elif wavelen > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelen - 1.0) / (high - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_recovered(tmp_path, write_gguf, convert):
    write_gguf(tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": llama3_factors(32.0)})
    scaling = read_config(convert(tmp_path / "m.gguf")).rope_scaling
    assert scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


def test_other_rope_factors_are_refused(tmp_path, write_gguf, convert):
    factors = llama3_factors(32.0, high=8.0)
    write_gguf(tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match="not Llama 3's rope scaling"):
        convert(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma3"}, "'gemma3' is not supported; supported are llama, qwen2"),
        ({"metadata": {"expert_count": 8}}, "not supported: llama.expert_count"),
        ({"metadata": {"rope.dimension_count": 8}}, "rope.dimension_count"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
        ({"extra_tensors": {"blk.0.odd.weight": np.ones(4, np.float32)}}, "blk.0.odd.weight"),
    ],
)
def test_what_is_not_supported_is_named(options, message, tmp_path, write_gguf, convert):
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ModelError, match=message) as error:
        convert(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(error.value)
    assert list((tmp_path / "made").iterdir()) == []


def test_large_models_are_written_in_parts(tmp_path, write_gguf, convert, monkeypatch):
    monkeypatch.setattr(gguf_module, "_MAX_SHARD_BYTES", 80_000)
    expected = write_gguf(tmp_path / "m.gguf")
    folder = convert(tmp_path / "m.gguf")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == expected.keys()
    files = set(weight_map.values())
    assert len(files) > 2
    assert {path.name for path in folder.glob("*.safetensors")} == files
    for name, file in weight_map.items():
        np.testing.assert_array_equal(load_file(folder / file)[name], expected[name])
    assert all(sum(w.nbytes for w in load_file(folder / file).values()) <= 80_000 for file in files)


def test_a_file_cut_short_anywhere_is_refused(tmp_path, write_gguf, convert):
    write_gguf(tmp_path / "whole.gguf", qtype=QType.Q8_0)
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    offsets = [0, 1, 3, 4, 7, 12, 23, 24, 30, 100, 1000, 5000, *range(7000, len(whole), 9973)]
    for offset in [*offsets, len(whole) - 40]:
        cut.write_bytes(whole[:offset])
        with pytest.raises(ModelError, match=r"cut\.gguf is not a whole GGUF file") as error:
            convert(cut)
        assert "\n" not in str(error.value)
        assert list((tmp_path / "made").iterdir()) == []


def test_damaged_bytes_give_an_error_or_a_folder(tmp_path, write_gguf, convert):
    """Whatever single byte of the header is wrong, nothing but ModelError comes out."""
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(3)
    refused = 0
    for offset in (*range(24), *rng.integers(24, 16_000, 60)):
        content = bytearray(whole)
        content[offset] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(content)
        target = tmp_path / "made" / f"at-{offset}"
        try:
            make_folder(target, lambda folder: convert_gguf(damaged, folder))
        except ModelError:
            refused += 1
            assert not target.exists()
    assert refused >= 24

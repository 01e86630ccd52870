"""config.json of each kind, and every option that must be refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.model.config import ARCHITECTURES, ModelConfig
from jaxserve.model.registry import MODEL_CLASSES
from jaxserve.model.rope import LinearScaling, Llama3Scaling, YarnScaling, inverse_frequencies

ROPES = json.loads((Path(__file__).parent / "goldens" / "rope.json").read_text())
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def read(**changes) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_defaults() -> None:
    config = read()
    assert config.head_dim == 32
    assert config.rope_theta == 10_000
    assert config.rope_scaling is None
    assert config.sliding_windows == (None, None, None)
    assert config.eos_token_ids == ()
    assert config.dtype is None
    assert not config.tie_word_embeddings
    assert read(num_key_value_heads=None).num_kv_heads == 8
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert read(head_dim=64).head_dim == 64


def test_token_ids_are_one_or_many() -> None:
    config = read(bos_token_id=1, eos_token_id=[2, 3])
    assert (config.bos_token_ids, config.eos_token_ids) == ((1,), (2, 3))


@pytest.mark.parametrize(
    "dtype", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}]
)
def test_dtype_of_either_name(dtype: dict) -> None:
    assert read(**dtype).dtype == "bfloat16"


def test_rope_of_transformers_4_and_5_read_alike() -> None:
    old = read(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = read(rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 1024)
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == LinearScaling(2.0)


def test_yarn_takes_its_length_from_the_model_where_none_is_given() -> None:
    scaling = read(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope_scaling
    assert scaling == YarnScaling(factor=4.0, original_max_position_embeddings=4096)


@pytest.mark.parametrize("golden", ROPES, ids=lambda golden: golden["name"])
def test_frequencies_equal_transformers(golden: dict) -> None:
    config = read(rope_parameters=golden["rope_parameters"])
    frequencies, factor = inverse_frequencies(
        golden["head_dim"], config.rope_theta, config.rope_scaling
    )
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, golden["frequencies"], rtol=1e-6)
    assert factor == pytest.approx(golden["attention_factor"])


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64, 64)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}, (None, None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 2,
            },
            (None, None, 64),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, None, 64),
        ),
    ],
)
def test_windows_of_each_layer(options: dict, windows: tuple) -> None:
    assert read(**options).sliding_windows == windows


def test_every_architecture_has_a_class() -> None:
    assert set(MODEL_CLASSES) == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM, "),
        ({"architectures": None}, "must name one architecture"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported; supported: False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'.*yarn"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"head_dim": 24}, "head_dim must be a multiple of 16, got 24"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads, got 8 and 3"),
        ({"hidden_size": 100}, "hidden_size must be a multiple .* got 100 and 8"),
        ({"num_hidden_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            },
            "layer_types='chunked_attention'",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "each of 3 layers, got 1",
        ),
    ],
)
def test_refuses_naming_option_and_alternatives(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**options)

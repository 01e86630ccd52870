"""Shapes of well-known models by name, for runs with random weights: no download, no tokenizer."""

import json
from pathlib import Path
from typing import Any

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3 = _QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "attention_bias": False,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _rope_scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # As small as every engine takes it: for trying a benchmark on a CPU.
    "tiny": _LLAMA3
    | _sizes(128, 256, 2, 4, 2)
    | {"head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 4096}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "qwen2.5-0.5b": _QWEN2 | _sizes(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _QWEN2 | _sizes(1536, 8960, 28, 12, 2),
    "qwen2.5-7b": _QWEN2
    | _sizes(3584, 18944, 28, 28, 4)
    | {"vocab_size": 152064, "tie_word_embeddings": False},
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, 8) | {"tie_word_embeddings": False},
    "llama-3.2-1b": _LLAMA3
    | _sizes(2048, 8192, 16, 32, 8)
    | {"head_dim": 64, "tie_word_embeddings": True, "rope_scaling": _rope_scaling(32.0)},
    "llama-3.1-8b": _LLAMA3 | _sizes(4096, 14336, 32, 32, 8) | {"rope_scaling": _rope_scaling(8.0)},
    "llama-3.1-70b": _LLAMA3
    | _sizes(8192, 28672, 80, 64, 8)
    | {"rope_scaling": _rope_scaling(8.0)},
}
"""The config.json of each, as its authors published the sizes."""


def write_shape(name: str, folder: Path) -> Path:
    """A model folder with the configuration alone; ValueError naming the shapes there are."""
    if name not in SHAPES:
        raise ValueError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | {"dtype": "bfloat16"}, indent=2))
    return folder

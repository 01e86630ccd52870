"""GGUF files turned into ordinary Hugging Face folders.

Sources: the GGUF specification (ggml's docs/gguf.md) for the keys, llama.cpp's
convert_hf_to_gguf.py for what it did to the weights, which is undone here.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor
from safetensors.numpy import save_file

from jaxserve.model.errors import ModelError
from jaxserve.model.gguf_tokenizer import write_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` to the class that config.json names; Mistral's files say "llama"."""

_MAX_SHARD_BYTES = 1 << 30

_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"

# Keys of the architecture's section that change nothing, or repeat what the tensors say.
_HARMLESS_KEYS = {"vocab_size", "attention.causal", "rope.scaling.finetuned", "tensor_data_layout"}

# Llama 3's scaling in a GGUF is only a tensor of factors; these three are the same in every model
# that uses it (3.1, 3.2, 3.3), and the factors are checked against them.
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model in the GGUF file `path` into the existing, empty `folder`.

    Weights are dequantised to float32; about 2 GiB of host memory hold the part that is written
    and its serialised copy. Raises ModelError, naming the file, if it is cut short, corrupt, or
    holds what is not supported; what was written by then is the caller's to remove.
    """
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error
    try:
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = make_config(metadata, tensors)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        write_tokenizer(metadata, folder)
        _write_weights(tensors, config, folder)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def make_config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """The contents of config.json. Raises ModelError for what is missing or not supported."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    section = {
        name.removeprefix(prefix): value
        for name, value in metadata.items()
        if name.startswith(prefix)
    }

    def take(name: str, default: Any = None) -> Any:
        value = section.pop(name, default)
        if value is None:
            raise ModelError(f"metadata {prefix}{name} is missing")
        if isinstance(value, list):
            raise ModelError(f"metadata {prefix}{name} differs by layer, which is not supported")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError("tensor token_embd.weight is missing")
    hidden_size, vocab_size = (int(size) for size in tensors["token_embd.weight"].shape)
    num_heads = take("attention.head_count")
    head_dim = take("attention.key_length", take("embedding_length") // num_heads)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": take("feed_forward_length"),
        "num_hidden_layers": take("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": take("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": take("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": take("context_length"),
        "vocab_size": vocab_size,
        "rope_theta": take("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    for name in ("rope.dimension_count", "attention.value_length"):
        if take(name, head_dim) != head_dim:
            raise ModelError(f"metadata {prefix}{name} other than head_dim is not supported")
    config["rope_scaling"] = _rope_scaling(take, tensors.get(_ROPE_FACTORS), config)
    unknown = sorted(set(section) - _HARMLESS_KEYS)
    if unknown:
        raise ModelError(f"metadata not supported: {', '.join(prefix + name for name in unknown)}")
    return config


def _eos_token_ids(metadata: dict[str, Any]) -> int | list[int] | None:
    """The end-of-sequence token, with the end-of-turn token where the file names another."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    unique = list(dict.fromkeys(i for i in ids if i is not None))
    return unique if len(unique) > 1 else next(iter(unique), None)


def _rope_scaling(
    take: Callable[..., Any], factors: ReaderTensor | None, config: dict[str, Any]
) -> dict[str, Any] | None:
    kind = take("rope.scaling.type", "none")
    if factors is not None:
        if kind != "none":
            raise ModelError(f"{_ROPE_FACTORS} together with rope scaling {kind!r}")
        return _llama3_scaling(_float32(factors), config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rope scaling {kind!r} is not supported; supported are linear, yarn")
    scaling = {"rope_type": kind, "factor": take("rope.scaling.factor")}
    if kind == "yarn":
        original = take("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """Recover Llama 3's rope scaling from the factors by which it divides the frequencies."""
    scaling = {**_LLAMA3_SCALING, "factor": float(factors.max())}
    original, low, high = (
        scaling[name]
        for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    head_dim = config["head_dim"]
    exponents = np.arange(0, head_dim, 2) / head_dim
    rotations = original * config["rope_theta"] ** -exponents / (2 * math.pi)
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{_ROPE_FACTORS} is not Llama 3's rope scaling; no other is supported")
    return scaling


def _write_weights(tensors: dict[str, ReaderTensor], config: dict[str, Any], folder: Path) -> None:
    """Write float32 safetensors, one file or several with an index, one file in memory at once."""
    names = {name: _hf_name(name) for name in tensors if name != _ROPE_FACTORS}
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in names:
        tensor_bytes = 4 * int(tensors[name].n_elements)
        if shards[-1] and shard_bytes + tensor_bytes > _MAX_SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor_bytes

    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        weights = {names[name]: _weight(tensors[name], config) for name in shard}
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _hf_name(name: str) -> str:
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, module, kind = match.groups()
        if module in _LAYER_TENSOR_NAMES:
            return f"model.layers.{layer}.{_LAYER_TENSOR_NAMES[module]}.{kind}"
    module, _, kind = name.rpartition(".")
    if module in _TENSOR_NAMES and kind == "weight":
        return f"{_TENSOR_NAMES[module]}.weight"
    raise ModelError(f"tensor {name} is not known")


def _weight(tensor: ReaderTensor, config: dict[str, Any]) -> np.ndarray:
    weight = _float32(tensor)
    if config["model_type"] != "llama":
        return weight
    if ".attn_q." in tensor.name:
        return unpermute(weight, config["num_attention_heads"])
    if ".attn_k." in tensor.name:
        return unpermute(weight, config["num_key_value_heads"])
    return weight


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of Q and K.

    It interleaves the two halves of each head, which RoPE pairs: row 2 i + j of a head was row
    j * head_dim / 2 + i.
    """
    head_dim, remainder = divmod(weight.shape[0], num_heads)
    if remainder or head_dim % 2:
        raise ModelError(f"{weight.shape[0]} rows of Q or K do not make {num_heads} heads")
    pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _float32(tensor: ReaderTensor) -> np.ndarray:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(
            f"tensor {tensor.name} has type {tensor.tensor_type.name}, which is not supported"
        ) from error
    return np.ascontiguousarray(values, dtype=np.float32)

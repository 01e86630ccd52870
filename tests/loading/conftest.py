"""Small models on disk, made from a seed: GGUF files and Hugging Face folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QType
from safetensors.numpy import save_file

from jaxserve.model.resolve import resolve_model

D, F, N, K, H, L = 64, 96, 4, 2, 16, 2


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model, made in the user's cache if it is not there yet."""
    return resolve_model("smollm2-135m")


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with, in the order of GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(rest))]


@pytest.fixture(scope="session")
def byte_level_vocabulary() -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer, less `pre`: merges for "hello", "12", "123"."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "e Ì", "eÌ ģ"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    tokens += ["world", "<|bos|>", "<|eos|>", "<think>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "merges": merges,
        "token_type": types,
        "bos_token_id": tokens.index("<|bos|>"),
        "eos_token_id": tokens.index("<|eos|>"),
    }


def random_weights(
    vocab_size: int,
    *,
    qkv_bias: bool,
    qk_norm: bool,
    tied: bool,
    seed: int,
    num_layers: int = L,
    mlp_size: int = F,
) -> dict[str, np.ndarray]:
    """Hugging Face's names and shapes; float32, N(0, 1)."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, D),
        "model.norm.weight": (D,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, D)
    for i in range(num_layers):
        layer = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "self_attn.q_proj.weight": (N * H, D),
            "self_attn.k_proj.weight": (K * H, D),
            "self_attn.v_proj.weight": (K * H, D),
            "self_attn.o_proj.weight": (D, N * H),
            "mlp.gate_proj.weight": (mlp_size, D),
            "mlp.up_proj.weight": (mlp_size, D),
            "mlp.down_proj.weight": (D, mlp_size),
        }
        if qkv_bias:
            layer |= {
                "self_attn.q_proj.bias": (N * H,),
                "self_attn.k_proj.bias": (K * H,),
                "self_attn.v_proj.bias": (K * H,),
            }
        if qk_norm:
            layer |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[module]}.{kind}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of the llama architecture."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


WriteGguf = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def write_gguf(byte_level_vocabulary: dict[str, Any]) -> WriteGguf:
    """Write a GGUF file; the weights that it holds, dequantised, under Hugging Face's names."""

    def write(
        path: Path,
        architecture: str = "llama",
        *,
        qtype: QType = QType.F32,
        tied: bool = True,
        tokenizer: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        extra_tensors: dict[str, np.ndarray] | None = None,
        chat_template: str | None = "{{ messages[0]['content'] }}",
    ) -> dict[str, np.ndarray]:
        tokenizer = tokenizer or {**byte_level_vocabulary, "pre": "smollm"}
        weights = random_weights(
            len(tokenizer["tokens"]),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            tied=tied,
            seed=1,
        )
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(L)
        writer.add_context_length(512)
        writer.add_embedding_length(D)
        writer.add_feed_forward_length(F)
        writer.add_head_count(N)
        writer.add_head_count_kv(K)
        writer.add_key_length(H)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(50000.0)
        for name, value in (metadata or {}).items():
            writer.add_key_value(f"{architecture}.{name}", value, _value_type(value))
        for name, value in tokenizer.items():
            sub_type = _value_type(value[0]) if isinstance(value, list) else None
            type_ = gguf.GGUFValueType.ARRAY if sub_type is not None else _value_type(value)
            writer.add_key_value(f"tokenizer.ggml.{name}", value, type_, sub_type)
        if chat_template:
            writer.add_chat_template(chat_template)

        stored = {}
        for name, weight in weights.items():
            heads = {"q_proj": N, "k_proj": K}.get(name.split(".")[-2])
            if architecture == "llama" and heads:
                weight = permute(weight, heads)
            kind = qtype if weight.ndim == 2 else QType.F32
            data = gguf.quantize(weight, kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
            # Quantisation is row by row, so it commutes with the permutation of rows.
            stored[name] = gguf.dequantize(gguf.quantize(weights[name], kind), kind)
        for name, tensor in (extra_tensors or {}).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return stored

    return write


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32
    return gguf.GGUFValueType.get_type(value)


HF_OPTIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}


@pytest.fixture(scope="session")
def write_hf() -> Callable[..., dict[str, np.ndarray]]:
    """Write a Hugging Face folder with 97 tokens; its weights as stored."""

    def write(
        folder: Path,
        architecture: str = "LlamaForCausalLM",
        *,
        tied: bool = False,
        num_shards: int = 1,
        num_layers: int = L,
        mlp_size: int = F,
        dtype: Any = np.float32,
        change: Callable[[dict[str, np.ndarray]], object] = lambda weights: None,
    ) -> dict[str, np.ndarray]:
        options = HF_OPTIONS[architecture] | {"num_layers": num_layers, "mlp_size": mlp_size}
        weights = random_weights(97, tied=tied, seed=2, **options)
        weights = {name: weight.astype(dtype) for name, weight in weights.items()}
        change(weights)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": [architecture],
            "hidden_size": D,
            "intermediate_size": mlp_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": N,
            "num_key_value_heads": K,
            "head_dim": H,
            "vocab_size": 97,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": tied,
            "eos_token_id": 3,
        }
        (folder / "config.json").write_text(json.dumps(config))
        if num_shards == 1:
            save_file(weights, folder / "model.safetensors")
            return weights
        files = {
            name: f"part-{i % num_shards}.safetensors" for i, name in enumerate(sorted(weights))
        }
        for file in set(files.values()):
            part = {name: weights[name] for name in weights if files[name] == file}
            save_file(part, folder / file)
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return weights

    return write

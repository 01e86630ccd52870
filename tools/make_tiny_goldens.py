"""Make the tiny models and the reference outputs that tests/model/ compares against.

Needs torch and transformers (the `compare` extra), nothing of jaxserve:

    python tools/make_tiny_goldens.py tests/model/goldens

Each case becomes a folder with config.json and model.safetensors as transformers writes them, and
golden.json: for each prompt the greedy tokens, their log-probabilities and the margins between
the two largest logits, in float32 on the CPU. rope.json holds rotation frequencies alone, for
scalings that take more options than the models use.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NUM_TOKENS = 64
PROMPT_LENS = (1, 7, 33)
COMMON = {
    "vocab_size": 131,  # prime: no number of devices divides it
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def case(model_type: str, hidden: int, heads: int, kv_heads: int, head_dim: int, **rest: Any):
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **COMMON,
        **rest,
    }


def rope(rope_type: str, theta: float = 10_000.0, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **rest}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama": case("llama", 64, 4, 4, 16),
    "llama_bias": case("llama", 32, 4, 2, 16, attention_bias=True),
    "llama_linear": case("llama", 36, 9, 3, 16, **rope("linear", factor=4.0)),
    "llama_llama3": case("llama", 32, 8, 1, 16, **rope("llama3", **LLAMA3)),
    "llama_yarn": case("llama", 32, 4, 2, 32, **rope("yarn", **YARN)),
    "qwen2_tied": case("qwen2", 28, 14, 2, 16, tie_word_embeddings=True),
    "qwen2_window": case(
        "qwen2", 32, 8, 2, 16, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": case("qwen3", 32, 4, 2, 32, **rope("default", theta=1e6)),
    "mistral_window": case("mistral", 48, 6, 2, 16, num_hidden_layers=3, sliding_window=12),
}
ROPES = {
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
    "yarn_untruncated": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "truncate": False},
    "yarn_betas": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn_factor": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "attention_factor": 1.5},
    "yarn_mscales": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        **YARN,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def randomise(model: torch.nn.Module, rng: np.random.RandomState, tied: bool) -> None:
    """Weights that make attention matter and leave clear margins between the logits.

    A tied head favours the token just read, so its embedding is kept small beside the layers.
    """
    for name, parameter in model.named_parameters():
        values = rng.standard_normal(tuple(parameter.shape))
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith("bias"):
            values *= 0.5
        elif "embed" in name or "lm_head" in name:
            values *= (1.5 if tied else 4.0) / parameter.shape[-1] ** 0.5
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            values *= gain / parameter.shape[-1] ** 0.5
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> dict[str, Any]:
    """The whole sequence anew for every token: no cache whose faults could be copied."""
    tokens, logprobs, margins = [], [], []
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        token = int(logits.argmax())
        tokens.append(token)
        logprobs.append(round(float(logits.log_softmax(-1)[token]), 6))
        margins.append(round(first - second, 6))
    return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs, "margins": margins}


def make_case(name: str, options: dict[str, Any], folder: Path) -> None:
    rng = np.random.RandomState(sum(name.encode()))
    config = AutoConfig.for_model(**options)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    randomise(model, rng, config.tie_word_embeddings)
    prompts = [rng.randint(3, config.vocab_size, length).tolist() for length in PROMPT_LENS]
    golden = [greedy(model, prompt) for prompt in prompts]
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    (folder / "golden.json").write_text(json.dumps(golden) + "\n")
    distinct = [len(set(row["tokens"])) for row in golden]
    print(
        f"{name}: distinct tokens {distinct}, least margin {min(min(r['margins']) for r in golden)}"
    )


def make_ropes(path: Path) -> None:
    """Frequencies and factors as transformers computes them."""
    rows = []
    for name, parameters in ROPES.items():
        options = case("llama", 128, 2, 2, 64, rope_parameters=dict(parameters))
        config = AutoConfig.for_model(**options)
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        rows.append(
            {
                "name": name,
                "rope_parameters": parameters,
                "head_dim": 64,
                "frequencies": frequencies.tolist(),
                "attention_factor": factor,
            }
        )
    path.write_text(json.dumps(rows) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    for name, options in CASES.items():
        make_case(name, options, out / name)
    make_ropes(out / "rope.json")


if __name__ == "__main__":
    main()

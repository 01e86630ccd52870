"""A tiny random model, engines over it, and prompts."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve import LLM
from jaxserve.engine.state import StateSizes
from jaxserve.model.definition import ModelDefinition
from jaxserve.model.loader import read_config

VOCAB_SIZE = 256
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_FIELDS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "kv_cache_memory_bytes": 4 << 20,
    "compilation_cache_dir": "",
}
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4
"""Layers x kv heads x (K, V) x block_size x head_dim x float32."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.fixture(scope="session")
def tiny_definition(tiny_folder: Path) -> ModelDefinition:
    return ModelDefinition.create(
        read_config(tiny_folder),
        tensor_parallel_size=1,
        dtype=jnp.dtype("float32"),
        attention_impl="reference",
    )


@pytest.fixture(scope="session")
def tiny_sizes() -> StateSizes:
    """Of a state of the tiny model."""
    return StateSizes(4, 8, max_num_seqs=2, max_num_batched_tokens=4, max_num_steps=3)


@pytest.fixture(scope="session")
def tiny_fields() -> dict[str, object]:
    """EngineConfig's, of small engines over the tiny model."""
    return TINY_FIELDS


@pytest.fixture(scope="session")
def make_llm(tiny_folder: Path) -> Iterator[Callable[..., LLM]]:
    """Engines over the tiny model, one for each set of fields, kept for the session."""
    made: dict[str, LLM] = {}

    def make(**fields: object) -> LLM:
        key = repr(sorted(fields.items()))
        if key not in made:
            made[key] = LLM(tiny_folder, **(TINY_FIELDS | fields))
        return made[key]

    yield make
    for llm in made.values():
        llm.close()


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Forty prompts of 1 to 60 ids; every other one shares a prefix with the one before."""
    rng = random.Random(0)
    made: list[list[int]] = []
    for i in range(40):
        ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        if i % 2:
            ids = (made[-1][:40] + ids)[:60]
        made.append(ids)
    return made


@pytest.fixture(scope="session")
def block_bytes() -> int:
    return BLOCK_BYTES

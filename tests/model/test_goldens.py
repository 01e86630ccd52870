"""Every architecture against transformers' tokens and log-probabilities, whole and sharded.

The models and goldens are made by tools/make_tiny_goldens.py.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.model import layers
from jaxserve.model.attention import AttentionBatch
from jaxserve.model.config import ModelConfig
from jaxserve.model.definition import ModelDefinition, Params
from jaxserve.model.loader import load_params
from jaxserve.model.rope import YarnScaling
from sharding import KV_CACHE_SPEC, make_mesh, partition_specs

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.json"))
BLOCK_SIZE = 8
MARGIN = 1e-3
TOLERANCE = 1e-4


class Model(NamedTuple):
    definition: ModelDefinition
    params: Params
    mesh: Mesh


class Output(NamedTuple):
    """Of each prompt (row) and each token after it."""

    argmax: np.ndarray
    logprobs: np.ndarray
    """Of the tokens that were taken: the forced ones, or the argmax."""


def load(case: str, tensor_parallel_size: int = 1, dtype="float32", impl="reference", **changes):
    hf = json.loads((GOLDENS / case / "config.json").read_text())
    config = replace(ModelConfig.from_hf(hf), **changes)
    mesh = make_mesh(tensor_parallel_size)
    definition = ModelDefinition.create(
        config, tensor_parallel_size=tensor_parallel_size, dtype=dtype, attention_impl=impl
    )
    return Model(definition, load_params(GOLDENS / case, definition, mesh), mesh)


@cache
def golden(case: str) -> list[dict]:
    return json.loads((GOLDENS / case / "golden.json").read_text())


@cache
def compiled_step(definition: ModelDefinition, mesh: Mesh):
    """(params, kv_caches, token_ids, batch, last_tokens) -> (log-probabilities, kv_caches)."""

    def step(params, kv_caches, token_ids, batch, last_tokens):
        model = definition.bind(params)
        hidden, kv_caches = model(token_ids, kv_caches, batch)
        return jax.nn.log_softmax(model.logits(hidden[last_tokens])), kv_caches

    in_specs = (partition_specs(definition.abstract_params), KV_CACHE_SPEC, P(), P(), P())
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=in_specs, out_specs=(P(), KV_CACHE_SPEC), check_vma=False
    )
    return jax.jit(sharded, donate_argnums=1)


def generate(
    model: Model,
    prompts: list[list[int]],
    num_tokens: int,
    forced: np.ndarray | None = None,
    decode_position_offset: int = 0,
) -> Output:
    """All prompts as one ragged prefill, then one batch of decode rows a token, over a paged cache.

    Blocks are dealt in no order. One row and the tokens left are padding, so that prefill and
    decode share one compiled shape.
    """
    definition, params, mesh = model
    num_rows = len(prompts) + 1
    num_flat_tokens = sum(map(len, prompts)) + 1
    lens = np.array([len(prompt) for prompt in prompts] + [0])
    num_blocks_per_row = -(-(max(lens) + num_tokens) // BLOCK_SIZE)
    num_blocks = 1 + num_rows * num_blocks_per_row
    tables = 1 + np.random.RandomState(0).permutation(num_blocks - 1)
    tables = tables.reshape(num_rows, num_blocks_per_row).astype(np.int32)

    run = compiled_step(definition, mesh)
    kv_caches = definition.init_kv_caches(num_blocks, BLOCK_SIZE, mesh)

    def forward(kv_caches, rows: list[list[int]], starts: np.ndarray, offset: int):
        padding = num_flat_tokens - sum(map(len, rows))
        token_ids = np.concatenate([*rows, [0] * padding]).astype(np.int32)
        row_lens = np.array([*map(len, rows), 0])
        owners = np.repeat(np.arange(num_rows), row_lens)
        positions = np.concatenate(
            [np.arange(n) + s for n, s in zip(row_lens, starts, strict=True)]
        )
        slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        query_starts = np.concatenate([[0], np.cumsum(row_lens)])
        decoding = len(rows) if max(row_lens) == 1 else 0
        batch = AttentionBatch(
            positions=np.pad(positions + offset, (0, padding)).astype(np.int32),
            kv_slots=np.pad(slots, (0, padding)).astype(np.int32),
            block_tables=tables,
            query_starts=query_starts.astype(np.int32),
            context_lens=np.where(row_lens > 0, starts + row_lens, 0).astype(np.int32),
            num_decode_rows=np.int32(decoding),
        )
        last_tokens = (query_starts[1:-1] - 1).astype(np.int32)
        return run(params, kv_caches, token_ids, batch, last_tokens)

    argmax, logprobs = [], []
    scores, kv_caches = forward(kv_caches, prompts, np.zeros_like(lens), 0)
    for index in range(num_tokens):
        scores = np.asarray(scores, np.float32)
        argmax.append(scores.argmax(-1))
        taken = argmax[-1] if forced is None else forced[:, index]
        logprobs.append(scores[np.arange(len(prompts)), taken])
        if index + 1 < num_tokens:
            rows = [[token] for token in taken]
            scores, kv_caches = forward(kv_caches, rows, lens + index, decode_position_offset)
    return Output(np.stack(argmax, 1), np.stack(logprobs, 1))


def check_golden(case: str, model: Model, tolerance: float = TOLERANCE, **generate_options) -> None:
    """Feed the reference's tokens: a near tie costs one token's comparison, not all that follow."""
    rows = golden(case)
    tokens = np.array([row["tokens"] for row in rows])
    prompts = [row["prompt"] for row in rows]
    output = generate(model, prompts, tokens.shape[1], forced=tokens, **generate_options)
    sure = np.array([row["margins"] for row in rows]) > MARGIN
    expected = np.array([row["logprobs"] for row in rows])
    np.testing.assert_allclose(output.logprobs, expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(output.argmax[sure], tokens[sure])


@cache
def free_run(case: str, tensor_parallel_size: int) -> np.ndarray:
    prompts = [row["prompt"] for row in golden(case)]
    return generate(load(case, tensor_parallel_size), prompts, 64).argmax


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str) -> None:
    check_golden(case, load(case))


@pytest.mark.parametrize(
    ("case", "tensor_parallel_size"),
    [
        ("llama", 2),  # as many KV heads on each device
        ("llama", 4),
        ("llama_linear", 3),  # GQA of 3
        ("qwen2_tied", 2),  # GQA of 7
        ("mistral_window", 2),
        ("llama_llama3", 2),  # one KV head on all devices
        ("llama_llama3", 4),
        ("llama_bias", 4),  # one query head to a device
        ("qwen2_window", 4),
        ("qwen3", 4),
    ],
)
def test_sharded_equals_whole(case: str, tensor_parallel_size: int) -> None:
    np.testing.assert_array_equal(free_run(case, tensor_parallel_size), free_run(case, 1))


@pytest.mark.parametrize("case", ["llama", "qwen2_tied", "qwen3"])
def test_bfloat16_stays_near(case: str) -> None:
    model = load(case, tensor_parallel_size=2, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    rows = golden(case)
    tokens = np.array([row["tokens"] for row in rows])
    output = generate(model, [row["prompt"] for row in rows], 64, forced=tokens)
    expected = np.array([row["logprobs"] for row in rows])
    assert np.abs(output.logprobs - expected).mean() < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu_equals_transformers(case: str) -> None:
    check_golden(case, load(case, impl="triton"), tolerance=1e-3)


# Faults that the checks above must see.


def change_layers(params: Params, module: str, name: str, change) -> None:
    for layer in params["layers"].values():
        layer[module][name]["weight"] = change(layer[module][name]["weight"])


def swap_key_and_value(qkv: jax.Array) -> jax.Array:
    return jnp.concatenate([qkv[:, :-2], qkv[:, -1:], qkv[:, -2:-1]], axis=1)


def deal_query_heads_across_groups(qkv: jax.Array) -> jax.Array:
    queries = qkv[:, :-2]
    dealt = jnp.moveaxis(queries, 0, 1).reshape(queries.shape)
    return jnp.concatenate([dealt, qkv[:, -2:]], axis=1)


@pytest.mark.parametrize(
    ("module", "name", "change"),
    [
        ("mlp", "gate_up", lambda w: w[::-1]),
        ("attn", "qkv", swap_key_and_value),
        ("attn", "qkv", deal_query_heads_across_groups),
        ("attn", "q_norm", jnp.ones_like),
    ],
)
def test_sees_faults_of_weights(module: str, name: str, change) -> None:
    model = load("qwen3")
    change_layers(model.params, module, name, change)
    with pytest.raises(AssertionError):
        check_golden("qwen3", model)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mistral_window", {"sliding_windows": (13,) * 3}),
        ("qwen2_window", {"sliding_windows": (8, 8)}),
        ("llama_linear", {"rope_scaling": None}),
        ("llama_llama3", {"rope_scaling": None}),
        ("llama_yarn", {"rope_scaling": YarnScaling(4.0, 32, attention_factor=1.0)}),
        ("llama", {"rms_norm_eps": 1e-3}),
    ],
)
def test_sees_faults_of_configuration(case: str, changes: dict) -> None:
    with pytest.raises(AssertionError):
        check_golden(case, load(case, **changes))


def test_sees_positions_off_by_one() -> None:
    with pytest.raises(AssertionError):
        check_golden("llama", load("llama"), decode_position_offset=1)


def without_reduction(self, inner, residual, norm, impl) -> layers.Residual:
    total = layers.linear(inner, self.weight[...], impl)
    delta = total if self.bias is None else total + self.bias[...]
    return layers.Residual(*norm.after_adding(residual.x, delta[None]), residual.arrived)


def with_bias_on_every_shard(self, inner, residual, norm, impl) -> layers.Residual:
    total = layers.linear(inner, self.weight[...], impl)
    delta = layers.all_reduce(total if self.bias is None else total + self.bias[...])
    return layers.Residual(*norm.after_adding(residual.x, delta[None]), residual.arrived)


@pytest.mark.parametrize("fault", [without_reduction, with_bias_on_every_shard])
def test_sees_faults_of_reduction(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.Linear, "into_residual", fault)
    compiled_step.cache_clear()
    with pytest.raises(AssertionError):
        check_golden("llama_bias", load("llama_bias", tensor_parallel_size=2))
    compiled_step.cache_clear()

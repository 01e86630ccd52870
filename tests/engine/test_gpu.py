"""On a GPU: the whole model and the engine against the CPU's reference path."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxserve import LLM, SamplingParams
from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.request_state import RequestState
from jaxserve.model.config import ModelConfig
from jaxserve.model.definition import ModelDefinition, init_random
from jaxserve.outputs import RequestMetrics
from scheduler import Request, Scheduler, SchedulerConfig
from sharding import KV_CACHE_SPEC, make_mesh, partition_specs, shardings

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
)
LAYOUT = BatchLayout(Bucket(128, 8), max_blocks=16, block_size=16)


def packed_steps() -> list[np.ndarray]:
    """Three mixed steps: chunks of prompts, then decodes beside a long prompt's chunks."""
    scheduler = Scheduler(SchedulerConfig(100, 16, 8, 128, 256))
    rng = np.random.default_rng(0)
    states = {}
    for i, length in enumerate((5, 40, 33, 150, 16)):
        ids = rng.integers(0, CONFIG.vocab_size, length).tolist()
        request = Request(str(i), ids, max_tokens=8)
        states[str(i)] = RequestState(
            request=request,
            parent_id=str(i),
            index=0,
            params=SamplingParams(temperature=0),
            seed=0,
            has_bias=False,
            bad_word_token_ids=[],
            metrics=RequestMetrics(0.0),
            tokenizer=None,
            detokenizer=None,
            eos_token_ids=frozenset(),
        )
        scheduler.add(request)
    builder = BatchBuilder(8, 16)
    packed = []
    for _ in range(3):
        output = scheduler.schedule()
        packed.append(builder.build(output, states, LAYOUT))
        scheduler.update(output, [(7,)] * len(output.scheduled))
    return packed


def logits_of(device: jax.Device, impl: str, dtype: str, params: dict) -> list[np.ndarray]:
    """Each step's logits at every flat token; decode rows are fed token 7."""
    mesh = make_mesh(1, [device])
    definition = ModelDefinition.create(
        CONFIG, tensor_parallel_size=1, dtype=dtype, attention_impl=impl
    )
    placed = jax.device_put(params, shardings(definition.abstract_params, mesh))
    caches = definition.init_kv_caches(100, 16, mesh)

    def step(params, caches, packed):
        batch = LAYOUT.unpack(packed)
        model = definition.bind(params)
        token_ids = jnp.where(batch.token_ids < 0, 7, batch.token_ids)
        hidden, caches = model(token_ids, caches, batch.attention)
        return caches, model.logits(hidden)

    specs = partition_specs(definition.abstract_params)
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, KV_CACHE_SPEC, P()),
            out_specs=(KV_CACHE_SPEC, P()),
            check_vma=False,
        ),
        donate_argnums=1,
    )
    results = []
    for packed in packed_steps():
        num_tokens = int(LAYOUT.split(packed)[1][-1])
        caches, logits = step(placed, caches, packed)
        results.append(np.asarray(logits, np.float64)[:num_tokens])
    return results


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_whole_model_logits_against_the_cpu(dtype, tolerance):
    cpu, gpu = jax.devices("cpu")[0], jax.devices("gpu")[0]
    mesh = make_mesh(1, [cpu])
    definition = ModelDefinition.create(
        CONFIG, tensor_parallel_size=1, dtype="float32", attention_impl="reference"
    )
    params = init_random(definition.abstract_params, 0, shardings(definition.abstract_params, mesh))
    params = jax.tree.map(lambda x: np.asarray(x).astype(jnp.dtype(dtype)), params)
    exact = jax.tree.map(lambda x: x.astype(np.float32), params)
    expected = logits_of(cpu, "reference", "float32", exact)
    for ours, theirs in zip(logits_of(gpu, "triton", dtype, params), expected, strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert np.isfinite(ours).all()
        assert error < tolerance


def test_engine_on_the_gpu_as_alone(make_llm, prompts):
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    llm = make_llm(kv_cache_memory_bytes=None, gpu_memory_utilization=0.1)
    alone = [llm.generate(p, greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    together = llm.generate(prompts, greedy, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in together] == alone


def test_long_prefills_by_mosaic(tmp_path):
    """The kernel inside the engine's step, compiled and again from disk, beside Triton's."""
    if jax.devices("gpu")[0].compute_capability != "9.0":
        pytest.skip("Mosaic prefill is for compute capability 9.0")
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rng = random.Random(0)
    prompts = [rng.choices(range(1000), k=length) for length in (1500, 3, 700, 900, 2)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(attention_impl: str) -> np.ndarray:
        with LLM(
            str(tmp_path),
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_impl=attention_impl,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1 << 28,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return np.array(
            [
                entry[token].logprob
                for output in outputs
                for token, entry in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                )
            ]
        )

    expected = logprobs("triton")
    for _ in range(2):
        found = logprobs("auto")
        assert np.abs(found - expected).mean() < 0.01
        assert np.abs(found - expected).max() < 0.3
        assert (found != expected).any()  # another kernel has summed in another order

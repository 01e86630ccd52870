"""What a start costs, what it prepares for, and which ones are refused."""

import json
import subprocess
import sys

import jax
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.engine.startup import decode_rows, scheduler_steps
from jaxserve.engine.state import bytes_beside_kv_cache, new_state
from sharding import make_mesh

SCRIPT = """
import json, sys
import jax
from jaxserve import LLM

counts = {"hits": 0, "misses": 0}
def count(event, **kwargs):
    if event.startswith("/jax/compilation_cache/cache_"):
        counts[event.rpartition("_")[2]] += 1
jax.monitoring.register_event_listener(count)
with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    llm.generate([[3, 4, 5]], use_tqdm=False)
print(json.dumps(counts))
"""
FIELDS = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
FIELDS |= {"max_num_seqs": 2, "max_num_batched_tokens": 4, "kv_cache_memory_bytes": 1 << 20}


def start(folder, cache):
    """Compilation cache hits and misses of a process that starts an engine."""
    fields = json.dumps(FIELDS | {"compilation_cache_dir": str(cache)})
    command = [sys.executable, "-c", SCRIPT, str(folder), fields]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_fault_1_a_warm_start_compiles_nothing(tiny_folder, tmp_path):
    cold = start(tiny_folder, tmp_path)
    assert cold["misses"] > 3
    assert start(tiny_folder, tmp_path) == {"hits": cold["hits"] + cold["misses"], "misses": 0}


def test_fault_2_nothing_compiles_after_ready(make_llm, prompts, compilations):
    llm = make_llm()
    compilations.clear()
    mixed = [
        SamplingParams(max_tokens=1 + i % 20, temperature=i % 3, logprobs=i % 4 or None)
        for i in range(len(prompts))
    ]
    llm.generate(prompts, mixed, use_tqdm=False)
    llm.generate(prompts, SamplingParams(presence_penalty=1, prompt_logprobs=1), use_tqdm=False)
    assert compilations == []
    jax.jit(lambda x: x * 3 + 1)(1.0)
    assert compilations, "they must be heard"


def test_fault_3_not_enough_memory_names_the_bytes(tiny_folder, block_bytes):
    fields = {"load_format": "dummy", "skip_tokenizer_init": True, "block_size": 8}
    with pytest.raises(ValueError, match="KV cache") as raised:
        LLM(str(tiny_folder), max_model_len=512, kv_cache_memory_bytes=8 * block_bytes, **fields)
    message = str(raised.value)
    assert f"{65 * block_bytes:,} bytes" in message
    assert f"{8 * block_bytes:,}" in message
    assert "max_model_len=56 would fit" in message


def test_bytes_beside_the_kv_cache(tiny_definition, tiny_sizes):
    state = new_state(tiny_definition, make_mesh(1), tiny_sizes)
    others = jax.tree.leaves(state._replace(kv_caches=()))
    expected = sum(array.nbytes for array in others)
    assert bytes_beside_kv_cache(tiny_definition, tiny_sizes) == expected


def test_larger_models_take_fewer_steps_in_a_dispatch():
    assert [scheduler_steps(num * 10**9) for num in (1, 16, 140)] == [8, 4, 1]


def test_larger_models_take_several_steps_of_fewer_rows():
    assert [decode_rows(num * 10**9, 4) for num in (1, 16)] == [3700, 231]


def test_too_long_for_the_model(tiny_folder):
    with pytest.raises(ValueError, match="max_model_len=1024 is more than the model was made for"):
        LLM(str(tiny_folder), max_model_len=1024, load_format="dummy", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_model_len": "64"}, "max_model_len must be an integer, got '64'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be an integer, got 2.5"),
        ({"block_size": 12}, "block_size must be 8, 16, 32, 64 or 128, got 12"),
        ({"data_parallel_size": 2}, "data_parallel_size is an option of `jaxserve serve` alone"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 16},
            "max_num_seqs must be at most max_num_batched_tokens=16, got 64",
        ),
    ],
)
def test_impossible_configurations(tiny_folder, fields, says):
    with pytest.raises(ValueError, match=says):
        LLM(str(tiny_folder), load_format="dummy", skip_tokenizer_init=True, **fields)

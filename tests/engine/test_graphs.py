"""On a GPU: what XLA launches for a decode step, by its own list."""

from pathlib import Path

import jax
import pytest

from jaxserve.bench.thunks import Thunk, count_launches, dump_options, every_thunk, read_thunks
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.programs import GPU_OPTIONS, lower_step
from jaxserve.engine.state import StateSizes
from jaxserve.model.config import ModelConfig
from jaxserve.model.definition import ModelDefinition
from sharding import make_mesh

pytestmark = pytest.mark.gpu

NUM_LAYERS = 4
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)
LAYOUT = BatchLayout(Bucket(32, 32), max_blocks=64, block_size=16)
SIZES = StateSizes(1000, 16, max_num_seqs=128, max_num_batched_tokens=128, max_num_steps=4)
ONE = BatchLayout(Bucket(1, 1), max_blocks=64, block_size=16)
MANY = BatchLayout(Bucket(64, 64), max_blocks=64, block_size=16)
NUM_OUTPUTS = 2
"""Token ids and hidden states, copied to where the next step's will be."""
MOST_PER_LAYER_OF_ONE = 7
"""Four matrix products, one of them with the rotation, two norms, and attention."""
MOST_PER_LAYER = 13
"""Four matrix products, three of them with the sum of their parts, the gate, two norms, the
rotation with the cache's update, and two for attention."""
MOST_BESIDE = 32
"""Of unpacking, embedding, the head, and a greedy row's sampling."""


def thunks_of_step(folder: Path, num_steps: int, layout: BatchLayout = LAYOUT) -> list[Thunk]:
    mesh = make_mesh(1, jax.devices("gpu")[:1])
    definition = ModelDefinition.create(
        CONFIG, tensor_parallel_size=1, dtype="bfloat16", attention_impl="triton"
    )
    lowered = lower_step(definition, mesh, layout, num_steps, SIZES)
    lowered.compile(GPU_OPTIONS | dump_options(folder))
    return read_thunks(folder)


def test_a_decode_step_is_one_graph(tmp_path):
    launches = count_launches(thunks_of_step(tmp_path, 1))
    assert launches.graphs == 1
    assert not launches.outside
    assert launches.kernels[0] <= MOST_PER_LAYER * NUM_LAYERS + MOST_BESIDE


def test_each_of_several_steps_is_one_graph(tmp_path):
    thunks = thunks_of_step(tmp_path, 4)
    (loop,) = (thunk for thunk in every_thunk(thunks) if thunk.kind == "kWhile")
    launches = count_launches(loop.parts["body"])
    assert launches.graphs == 1
    assert not launches.outside
    assert launches.kernels[0] <= MOST_PER_LAYER * NUM_LAYERS + MOST_BESIDE


def test_a_step_of_one_token_has_few_kernels(tmp_path):
    launches = count_launches(thunks_of_step(tmp_path, 1, ONE))
    assert launches.graphs == 1
    assert not launches.outside
    assert launches.kernels[0] <= MOST_PER_LAYER_OF_ONE * NUM_LAYERS + MOST_BESIDE


@pytest.mark.parametrize("layout", [ONE, LAYOUT, MANY])
def test_a_step_copies_nothing_but_what_it_leaves(tmp_path, layout):
    thunks = thunks_of_step(tmp_path, 1, layout)
    assert sum(thunk.kind == "kCopy" for thunk in every_thunk(thunks)) <= NUM_OUTPUTS

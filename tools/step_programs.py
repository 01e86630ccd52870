"""What XLA makes of every step's program for an H200, on a machine without a GPU.

    pip install .[cuda13]    # XLA's compiler for CUDA is part of it; no driver is needed
    PYTHONPATH=. python tools/step_programs.py --shape llama-3.1-8b

One line a bucket: kernels and library calls of a step of a model of a few layers, and copies with
their megabytes. A step leaves its state where it was, so that few and small copies are right. What
the programs do not show is time, and which of these a graph holds (`tests/engine/test_graphs.py`).
"""

import argparse
import dataclasses
import os
import re
import tempfile
from pathlib import Path

# Read by JAX alone: it would ask the missing driver for the version of each library.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import numpy as np
from hlo_bytes import shape_bytes
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.bench.shapes import SHAPES, write_shape
from jaxserve.engine.buckets import Bucket, make_buckets
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.programs import GPU_OPTIONS, lower_step
from jaxserve.engine.state import StateSizes
from jaxserve.model.definition import ModelDefinition
from jaxserve.model.loader import read_config
from sharding import TENSOR_AXIS

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 62914560
  memory_bandwidth: 4800000000000 device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
"""
BLOCK_SIZE = 16
NUM_BLOCKS = 1000


def h200() -> jax.Device:
    """A device to compile for."""
    canonicalize = xla_bridge.canonicalize_platform

    def canonicalize_without_gpu(platform: str) -> str:
        # JAX knows "gpu" only where there is one (jax-ml/jax#23971).
        return "cuda" if platform == "gpu" else canonicalize(platform)

    xla_bridge.canonicalize_platform = canonicalize_without_gpu
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="one GPU", target_config=H200, topology="1x1x1"
    )
    # What kernels serve a shape is chosen by the first device.
    jax.devices = lambda *_: topology.devices
    return topology.devices[0]


def program(
    definition: ModelDefinition,
    mesh: Mesh,
    bucket: Bucket,
    num_steps: int,
    args: argparse.Namespace,
) -> list[str]:
    """The lines of the optimised HLO."""
    sizes = StateSizes(
        NUM_BLOCKS, BLOCK_SIZE, args.max_num_seqs, args.max_num_batched_tokens, num_steps
    )
    layout = BatchLayout(bucket, -(-args.max_model_len // BLOCK_SIZE), BLOCK_SIZE)
    lowered = lower_step(definition, mesh, layout, num_steps, sizes)
    return lowered.compile(GPU_OPTIONS).as_text().splitlines()


def report(lines: list[str]) -> str:
    calls = sum(" custom-call(" in line for line in lines)
    fusions = sum(" fusion(" in line or " fusion-start(" in line for line in lines)
    copies = [match[1] for line in lines if (match := re.search(r"= (.*?) copy\(", line))]
    megabytes = sum(map(shape_bytes, copies)) / 1e6
    shapes = ": " + ", ".join(sorted(set(copies))) if copies else ""
    return f"{calls} calls, {fusions} fusions, {len(copies)} copies of {megabytes:.1f} MB{shapes}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=8, help="of decode rows in one dispatch")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=4352)
    args = parser.parse_args()
    mesh = Mesh(np.array([h200()]), (TENSOR_AXIS,))
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(write_shape(args.shape, Path(folder) / args.shape))
    definition = ModelDefinition.create(
        dataclasses.replace(
            config,
            num_layers=args.num_layers,
            sliding_windows=config.sliding_windows[: args.num_layers],
        ),
        tensor_parallel_size=1,
        dtype="bfloat16",
        attention_impl="mosaic",
    )
    for bucket in make_buckets(args.max_num_seqs, args.max_num_batched_tokens):
        numbers = {1, args.num_steps} if bucket.num_rows == bucket.num_tokens else {1}
        for num_steps in sorted(numbers):
            lines = program(definition, mesh, bucket, num_steps, args)
            what = f"{bucket.num_tokens} tokens, {bucket.num_rows} rows, {num_steps} steps"
            print(f"{what}: {report(lines)}", flush=True)


if __name__ == "__main__":
    main()

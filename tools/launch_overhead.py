"""What one small kernel costs on this machine: by itself, in a jitted program, inside a graph.

    PYTHONPATH=. python tools/launch_overhead.py --output bench/results/launch_overhead.json

The kernel multiplies and adds over a few numbers, so that nearly all of its time is overhead; each
needs the result of the one before. Microseconds a kernel: `eager` calls one operation at a time,
`jitted_call` a compiled program of one kernel. `program` and `graph` are the difference between a
program of many kernels and one of few, without and with graphs, over the kernels between; that they
hold as many kernels as they should is read from XLA's list. `program_launch` and `graph_launch` are
what a call of each costs beside its kernels. Without a GPU there is no list and no graph: the
figures are then the CPU's.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.bench.environment import describe, write_result
from jaxserve.bench.thunks import count_launches, dump_options, read_thunks
from jaxserve.bench.timing import Row, measure

_FEW, _MANY = 64, 512
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
_CALLS = 100


def chain(num_kernels: int, array: jax.Array, *, graphs: bool) -> Callable[[jax.Array], jax.Array]:
    """A compiled program of that many kernels, one after another. RuntimeError if XLA has made
    another number of them, or a graph where none is wanted."""

    def program(x: jax.Array) -> jax.Array:
        for _ in range(num_kernels):
            # The barrier keeps XLA from making one kernel of all.
            x = jax.lax.optimization_barrier(x * 0.5 + 1.0)
        return x

    lowered = jax.jit(program).lower(array)
    if jax.default_backend() != "gpu":
        return lowered.compile()
    with tempfile.TemporaryDirectory() as folder:
        options = dump_options(Path(folder)) | ({} if graphs else _NO_GRAPHS)
        compiled = lowered.compile(compiler_options=options)
        launches = count_launches(read_thunks(Path(folder)))
    if (launches.graphs, launches.kernels) != (int(graphs), (num_kernels, num_kernels)):
        raise RuntimeError(f"wanted {num_kernels} kernels, graphs={graphs}, XLA has {launches}")
    return compiled


def call_us(call: Callable[[jax.Array], jax.Array], array: jax.Array, warm_up_s: float) -> Row:
    """Of one of many calls, each on the result of the one before."""

    def run() -> float:
        x = array
        begin = time.perf_counter()
        for _ in range(_CALLS):
            x = call(x)
        x.block_until_ready()
        return 1e6 * (time.perf_counter() - begin) / _CALLS

    return measure(run, run, warm_up_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024, help="numbers that a kernel works on")
    parser.add_argument("--warm-up-s", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=Path("bench/results/launch_overhead.json"))
    args = parser.parse_args()
    array = jnp.ones(args.size, jnp.float32)
    calls = {"eager": lambda x: x * 0.5, "jitted_call": jax.jit(lambda x: x * 0.5 + 1.0)}
    rows = {name: call_us(call, array, args.warm_up_s) for name, call in calls.items()}
    figures: dict[str, Any] = {name: round(row.value, 3) for name, row in rows.items()}
    for name, graphs in (("program", False), ("graph", True)):
        few, many = (
            call_us(chain(size, array, graphs=graphs), array, args.warm_up_s)
            for size in (_FEW, _MANY)
        )
        rows |= {f"{name}_of_{_FEW}": few, f"{name}_of_{_MANY}": many}
        per_kernel = (many.value - few.value) / (_MANY - _FEW)
        figures[name] = round(per_kernel, 3)
        figures[f"{name}_launch"] = round(few.value - _FEW * per_kernel, 3)
    result = describe(os.cpu_count()) | {
        "benchmark": "launch_overhead",
        "device": jax.devices()[0].device_kind,
        "us": figures,
        "rows": {name: row.as_json() for name, row in rows.items()},
        "spread": max(row.spread for row in rows.values()),
        "flagged": any(row.flagged for row in rows.values()),
    }
    write_result(args.output, result)


if __name__ == "__main__":
    main()

"""What the first GPU can do at most: copy bandwidth, and the rate of a large bf16 product.

    PYTHONPATH=. python bench/ceilings.py --output bench/results/ceilings.json

Floors of steps and ceilings of throughput are computed from these. On a CPU it measures the CPU.
"""

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.bench.environment import describe, write_result
from jaxserve.bench.timing import measure

_ROUNDS = 20


def _rate(work, amount: float):
    """A run that returns amount / second."""

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            output = work()
        jax.block_until_ready(output)
        return amount * _ROUNDS / (time.perf_counter() - begin)

    return run


def copy_bandwidth(num_bytes: int, warm_up_s: float):
    """Bytes read and written a second."""
    source = jax.random.normal(jax.random.key(0), (num_bytes // 4,), jnp.float32)
    negate = jax.jit(lambda x: -x)
    run = _rate(lambda: negate(source), 2 * source.nbytes)
    return measure(run, run, warm_up_s)


def matmul_rate(size: int, warm_up_s: float):
    """Floating-point operations a second of a square product of normal bf16 numbers."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    multiply = jax.jit(jnp.matmul)
    run = _rate(lambda: multiply(a, b), 2 * size**3)
    return measure(run, run, warm_up_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy-bytes", type=int, default=2 << 30)
    parser.add_argument("--matmul-size", type=int, default=8192)
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--output", type=Path, default=Path("bench/results/ceilings.json"))
    args = parser.parse_args()
    copy = copy_bandwidth(args.copy_bytes, args.warm_up_s)
    matmul = matmul_rate(args.matmul_size, args.warm_up_s)
    result = describe(os.cpu_count()) | {
        "benchmark": "ceilings",
        "copy_bytes_per_s": copy.value,
        "matmul_flops_per_s": matmul.value,
        "rows": {"copy": copy.as_json(), "matmul": matmul.as_json()},
        "spread": max(copy.spread, matmul.spread),
        "flagged": copy.flagged or matmul.flagged,
    }
    write_result(args.output, result)


if __name__ == "__main__":
    main()

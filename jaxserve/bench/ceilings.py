"""What the first device can do at most: copy, and multiply matrices."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxserve.bench.timing import Row, measure

COPY_BYTES, MATMUL_SIZE, WARM_UP_S = 2 << 30, 8192, 3.0
_ROUNDS = 20


def _rate(work: Callable[[], jax.Array], amount: float) -> Callable[[], float]:
    """A run that returns amount / second."""

    def run() -> float:
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            output = work()
        jax.block_until_ready(output)
        return amount * _ROUNDS / (time.perf_counter() - begin)

    return run


def copy_bandwidth(num_bytes: int = COPY_BYTES, warm_up_s: float = WARM_UP_S) -> Row:
    """Bytes read and written a second."""
    source = jax.random.normal(jax.random.key(0), (num_bytes // 4,), jnp.float32)
    negate = jax.jit(lambda x: -x)
    run = _rate(lambda: negate(source), 2 * source.nbytes)
    return measure(run, run, warm_up_s)


def matmul_rate(size: int = MATMUL_SIZE, warm_up_s: float = WARM_UP_S) -> Row:
    """Floating-point operations a second of a square product of normal bf16 numbers."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    multiply = jax.jit(jnp.matmul)
    run = _rate(lambda: multiply(a, b), 2 * size**3)
    return measure(run, run, warm_up_s)

"""Energy of the kernels that a large decode batch waits for, at the GPU's power limit.

    PYTHONPATH=. python bench/energy.py --output energy.json

Each row runs one kernel again and again, over weights or caches that together exceed the L2 cache,
until clock and power have settled: microseconds and millijoules a call, by the driver's readings of
power. The shapes are Llama 3.1 8B's. Products are the engine's choice and XLA's; decode attention
is over cache blocks of two sizes. A kernel that is faster by itself, but needs as much energy, does
not make a step shorter that draws all the power there is.
"""

import argparse
import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from linear import PRODUCTS
from paged_attention import LLAMA_8B, Timer, Work, shape_of

from jaxserve.bench.environment import describe
from jaxserve.bench.timing import Row, measure
from jaxserve.engine.programs import GPU_OPTIONS
from pallas_kernels.linear import linear, linear_parts
from pallas_kernels.paged_attention import gpu, tuning

PASS_S = 1.5
WARM_UP_S = 2.0
ROTATED_BYTES = 2e9
"""Of weights: several times the L2 cache."""


def seconds_of(one: Callable, shared: Any, varied: Sequence[Any]) -> Row:
    """Seconds of `one(shared, item)`, over the items in turn."""

    def all_of_them(shared, varied, _):
        made = []
        for item in varied:
            # XLA makes one product of several that have the same tokens.
            shared = lax.optimization_barrier(shared)
            made.append(one(shared, item))
        return made

    outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                           jax.eval_shape(all_of_them, shared, varied, None))  # fmt: skip
    # Outputs where the last ones were: else each call's graph is recorded anew.
    jitted = jax.jit(all_of_them, donate_argnums=2, keep_unused=True)
    program = jitted.lower(shared, varied, outputs).compile(GPU_OPTIONS)

    def run() -> float:
        nonlocal outputs
        num_calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < PASS_S:
            for _ in range(10):
                outputs = program(shared, varied, outputs)
            jax.block_until_ready(outputs)
            num_calls += 10 * len(varied)
        return (time.perf_counter() - begin) / num_calls

    return measure(run, run, WARM_UP_S)


def products(num_tokens: int) -> Iterator[tuple[str, Row]]:
    layer = [p for p in PRODUCTS if p.name.startswith("8B") and not p.is_head]
    for product in layer:
        num_weights = max(4, round(ROTATED_BYTES / (2 * product.out_size * product.in_size)))
        keys = jax.random.split(jax.random.key(0), 1 + num_weights)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        x = normal(keys[0], (num_tokens, product.in_size))
        weights = [normal(key, (product.out_size, product.in_size)) for key in keys[1:]]
        for impl in ("mosaic", "reference"):
            one = functools.partial(linear_parts, impl=impl)
            if product.kind == "gated":
                one = functools.partial(linear, gated=True, impl=impl)
            yield f"{product.name}, {num_tokens} tokens, {impl}", seconds_of(one, x, weights)


def attention(num_rows: int, context: int) -> Iterator[tuple[str, Row]]:
    """Contexts within 32 tokens of the mean, so that blocks end anywhere."""
    chosen = random.Random(0)
    rows = tuple((1, context + chosen.randrange(-32, 32)) for _ in range(num_rows))
    for block_size in (16, 64):
        work = Work(f"decode-{num_rows}x{context}", rows, *LLAMA_8B, block_size)
        timer = Timer(work)
        for impl in ("mosaic", "triton"):
            choice = tuning.choose(impl, jax.devices()[0].compute_capability, shape_of(work))
            call = functools.partial(gpu.paged_attention, choice=choice, **timer.options)
            row = seconds_of(
                lambda arguments, cache, call=call: call(**arguments, kv_cache=cache),
                timer.arguments,
                timer.caches,
            )
            yield f"decode attention, {num_rows} x {context}, blocks of {block_size}, {impl}", row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tokens", type=int, default=256, help="rows of the decode batch")
    parser.add_argument("--context", type=int, default=800, help="tokens, over 32")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if args.num_tokens < 1 or args.context <= 32:
        parser.error("--num-tokens must be at least 1 and --context over 32")
    if jax.default_backend() != "gpu":
        raise SystemExit("energy is a GPU's: this machine's JAX has none")
    result = describe(threads=1) | {"benchmark": "energy", "rows": []}
    for work in (attention(args.num_tokens, args.context), products(args.num_tokens)):
        for name, row in work:
            if row.clock["power_w"] is None:
                raise SystemExit("this GPU's driver does not tell its power")
            figures = {
                "what": name,
                "us": round(row.value * 1e6, 2),
                "mj": round(row.value * row.clock["power_w"] * 1e3, 2),
                "spread": row.spread,
                "flagged": row.flagged,
                **row.clock,
            }
            print(json.dumps(figures), flush=True)
            result["rows"].append(figures)
            args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Energy of the kernels that large steps wait for, at the GPU's power limit.

    PYTHONPATH=. python bench/energy.py --num-tokens 256 512 8192 --output energy.json

Each row runs one kernel again and again, over weights or caches that together exceed the L2 cache,
until clock and power have settled: microseconds and millijoules a call, by the driver's readings of
power. The shapes are Llama 3.1 8B's. A layer's products are as the engine has them and in the
likeliest other ways, o and down with the norm that follows them; decode attention is over cache
blocks of two sizes. A kernel that is faster in a short run, but needs more energy, makes a step
longer that draws all the power there is.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from linear import EPS, HEAD_TOKENS, PRODUCTS
from linear_cuts import Product, candidates
from paged_attention import LLAMA_8B, Timer, Work, shape_of

from jaxserve.bench.environment import describe
from jaxserve.bench.timing import Row, measure
from jaxserve.engine.programs import GPU_OPTIONS
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.linear import linear_add_rms_norm, mosaic_kernel, reference
from pallas_kernels.linear import tuning as linear_tuning
from pallas_kernels.paged_attention import gpu, tuning

PASS_S = 1.5
WARM_UP_S = 2.0
ROTATED_BYTES = 2e9
"""Of weights: several times the L2 cache."""
BEFORE_NORM = (" o", " down")
"""Ends of names of products that the residual sum and a norm follow."""


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


def products(num_tokens: int, num_others: int) -> Iterator[tuple[dict[str, Any], Row]]:
    """Each of a layer's products, as the engine has it and in `num_others` other ways: (what it is,
    seconds of a call). XLA's comes first of those, with o and down also where it is the engine's,
    which may have it add the residual."""
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    layer = [p for p in PRODUCTS if p.name.startswith("8B") and p.kind in ("gated", "parts")]
    for product in layer:
        num_weights = max(4, round(ROTATED_BYTES / (2 * product.out_size * product.in_size)))
        keys = jax.random.split(jax.random.key(0), 1 + num_weights)
        weights = [normal(key, (product.out_size, product.in_size)) for key in keys[1:]]
        residual = jnp.ones((num_tokens, product.out_size), jnp.bfloat16)
        shared = (normal(keys[0], (num_tokens, product.in_size)), residual, residual[0])
        capability = jax.devices()[0].compute_capability
        chosen = linear_tuning.choose(capability, product.shape(num_tokens))
        before_norm = product.name.endswith(BEFORE_NORM)
        engines = (
            multiply_as_engine if before_norm else functools.partial(multiply, product, chosen)
        )
        others = dict.fromkeys([None, *candidates(product, num_tokens)])
        others = [cut for cut in others if before_norm or cut != chosen][:num_others]
        ways = [(cut, functools.partial(multiply, product, cut)) for cut in others]
        for cut, call in [(chosen, engines), *ways]:
            what = {
                "what": f"{product.name}, {num_tokens} tokens",
                "kernel": "XLA" if cut is None else dataclasses.asdict(cut),
                "chosen": call is engines,
            }
            yield what, seconds_of(call, shared, weights)


def multiply_as_engine(shared: tuple, weight: jax.Array) -> jax.Array:
    """The norm [T, O] after o or down with a weight [O, I], as the engine's layers have it.

    `shared`: tokens [T, I], residual [T, O] and the norm's weight [O].
    """
    x, residual, norm_weight = shared
    arrived = jnp.zeros(norm_weight.shape, jnp.int32)
    arguments = x, weight, residual, norm_weight, arrived
    return linear_add_rms_norm(*arguments, eps=EPS, impl="mosaic")[1]


def multiply(
    product: Product, cut: linear_tuning.MosaicTiling | None, shared: tuple, weight: jax.Array
) -> jax.Array:
    """The product in parts [S, T, P] with a weight [O, I]; of o and down the norm [T, O] of their
    sum with the residual. `cut` None: XLA's. `shared`: as above."""
    x, residual, norm_weight = shared
    gated = product.kind == "gated"
    if cut is None:
        parts = reference.linear(x, weight, gated=gated, out_dtype=x.dtype)[None]
    else:
        out_dtype = product.out_dtype(cut.splits)
        parts = mosaic_kernel.linear(x, weight, gated=gated, out_dtype=out_dtype, tiling=cut)
    if product.name.endswith(BEFORE_NORM):
        return add_rms_norm(residual, parts, norm_weight, eps=EPS, impl="triton")[1]
    return parts


def attention(num_rows: int, context: int) -> Iterator[tuple[dict[str, Any], Row]]:
    """Decode attention of so many rows: (what it is, seconds of a call). Contexts are within 32
    tokens of the mean, so that blocks end anywhere."""
    rng = random.Random(0)
    rows = tuple((1, context + rng.randrange(-32, 32)) for _ in range(num_rows))
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
            what = f"decode attention, {num_rows} x {context}, blocks of {block_size}"
            yield {"what": what, "kernel": impl, "chosen": impl == "mosaic"}, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[256], help="of a step")
    parser.add_argument("--context", type=int, default=800, help="of a decode row, over 32 tokens")
    parser.add_argument("--others", type=int, default=1, help="ways beside the engine's, a product")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if min(args.num_tokens) <= linear_tuning.MAX_TOKENS or args.context <= 32 or args.others < 0:
        parser.error(
            f"--num-tokens must be over {linear_tuning.MAX_TOKENS}, --context over 32 and --others "
            "at least 0"
        )
    if not args.output.parent.is_dir():
        parser.error(f"--output is in a folder that is not there: {args.output.parent}")
    if jax.default_backend() != "gpu":
        raise SystemExit("energy is a GPU's: this machine's JAX has none")
    result = describe(threads=1) | {"benchmark": "energy", "rows": []}
    for num_tokens in args.num_tokens:
        works = [products(num_tokens, args.others)]
        if num_tokens <= HEAD_TOKENS:
            works.append(attention(num_tokens, args.context))
        for what, row in itertools.chain(*works):
            if row.clock["power_w"] is None:
                raise SystemExit("this GPU's driver does not tell its power")
            figures = what | {
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

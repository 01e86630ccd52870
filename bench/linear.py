"""Device time of products with a weight, ours and XLA's, on one GPU.

    PYTHONPATH=. python bench/linear.py --output bench/results/linear_h200.json
    PYTHONPATH=. python bench/linear.py --tokens 128 256 512 1024 2048 8192 \\
        --output bench/results/linear_many_h200.json
    PYTHONPATH=. python bench/linear.py --kinds normed --tokens 1 \\
        --output bench/results/linear_normed_h200.json
    PYTHONPATH=. python bench/linear.py --tune --output ...

Ours is Triton's, and for more than `tuning.MAX_TOKENS` tokens Mosaic GPU's, on Hopper.

Each kernel is checked against plain JAX, then called with weights in turn that together exceed the
L2 cache; times are the profiler's, medians of two passes. XLA's side is what the engine would run:
cuBLAS's first choice, with XLA's own kernel for the gate after it; the gap between two kernels of a
graph is counted with it. Of kind "normed", a product with the residual sum and the norm after it,
the other side is the two kernels that are run where it is not chosen.

`--tune` first times candidates and writes the fastest to `pallas_kernels/linear/tuning.json`, which
the kernels read; it keeps what other GPUs measured there, and the entries of the kinds and tokens
that were not asked for. Parts are charged for what the next kernel reads of them. These are short
runs: what is chosen for steps that draw all the power a GPU may is to be checked by
`bench/energy.py`, which has found down at 8192 tokens to be better left to XLA.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
from linear_cuts import Product, candidates, parts_s

from jaxserve.bench.ceilings import copy_bandwidth
from jaxserve.bench.environment import describe
from jaxserve.bench.profile import trace
from jaxserve.bench.timing import FLAG_OVER, spread_of
from jaxserve.engine.programs import GPU_OPTIONS
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.linear import (
    linear_parts,
    mosaic_kernel,
    reference,
    triton_add_rms_norm,
    triton_kernel,
    tuning,
)

WARM_UP_S = 0.3
ROTATED_BYTES = 200e6
ROUNDS = 8
GAP_S = 0.4e-6
THREADS = 16
TOKENS = (1, 32, 64)
TIE = 0.98
"""Of XLA's time: nearer than this to it, the product is XLA's, which compiles in less time."""
EPS = 1e-6
HEAD_TOKENS = 512
"""At most for the head: a step has a row for each request."""


PRODUCTS = [
    Product("0.5B qkv", 1152, 896, kind="parts"),
    Product("0.5B o", 896, 896, kind="parts"),
    Product("0.5B gate and up", 9728, 896, kind="gated"),
    Product("0.5B down", 896, 4864, kind="parts"),
    Product("0.5B head", 151936, 896),
    Product("8B qkv", 6144, 4096, kind="parts"),
    Product("8B o", 4096, 4096, kind="parts"),
    Product("8B gate and up", 28672, 4096, kind="gated"),
    Product("8B down", 4096, 14336, kind="parts"),
    Product("8B head", 128256, 4096),
    Product("0.5B o and norm", 896, 896, kind="normed"),
    Product("0.5B down and norm", 896, 4864, kind="normed"),
    Product("8B o and norm", 4096, 4096, kind="normed"),
    Product("8B down and norm", 4096, 14336, kind="normed"),
]


class Inputs:
    """A product's tokens, as many as are asked for at most, and its weights."""

    def __init__(self, product: Product, num_tokens: int) -> None:
        out_size, in_size = product.out_size, product.in_size
        count = min(max(2, round(ROTATED_BYTES / (2 * out_size * in_size))), 100)
        x_key, *keys = jax.random.split(jax.random.key(0), count + 1)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        self.x = normal(x_key, (num_tokens, in_size))
        make = jax.jit(lambda key: normal(key, (out_size, in_size)) * in_size**-0.5)
        self.weights = [make(key) for key in keys]


class Case:
    """One product for so many tokens: our calls in several cuts, and XLA's. They are compiled by
    the pool, all before anything is timed."""

    def __init__(
        self,
        product: Product,
        num_tokens: int,
        cuts: list[tuning.Tiling] | list[tuning.MosaicTiling],
        pool: Executor,
    ) -> None:
        self.product, self.num_tokens, self.cuts = product, num_tokens, cuts
        kernel = mosaic_kernel if num_tokens > tuning.MAX_TOKENS else triton_kernel
        sizes = ((num_tokens, product.in_size), (product.out_size, product.in_size))
        operands = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes]

        def compiled(linear: Callable, splits: int = 1, **options: object) -> jax.stages.Compiled:
            options |= {"gated": product.kind == "gated", "out_dtype": product.out_dtype(splits)}
            call = jax.jit(functools.partial(linear, **options))
            return call.lower(*operands).compile(GPU_OPTIONS)

        def compiled_normed(cut: tuning.Tiling | None = None) -> jax.stages.Compiled:
            call = jax.jit(functools.partial(linear_and_norm, tiling=cut))
            return call.lower(*operands).compile(GPU_OPTIONS)

        if product.kind == "normed":
            self.by_xla = pool.submit(compiled_normed)
            self.by_cut = [pool.submit(compiled_normed, cut) for cut in cuts]
            return
        self.by_xla = pool.submit(compiled, reference.linear)
        self.by_cut = [pool.submit(compiled, kernel.linear, cut.splits, tiling=cut) for cut in cuts]

    def runs(self, inputs: Inputs) -> dict[tuning.Tiling | tuning.MosaicTiling, Callable]:
        """Our calls, of the cuts that need no more shared memory than there is. Raises ValueError
        if one is wrong."""
        x, weight = inputs.x[: self.num_tokens], inputs.weights[0]
        expected = self.by_xla.result()(x, weight)
        calls = {}
        for cut, future in zip(self.cuts, self.by_cut, strict=True):
            try:
                call = future.result()
                found = jax.block_until_ready(call(x, weight))
            except jax.errors.JaxRuntimeError as error:
                print(self.product.name, cut, str(error)[:120], flush=True)
                continue
            error = float(relative_error(found, expected))
            if not error < 2e-2:
                raise ValueError(f"{self.product.name}, {cut}: relative error {error}")
            calls[cut] = call
        return calls

    def seconds(self, calls: list[Callable], inputs: Inputs) -> list[list[float]]:
        """Two passes' medians of each of our calls, then of XLA's: kernels and gaps after them."""
        x, weights = inputs.x[: self.num_tokens], inputs.weights
        rounds = max(2, ROUNDS // len(weights))
        num_calls = rounds * len(weights)

        def run():
            for call in (*calls, self.by_xla.result()):
                for _ in range(rounds):
                    for weight in weights:
                        done = call(x, weight)
            return done

        begin = time.monotonic()
        while time.monotonic() - begin < WARM_UP_S:
            jax.block_until_ready(run())
        # But for the zeros to count with, which a step makes once.
        durations = [
            event.duration_ns / 1e9
            for event in trace(lambda: (run(), run()))
            if "broadcast" not in event.name
        ]
        times = [[] for _ in (*calls, self.by_xla)]
        half = len(durations) // 2
        for passed in (durations[:half], durations[half:]):
            for i, taken in enumerate(times):
                # Each of ours is one kernel.
                first = i * num_calls
                mine = passed[first : first + num_calls if i < len(calls) else None]
                per_call = len(mine) // num_calls
                sums = [sum(mine[k * per_call : (k + 1) * per_call]) for k in range(num_calls)]
                taken.append(statistics.median(sums) + per_call * GAP_S)
        return times


def linear_and_norm(x: jax.Array, weight: jax.Array, *, tiling: tuning.Tiling | None) -> jax.Array:
    """The norm by one kernel; without a tiling by those that the engine runs then."""
    residual = jnp.ones((len(x), len(weight)), x.dtype)
    norm_weight = jnp.ones((len(weight),), x.dtype)
    if tiling is None:
        parts = linear_parts(x, weight, impl="triton")
        return add_rms_norm(residual, parts, norm_weight, eps=EPS, impl="triton")[1]
    counters = jnp.zeros((len(weight),), jnp.int32)
    return triton_add_rms_norm.linear_add_rms_norm(
        x, weight, residual, norm_weight, counters, eps=EPS, tiling=tiling
    )[1]


@jax.jit
def relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Of `found`, in one part or several."""
    found = found.astype(jnp.float32).reshape(-1, *expected.shape).sum(0)
    expected = expected.astype(jnp.float32)
    return jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)


def speed(product: Product, num_tokens: int, kernel_s: float, copy_bytes_per_s: float) -> dict:
    """What bounds a product: arithmetic, or reading the weight."""
    values = product.out_size * product.in_size
    if num_tokens > tuning.MAX_TOKENS:
        return {"tflop_per_s": round(2 * num_tokens * values / kernel_s / 1e12, 1)}
    return {"of_copy_bandwidth": round(2 * values / kernel_s / copy_bytes_per_s, 3)}


def tuned(
    product: Product,
    num_tokens: int,
    capability: str,
    cut: tuning.Tiling | tuning.MosaicTiling | None,
) -> dict:
    """An entry of `tuning.json`."""
    return {
        "compute_capability": capability,
        "kind": product.kind,
        **entry_tokens(num_tokens),
        "out_size": product.out_size,
        "in_size": product.in_size,
        "tiling": cut and dataclasses.asdict(cut),
    }


def entry_tokens(num_tokens: int) -> dict[str, int]:
    """As an entry of `tuning.json` has it."""
    if num_tokens > tuning.MAX_TOKENS:
        return {"min_tokens": num_tokens}
    return {"tile_tokens": PRODUCTS[0].shape(num_tokens).tile_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="write tuning.json first")
    parser.add_argument("--output", type=Path, required=True, help="the result file")
    parser.add_argument("--kinds", nargs="+", default=["plain", "gated", "parts"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    capability = jax.devices()[0].compute_capability
    if capability != "9.0" and max(args.tokens) > tuning.MAX_TOKENS:
        parser.error(
            f"more than {tuning.MAX_TOKENS} tokens need a GPU of compute capability 9.0, "
            f"not {capability}"
        )
    path = Path(tuning.__file__).with_name("tuning.json")
    entries = [
        entry
        for entry in json.loads(path.read_text())["entries"]
        if entry["compute_capability"] != capability
        or entry["kind"] not in args.kinds
        or not any(entry_tokens(number).items() <= entry.items() for number in args.tokens)
    ]
    result = describe(threads=1) | {
        "benchmark": "linear",
        "gpu": jax.devices()[0].device_kind,
        "copy_bytes_per_s": copy_bandwidth().value,
        "rows": [],
    }

    def cuts(product: Product, num_tokens: int) -> list[tuning.Tiling] | list[tuning.MosaicTiling]:
        likely = candidates(product, num_tokens)
        if args.tune:
            return likely
        # Where that is XLA's, one to compare.
        return [tuning.choose(capability, product.shape(num_tokens)) or likely[0]]

    with ThreadPoolExecutor(THREADS) as pool:
        cases = {
            product: [
                Case(product, num_tokens, cuts(product, num_tokens), pool)
                for num_tokens in args.tokens
                if not product.is_head or num_tokens <= HEAD_TOKENS
            ]
            for product in PRODUCTS
            if product.kind in args.kinds
        }
    for product, by_tokens in cases.items():
        inputs = Inputs(product, max(args.tokens))
        for case in by_tokens:
            calls = case.runs(inputs)
            *times, xla_times = case.seconds(list(calls.values()), inputs)

            def cost(pair: tuple, product=product, num_tokens=case.num_tokens) -> float:
                taken, cut = pair
                return min(taken) + parts_s(product, num_tokens, cut.splits)

            fastest = min(zip(times, calls, strict=True), key=cost)
            best, cut = fastest
            spread = max(spread_of(best), spread_of(xla_times))
            row = {
                "product": product.name,
                "num_tokens": case.num_tokens,
                "time_us": round(1e6 * min(best), 2),
                "xla_time_us": round(1e6 * min(xla_times), 2),
                "tiling": dataclasses.asdict(cut),
                "spread": spread,
                "flagged": spread > FLAG_OVER,
            } | speed(product, case.num_tokens, min(best) - GAP_S, result["copy_bytes_per_s"])
            print(json.dumps(row | {"all": [round(1e6 * min(t), 1) for t in times]}), flush=True)
            result["rows"].append(row)
            # After each row, so that an interrupted run keeps its rows.
            args.output.write_text(json.dumps(result, indent=2) + "\n")
            if args.tune:
                faster = cost(fastest) < TIE * min(xla_times)
                entries.append(tuned(product, case.num_tokens, capability, cut if faster else None))
                path.write_text(json.dumps({"entries": entries}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Device time of products with a weight, ours and XLA's, on one GPU.

    PYTHONPATH=. python bench/linear.py --output bench/results/linear_h200.json
    PYTHONPATH=. python bench/linear.py --kinds gated --tokens 2048 8192 \\
        --output bench/results/linear_prefill_h200.json
    PYTHONPATH=. python bench/linear.py --tune --output ...

From PREFILL_TOKENS on ours is Mosaic GPU's product with its gate, on Hopper; other kinds have none.

Each kernel is checked against plain JAX, then called with weights in turn that together exceed the
L2 cache; times are the profiler's, medians of two passes. XLA's side is cuBLAS, with XLA's own
kernel for the gate after it: the gap between two kernels of a graph is counted with it.

`--tune` first times candidates and writes the fastest to `pallas_kernels/linear/tuning.json`, which
the kernels read; it keeps what other GPUs measured there, and the entries of the kinds and tokens
that were not asked for.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.bench.ceilings import copy_bandwidth
from jaxserve.bench.environment import describe
from jaxserve.bench.profile import trace
from jaxserve.bench.timing import FLAG_OVER, spread_of
from pallas_kernels.linear import mosaic_gated, reference, triton_kernel, tuning

WARM_UP_S = 1.0
ROTATED_BYTES = 200e6
ROUNDS = 8
GAP_S = 0.4e-6
THREADS = 16
TOKENS = (1, 32, 64, 128)
CUTS = [
    tuning.Tiling(16, 256, 4, 4), tuning.Tiling(16, 256, 4, 6), tuning.Tiling(16, 512, 4, 3),
    tuning.Tiling(32, 128, 4, 4), tuning.Tiling(32, 256, 4, 3), tuning.Tiling(64, 128, 4, 4),
    tuning.Tiling(64, 64, 4, 5), tuning.Tiling(128, 64, 4, 4),
]  # fmt: skip


PARTS_CUTS = [
    tuning.Tiling(16, 256, 4, 4),
    tuning.Tiling(32, 128, 4, 4),
    tuning.Tiling(32, 256, 4, 3),
    tuning.Tiling(64, 128, 4, 3),
]
SPLITS = (1, 2, 4, 8)
MANY_TOKENS = 128
MANY_CUTS = [
    tuning.Tiling(64, 64, 4, 4), tuning.Tiling(64, 64, 8, 4), tuning.Tiling(64, 128, 4, 3),
    tuning.Tiling(128, 64, 8, 3), tuning.Tiling(128, 64, 8, 4), tuning.Tiling(128, 64, 4, 4),
    tuning.Tiling(32, 128, 4, 4),
]  # fmt: skip
MANY_SPLITS = (1, 2, 4)
"""From MANY_TOKENS on."""
PREFILL_TOKENS = 256
PREFILL_CUTS = [
    tuning.MosaicTiling(128, 128, 4, band, cluster) for band in (4, 8, 16) for cluster in (1, 2)
] + [tuning.MosaicTiling(256, 64, 4, band=8, cluster=cluster) for cluster in (1, 2)]


@dataclasses.dataclass(frozen=True)
class Product:
    """One of a layer's products, or the head's."""

    name: str
    out_size: int
    in_size: int
    kind: tuning.Kind = "plain"


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
]


class Timer:
    """The inputs of one product for so many tokens, and the right answer."""

    def __init__(self, product: Product, num_tokens: int) -> None:
        self.product, self.num_tokens = product, num_tokens
        out_size, in_size = product.out_size, product.in_size
        count = min(max(2, round(ROTATED_BYTES / (2 * out_size * in_size))), 100)
        x_key, *keys = jax.random.split(jax.random.key(0), count + 1)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        self.x = normal(x_key, (num_tokens, in_size))
        make = jax.jit(lambda key: normal(key, (out_size, in_size)) * in_size**-0.5)
        self.weights = [make(key) for key in keys]
        out_dtype = jnp.dtype("float32" if "head" in product.name else "bfloat16")
        self.options = {"gated": product.kind == "gated", "out_dtype": out_dtype}
        self.by_xla = self._compile(functools.partial(reference.linear, **self.options))
        self.expected = self.by_xla(self.x, self.weights[0]).astype(jnp.float32)

    def _compile(self, product: Callable) -> Callable:
        lowered = jax.jit(product).lower(self.x, self.weights[0])
        return lowered.compile({"xla_gpu_enable_triton_gemm": False})

    def compiled(self, tiling: tuning.Tiling | tuning.MosaicTiling) -> Callable | None:
        """Our call; None if it needs more shared memory than there is."""
        call = self._compile(
            functools.partial(mosaic_gated.gated_linear, tiling=tiling)
            if isinstance(tiling, tuning.MosaicTiling)
            else functools.partial(triton_kernel.linear, tiling=tiling, **self.options)
        )
        try:
            found = jax.block_until_ready(call(self.x, self.weights[0]))
        except jax.errors.JaxRuntimeError as error:
            print(self.product.name, tiling, str(error)[:120], flush=True)
            return None
        found = found.astype(jnp.float32).reshape(-1, *self.expected.shape).sum(0)
        error = jnp.linalg.norm(found - self.expected)
        error = float(error / jnp.linalg.norm(self.expected))
        if not error < 2e-2:
            raise ValueError(f"{self.product.name}, {tiling}: relative error {error}")
        return call

    def seconds(self, ours: list[Callable]) -> list[list[float]]:
        """Two passes' medians of each of our calls, then of XLA's: kernels and gaps after them."""
        rounds = max(2, ROUNDS // len(self.weights))
        num_calls = rounds * len(self.weights)

        def run():
            for call in (*ours, self.by_xla):
                for _ in range(rounds):
                    for weight in self.weights:
                        done = call(self.x, weight)
            return done

        begin = time.monotonic()
        while time.monotonic() - begin < WARM_UP_S:
            jax.block_until_ready(run())
        times = [[] for _ in (*ours, self.by_xla)]
        for _ in range(2):
            durations = [event.duration_ns / 1e9 for event in trace(run)]
            for i, taken in enumerate(times):
                # Each of ours is one kernel.
                first = i * num_calls
                mine = durations[first : first + num_calls if i < len(ours) else None]
                per_call = len(mine) // num_calls
                sums = [sum(mine[k * per_call : (k + 1) * per_call]) for k in range(num_calls)]
                taken.append(statistics.median(sums) + per_call * GAP_S)
        return times


def candidates(
    tune: bool, shape: tuning.Shape, capability: str
) -> list[tuning.Tiling] | list[tuning.MosaicTiling]:
    """The cuts to time: with `tune` all that may be the fastest, else the one chosen, or where that
    is XLA's one to compare."""
    chosen = tuning.choose(capability, shape)
    if shape.num_tokens >= PREFILL_TOKENS:
        fitting = [cut for cut in PREFILL_CUTS if tuning.fits_mosaic(shape, cut)]
        return fitting if tune else [chosen or fitting[0]]
    if not tune:
        return [chosen or tuning.DEFAULT]
    many = shape.num_tokens >= MANY_TOKENS
    if shape.kind != "parts":
        return MANY_CUTS if many else CUTS
    cuts, numbers = (MANY_CUTS, MANY_SPLITS) if many else (PARTS_CUTS, SPLITS)
    return [dataclasses.replace(cut, splits=splits) for cut in cuts for splits in numbers]


def tokens_of(entry: dict) -> int:
    return entry["min_tokens"] if "min_tokens" in entry else entry["tile_tokens"]


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
    path = Path(tuning.__file__).with_name("tuning.json")
    entries = [
        entry
        for entry in json.loads(path.read_text())["entries"]
        if entry["compute_capability"] != capability
        or entry["kind"] not in args.kinds
        or tokens_of(entry) not in args.tokens
    ]
    result = describe(threads=1) | {
        "benchmark": "linear",
        "gpu": jax.devices()[0].device_kind,
        "copy_bytes_per_s": copy_bandwidth().value,
        "rows": [],
    }
    for product in (p for p in PRODUCTS if p.kind in args.kinds):
        for num_tokens in args.tokens:
            if num_tokens >= PREFILL_TOKENS and product.kind != "gated":
                continue
            shape = tuning.Shape(
                product.kind, num_tokens, product.out_size, product.in_size, "bfloat16"
            )
            timer = Timer(product, num_tokens)
            cuts = candidates(args.tune, shape, capability)
            with ThreadPoolExecutor(THREADS) as pool:
                ours = list(pool.map(timer.compiled, cuts))
            runs = [(cut, call) for cut, call in zip(cuts, ours, strict=True) if call]
            *times, xla_times = timer.seconds([call for _, call in runs])
            best, (cut, _) = min(zip(times, runs, strict=True), key=lambda pair: min(pair[0]))
            spread = max(spread_of(best), spread_of(xla_times))
            values = product.out_size * product.in_size
            kernel_s = min(best) - GAP_S
            speed = (
                {"tflop_per_s": round(2 * num_tokens * values / kernel_s / 1e12, 1)}
                if num_tokens >= PREFILL_TOKENS
                else {
                    "of_copy_bandwidth": round(
                        2 * values / kernel_s / result["copy_bytes_per_s"], 3
                    )
                }
            )
            row = {
                "product": product.name,
                "num_tokens": num_tokens,
                "time_us": round(1e6 * min(best), 2),
                "xla_time_us": round(1e6 * min(xla_times), 2),
                "tiling": dataclasses.asdict(cut),
                "spread": spread,
                "flagged": spread > FLAG_OVER,
            } | speed
            print(json.dumps(row | {"all": [round(1e6 * min(t), 1) for t in times]}), flush=True)
            result["rows"].append(row)
            # After each row: a machine lent for minutes may go away.
            args.output.write_text(json.dumps(result, indent=2) + "\n")
            if args.tune:
                tokens = (
                    {"min_tokens": num_tokens}
                    if num_tokens >= PREFILL_TOKENS
                    else {"tile_tokens": shape.tile_tokens}
                )
                entries.append(
                    {"compute_capability": capability}
                    | tokens
                    | {
                        "kind": product.kind,
                        "out_size": product.out_size,
                        "in_size": product.in_size,
                        "tiling": dataclasses.asdict(cut) if min(best) < min(xla_times) else None,
                    }
                )
                path.write_text(json.dumps({"entries": entries}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Device time of paged attention on one GPU, against its copy bandwidth and GEMM rate.

    python bench/paged_attention.py --output bench/results/paged_attention_h200.json
    python bench/paged_attention.py --output skewed.json --only skewed
    python bench/paged_attention.py --tune

Each row is checked against plain JAX, warmed up, and timed in two passes over caches that
together exceed the L2 cache. Times are the profiler's, of the attention kernels alone, and of the
faster pass; `spread` says how much slower the other was. Decode is held against bytes of context
read, prefill against the operations of causal attention. The contexts of a skewed batch are spread
as in chat traffic; the decode batch of the same size and mean follows it.

`--tune` times candidates and writes the fastest to `pallas_kernels/paged_attention/tuning.json`,
which the kernels read; it keeps what other GPUs measured there.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.ceilings import copy_bandwidth, matmul_rate
from jaxserve.bench.environment import describe
from jaxserve.bench.profile import trace
from jaxserve.bench.timing import FLAG_OVER, spread_of
from pallas_kernels.paged_attention import gpu, paged_attention, tuning

KERNELS = ("_attend", "paged_decode", "paged_prefill")
WARM_UP_S = 0.3
ROTATED_BYTES = 400e6
MOSAIC_DECODE_WORK = {128: 32 * 8, 64: 0}
"""By head size, the rows times kv heads from which on Mosaic is to be taken. With fewer its blocks
share the pieces of the contexts unevenly."""
MOSAIC_PREFILL_WORK = {128: 2048 * 8, 64: 4096 * 8}
"""Likewise the tokens times kv heads: with fewer a step gains too little for the seconds that each
start compiles it."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One batch: rows of (queries, context), decode rows first."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def num_decode(self) -> int:
        return sum(count == 1 for count, _ in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(count for count, _ in self.rows)

    @property
    def context_bytes(self) -> int:
        contexts = sum(context for _, context in self.rows)
        return contexts * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def operations(self) -> int:
        """Of both matrix products, for the query and key pairs that causal attention keeps."""
        pairs = sum(count * (context - (count - 1) / 2) for count, context in self.rows)
        return round(4 * pairs * self.num_heads * self.head_dim)


LLAMA_8B, QWEN_05B = (32, 8, 128), (14, 2, 64)
UNEQUAL = ((12, 1903, 3169), (32, 1419, 2773), (63, 1143, 2541), (128, 846, 2459),
           (254, 630, 2361), (511, 399, 2111))  # fmt: skip
"""(rows, mean context, longest context) of decode batches met in ShareGPT's conversations."""


def decode(batch: int, context: int, heads: tuple[int, int, int], block_size: int) -> Work:
    return Work(f"decode-{batch}x{context}", ((1, context),) * batch, *heads, block_size)


def skewed(
    batch: int, mean: int, longest: int, heads: tuple[int, int, int], block_size: int
) -> Work:
    """Contexts at the quantiles of the lognormal of this mean and maximum, in random order."""
    normal = [statistics.NormalDist().inv_cdf((i + 0.5) / batch) for i in range(batch)]
    for sigma in np.arange(0, 3, 0.01):
        contexts = np.exp(sigma * np.array(normal))
        contexts *= mean / contexts.mean()
        if contexts.max() >= longest:
            break
    contexts = np.random.default_rng(0).permutation(contexts.round().astype(int))
    rows = tuple((1, context) for context in contexts.tolist())
    return Work(f"skewed-{batch}x{mean}", rows, *heads, block_size)


def prefill(length: int, heads: tuple[int, int, int], block_size: int) -> Work:
    return Work(f"prefill-{length}", ((length, length),), *heads, block_size)


def prompts(count: int, length: int, heads: tuple[int, int, int], block_size: int) -> Work:
    rows = ((length, length),) * count
    return Work(f"prefill-{count}x{length}", rows, *heads, block_size)


def mixed(heads: tuple[int, int, int], block_size: int) -> Work:
    rows = ((1, 1024),) * 128 + ((1920, 3968),)
    return Work("128 decode rows, chunk of 1920", rows, *heads, block_size)


def make_inputs(work: Work) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """Arguments of one call, and several caches of N(0, 1) to call it with in turn."""
    rng = np.random.default_rng(0)
    size = work.block_size
    owned = [-(-context // size) for _, context in work.rows]
    num_blocks = sum(owned) + 1
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(work.rows), max(owned)), np.int32)
    for table, blocks in zip(tables, owned, strict=True):
        table[:blocks] = list(itertools.islice(free, blocks))
    q_key, cache_key = jax.random.split(jax.random.key(0))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    starts = np.cumsum([0] + [count for count, _ in work.rows])
    arguments = {
        "q": normal(q_key, (work.num_tokens, work.num_heads, work.head_dim)),
        "counters": jnp.zeros((work.num_tokens + 1, work.num_kv_heads), jnp.int32),
        "block_tables": jnp.asarray(tables),
        "query_starts": jnp.asarray(starts, jnp.int32),
        "context_lens": jnp.asarray([context for _, context in work.rows], jnp.int32),
        "num_decode_rows": jnp.int32(work.num_decode),
    }
    shape = (num_blocks, work.num_kv_heads, 2, size, work.head_dim)
    num_caches = max(2, round(ROTATED_BYTES / work.context_bytes))
    keys = jax.random.split(cache_key, min(num_caches, 100))
    return arguments, [normal(key, shape) for key in keys]


def shape_of(work: Work) -> tuning.Shape:
    return tuning.Shape(
        work.num_tokens,
        len(work.rows),
        work.num_heads,
        work.num_kv_heads,
        work.head_dim,
        work.block_size,
        max(-(-context // work.block_size) for _, context in work.rows),
        "bfloat16",
    )


class Timer:
    """The inputs of one piece of work, and the right answer."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.arguments, self.caches = make_inputs(work)
        self.options = {"scale": work.head_dim**-0.5, "sliding_window": None}
        reference = jax.jit(functools.partial(paged_attention, impl="reference", **self.options))
        self.expected = reference(**self.arguments, kv_cache=self.caches[0])

    def seconds(self, choice: tuning.Choice) -> list[float]:
        """Medians of two passes over the caches; ValueError if the output is wrong."""
        call = jax.jit(functools.partial(gpu.paged_attention, choice=choice, **self.options))

        def run():
            for cache in self.caches:
                out = call(**self.arguments, kv_cache=cache)
            return out

        out = call(**self.arguments, kv_cache=self.caches[0])
        error = jnp.linalg.norm((out - self.expected).astype(jnp.float32))
        error /= jnp.linalg.norm(self.expected.astype(jnp.float32))
        if not error < 1e-2:
            raise ValueError(f"{self.work.name}: relative error {error} with {choice}")
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARM_UP_S:
            jax.block_until_ready(run())
        return [self._one_pass(run) for _ in range(2)]

    def _one_pass(self, run) -> float:
        rounds = 3 if len(self.caches) < 10 else 1
        times: dict[str, list[float]] = defaultdict(list)
        for event in trace(lambda: [run() for _ in range(rounds)]):
            if any(kernel in event.name for kernel in KERNELS):
                times[event.name].append(event.duration_ns / 1e9)
        # A call runs one kernel for decode rows and one for prefill rows: by turns, if both are
        # the same kernel.
        calls = rounds * len(self.caches)
        per_call = [0.0] * calls
        for values in times.values():
            for i, value in enumerate(values):
                per_call[i * calls // len(values)] += value
        return statistics.median(per_call)


def figures(work: Work, passes: list[float], ceilings: dict[str, float]) -> dict:
    seconds, spread = min(passes), spread_of(passes)
    result = {
        "workload": work.name,
        "num_heads": work.num_heads,
        "num_kv_heads": work.num_kv_heads,
        "head_dim": work.head_dim,
        "block_size": work.block_size,
        "time_us": round(seconds * 1e6, 2),
        "spread": spread,
        "flagged": spread > FLAG_OVER,
    }
    if work.num_decode == len(work.rows):
        bandwidth = work.context_bytes / seconds
        result["tb_per_s"] = round(bandwidth / 1e12, 3)
        result["of_copy_bandwidth"] = round(bandwidth / ceilings["copy_bytes_per_s"], 3)
    elif work.num_decode == 0:
        rate = work.operations / seconds
        result["tflop_per_s"] = round(rate / 1e12, 1)
        result["of_matmul_rate"] = round(rate / ceilings["matmul_flop_per_s"], 3)
    return result


def measure(output: Path, only: str) -> None:
    works = [
        *(decode(b, 1024, LLAMA_8B, 16) for b in (1, 8, 32, 128, 256)),
        decode(128, 4096, LLAMA_8B, 16),
        *(decode(b, 1024, QWEN_05B, 16) for b in (1, 8, 128, 256)),
        *(prefill(n, LLAMA_8B, 64) for n in (8192, 2048)),
        prefill(8192, LLAMA_8B, 16),
        prefill(8192, QWEN_05B, 64),
        *(prompts(16, 512, heads, 16) for heads in (LLAMA_8B, QWEN_05B)),
        mixed(LLAMA_8B, 64),
        *(
            work
            for batch, mean, longest in UNEQUAL
            for work in (
                skewed(batch, mean, longest, LLAMA_8B, 16),
                decode(batch, mean, LLAMA_8B, 16),
            )
        ),
    ]
    device = jax.devices()[0]
    ceilings = {
        "copy_bytes_per_s": copy_bandwidth().value,
        "matmul_flop_per_s": matmul_rate().value,
    }
    result = describe(threads=1) | {
        "benchmark": "paged_attention",
        "gpu": device.device_kind,
        **ceilings,
        "rows": [],
    }
    for work in works:
        if only not in work.name:
            continue
        timer = Timer(work)
        capability, shape = device.compute_capability, shape_of(work)
        # Once, as Triton's, where Mosaic's is not chosen.
        impls = {tuning.choose(impl, capability, shape): impl for impl in ("mosaic", "triton")}
        for choice, impl in impls.items():
            row = {"impl": impl, **figures(work, timer.seconds(choice), ceilings)}
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
            # After each row, so that an interrupted run keeps its rows.
            output.write_text(json.dumps(result, indent=2) + "\n")


def tune() -> None:
    """Write the tiling of least total time for each kind of row, kernel and head size."""
    capability = jax.devices()[0].compute_capability
    path = Path(tuning.__file__).with_name("tuning.json")
    entries = [e for e in json.loads(path.read_text())["entries"]
               if e["compute_capability"] != capability]  # fmt: skip

    def save(entry: dict) -> None:
        entries.append(entry)
        path.write_text(json.dumps({"entries": entries}, indent=2) + "\n")

    decode_cuts = [
        {"tile_k": k, "num_warps": 4, "num_stages": n}
        for k, n in ((64, 3), (64, 4), (128, 2), (128, 3))
    ]
    prefill_cuts = [
        {"tile_rows": 128, "tile_k": k, "num_warps": 8, "num_stages": n}
        for k, n in ((64, 3), (128, 2))
    ]
    mosaic_decode_cuts = [{"tile_k": tuning.MOSAIC_DECODE_TILE, "num_stages": n} for n in (2, 3, 5)]
    mosaic_prefill_cuts = [{"tile_k": 128, "num_stages": 2}]
    for heads in (LLAMA_8B, QWEN_05B):
        for min_work, batches in ((0, (1, 16)), (256, (128, 256))):
            timers = [Timer(decode(b, 1024, heads, 16)) for b in batches]
            save(_fastest(timers, "decode", "triton", min_work, decode_cuts))
        if capability == "9.0":
            min_work = MOSAIC_DECODE_WORK[heads[2]]
            save(_fastest(timers, "decode", "mosaic", min_work, mosaic_decode_cuts))
        timers = [Timer(prefill(4096, heads, 64))]
        save(_fastest(timers, "prefill", "triton", 0, prefill_cuts))
        if capability == "9.0":
            min_work = MOSAIC_PREFILL_WORK[heads[2]]
            save(_fastest(timers, "prefill", "mosaic", min_work, mosaic_prefill_cuts))


def _fastest(timers: list[Timer], rows: str, kernel: str, min_work: int, cuts: list[dict]) -> dict:
    capability = jax.devices()[0].compute_capability
    key = {
        "compute_capability": capability,
        "rows": rows,
        "kernel": kernel,
        "dtype": "bfloat16",
        "head_dim": timers[0].work.head_dim,
        "min_work": min_work,
    }
    costs = []
    for cut in cuts:
        times = []
        for timer in timers:
            shape = shape_of(timer.work)
            choice = tuning.choose("triton", capability, shape)
            if kernel == "mosaic":
                tiling = tuning.MosaicTiling(**cut)
            else:
                tiling = dataclasses.replace(getattr(choice, rows), **cut)
            try:
                seconds = timer.seconds(dataclasses.replace(choice, **{rows: tiling}))
            except jax.errors.JaxRuntimeError as error:  # more shared memory than there is
                print(cut, str(error)[:200])
                times = [float("inf")]
                break
            times.append(min(seconds))
        print(json.dumps(key | {"tiling": cut, "times_us": [round(t * 1e6, 1) for t in times]}),
              flush=True)  # fmt: skip
        # Each workload weighs the same.
        costs.append(statistics.geometric_mean(times))
    return key | {"tiling": cuts[costs.index(min(costs))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="write tuning.json instead")
    parser.add_argument("--output", type=Path, help="the result file")
    parser.add_argument("--only", default="", help="measure the works with this in their name")
    args = parser.parse_args()
    if args.tune == bool(args.output):
        parser.error("give either --tune or --output")
    if args.tune:
        tune()
    else:
        measure(args.output, args.only)


if __name__ == "__main__":
    main()

"""Where one decode or prefill step goes: its kernels with their bytes, its graphs, and what waits.

    PYTHONPATH=. python tools/step_report.py --shape qwen2.5-0.5b --batch-size 32 --output step.json
    PYTHONPATH=. python tools/step_report.py --shape llama-3.1-8b --phase prefill --input-len 1024

The engine runs as it serves, graphs on. Its step time is measured without a profiler, as `jaxserve
bench latency` does; kernels come from two profiles of the same requests, one some steps longer than
the other: those steps. What XLA launches is in its list of the same program, compiled anew. Needs a
GPU.

A kernel's bytes come from the shapes of its fusion in the optimised HLO ("hlo"), or, for our own
kernels, from the model's shapes and the contexts ("model"): each value read or written once. Matrix
products in libraries have none. Bandwidth is per cent of a copy's, measured before the engine.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from hlo_bytes import kernel_bytes
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxserve.bench.ceilings import copy_bandwidth
from jaxserve.bench.device_events import StepKernel, step_totals
from jaxserve.bench.engine import JaxserveEngine
from jaxserve.bench.environment import describe
from jaxserve.bench.offline import (
    LEAST_PROFILED_OUTPUT,
    count_prompt_steps,
    profile_steps,
    profiled_steps,
    short_output,
    time_steps,
)
from jaxserve.bench.shapes import SHAPES, write_shape
from jaxserve.bench.thunks import count_launches, dump_options, every_thunk, read_thunks
from jaxserve.bench.workloads import TokenRequest, make_requests
from jaxserve.engine.programs import GPU_OPTIONS
from jaxserve.model.config import ModelConfig


@dataclass(frozen=True)
class Phase:
    """Requests whose runs differ by a known number of steps."""

    name: str
    requests: Callable[[int], list[TokenRequest]]
    """Of as many steps as it is told, and some that all runs share."""
    timed_steps: tuple[int, int]
    profiled_steps: tuple[int, int]
    steps_after: int
    """That a profile has beyond those, until requests that began first are done."""
    num_tokens: int
    """Of one step."""
    context_tokens: float
    """Tokens whose keys and values a step reads, in one layer."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--phase", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--batch-size", type=int, default=32, help="of decode")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=512, help="of decode")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, help="a prefill step's tokens")
    parser.add_argument("--compilation-cache-dir")
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the same as JSON")
    args = parser.parse_args()
    if args.phase == "decode" and args.output_len < LEAST_PROFILED_OUTPUT:
        parser.error(
            f"--output-len must be at least {LEAST_PROFILED_OUTPUT}, got {args.output_len}"
        )
    return args


def decode_phase(args: argparse.Namespace, vocab_size: int, budget: int) -> Phase:
    def requests(num_steps: int) -> list[TokenRequest]:
        lengths = [(args.input_len, num_steps)] * args.batch_size
        return make_requests(lengths, vocab_size, args.seed)

    short = short_output(args.output_len)
    prompt_steps = count_prompt_steps(args.batch_size, args.input_len, args.output_len, budget)
    return Phase(
        "decode",
        requests,
        (short, args.output_len),
        profiled_steps(short, args.output_len, prompt_steps),
        short,
        args.batch_size,
        args.batch_size * (args.input_len + (short + args.output_len) / 2),
    )


def prefill_phase(args: argparse.Namespace, vocab_size: int, num_tokens: int) -> Phase:
    if num_tokens % args.input_len:
        raise SystemExit(
            f"--input-len must divide the {num_tokens} tokens of a step, got {args.input_len}"
        )
    prompts = num_tokens // args.input_len

    def requests(num_steps: int) -> list[TokenRequest]:
        return make_requests([(args.input_len, 1)] * prompts * num_steps, vocab_size, args.seed)

    return Phase("prefill", requests, (2, 10), (1, 5), 0, num_tokens, num_tokens)


def model_bytes(model: ModelConfig, itemsize: int, phase: Phase) -> dict[str, float]:
    """Bytes that one run of our own kernels moves."""
    tokens = phase.num_tokens
    query = tokens * model.num_heads * model.head_dim
    key = tokens * model.num_kv_heads * model.head_dim
    attention = 2 * query + 2 * phase.context_tokens * model.num_kv_heads * model.head_dim
    elements = {
        "_add_rms_norm": 4 * tokens * model.hidden_size,
        "_rms_norm": 2 * tokens * model.hidden_size,
        "_rope_and_write_kv": 2 * (query + 2 * key),
        "_attend": attention,
        "paged_decode": attention,
        "paged_prefill": attention,
    }
    return {name: size * itemsize for name, size in elements.items()}


def compiled_program(engine: JaxserveEngine, phase: Phase) -> tuple[str, dict[str, Any]]:
    """(optimised HLO, what it launches a step) of the program that ran."""
    lowered, several = engine.engine.lower_step(phase.num_tokens, decode=phase.name == "decode")
    with tempfile.TemporaryDirectory() as folder, compiling_anew():
        program = lowered.compile(GPU_OPTIONS | dump_options(Path(folder)))
        thunks = read_thunks(Path(folder))
    if several > 1:
        (loop,) = (thunk for thunk in every_thunk(thunks) if thunk.kind == "kWhile")
        thunks = loop.parts["body"]
    launches = count_launches(thunks)
    return program.as_text(), {
        "steps_in_dispatch": several,
        "graphs": launches.graphs,
        "outside_of_graphs": dict(launches.outside),
        "kernels_fewest": launches.kernels[0],
        "kernels_most": launches.kernels[1],
    }


@contextmanager
def compiling_anew() -> Iterator[None]:
    """In the block XLA compiles what JAX's cache may have: only then does it write its lists."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    reset_cache()


def kernel_rows(
    found: dict[str, StepKernel],
    hlo: dict[str, int],
    model: dict[str, float],
    copy_bytes_per_s: float,
) -> list[dict[str, Any]]:
    """One for each name, the one that takes longest first."""
    rows = []
    for name, (count, ms) in sorted(found.items(), key=lambda item: -item[1].ms):
        source, size = None, None
        own = next((key for key in model if name.startswith(key)), None)
        if own is not None:
            source, size = "model", model[own]
        elif name in hlo:
            source, size = "hlo", hlo[name]
        rows.append(
            {
                "kernel": name,
                "count": round(count, 2),
                "us": round(1000 * ms, 2),
                "bytes": size,
                "bytes_from": source,
                "percent_of_copy": size
                and round(100 * size * count / (ms / 1000) / copy_bytes_per_s, 1),
            }
        )
    return rows


def report(result: dict[str, Any]) -> str:
    """The same for a reader."""
    launches, wall = result["launches"], result["wall_ms"]
    shares = ", ".join(
        f"{label} {result[key]:.3f} ({100 * result[key] / wall:.0f}%)"
        for label, key in (("GPU busy", "busy_ms"), ("between kernels", "gaps_ms"),
                           ("host", "host_ms"))
    )  # fmt: skip
    outside = ", ".join(f"{n} {kind}" for kind, n in launches["outside_of_graphs"].items())
    lines = [
        f"{result['model']}, {result['dtype']}, {result['phase']} of {result['num_tokens']} tokens",
        f"a step takes {wall:.3f} ms: {shares}" + ("; FLAGGED" if result["flagged"] else ""),
        f"XLA launches {launches['graphs']} graphs a step and outside of them "
        f"{outside or 'nothing'}; {launches['kernels_fewest']} to {launches['kernels_most']} "
        f"kernels and copies; {launches['steps_in_dispatch']} steps in a dispatch",
        f"the profile has {result['kernels_per_step']:g} kernels and "
        f"{result['copies_per_step']:g} copies a step",
        f"a copy moves {result['copy_bytes_per_s'] / 1e12:.2f} TB/s",
        "",
        f"{'count':>7} {'us':>9} {'share':>6} {'MB each':>9} {'of copy':>8} {'bytes':>6}  kernel",
    ]
    for row in result["kernels"]:
        share = 100 * row["us"] / 1000 / result["busy_ms"]
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.3f}"
        percent = "" if row["percent_of_copy"] is None else f"{row['percent_of_copy']:.0f}%"
        lines.append(
            f"{row['count']:7g} {row['us']:9.2f} {share:5.1f}% {size:>9} {percent:>8} "
            f"{row['bytes_from'] or '':>6}  {row['kernel'][:90]}"
        )
    return "\n".join(lines)


def main() -> None:
    args = parse()
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_enable_command_buffers_during_profiling=true".strip()
    if jax.default_backend() != "gpu":
        raise SystemExit("a step report needs a GPU: this machine's JAX has none")
    copy = copy_bandwidth(warm_up_s=args.warm_up_s)
    with tempfile.TemporaryDirectory() as folder:
        engine = JaxserveEngine(
            model=str(write_shape(args.shape, Path(folder) / args.shape)),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=args.input_len + args.output_len,
            max_num_batched_tokens=args.max_num_batched_tokens,
            compilation_cache_dir=args.compilation_cache_dir,
            **{name: getattr(args, name) for name in ("dtype", "max_num_seqs", "seed")},
        )
        model, config = engine.engine.model_config, engine.engine.scheduler_config
        make_phase = decode_phase if args.phase == "decode" else prefill_phase
        try:
            phase = make_phase(args, model.vocab_size, config.max_num_batched_tokens)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        few, many = phase.timed_steps
        row, host_ms = time_steps(
            engine, phase.name, phase.requests(few), phase.requests(many), many - few,
            args.warm_up_s,
        )  # fmt: skip
        found = profile_steps(engine, phase.requests, phase.profiled_steps, phase.steps_after)
        hlo, launches = compiled_program(engine, phase)
        itemsize = engine.engine.dtype.itemsize
        rates = kernel_bytes(hlo), model_bytes(model, itemsize, phase), copy.value
        engine.close()
    kernels, copies, busy_ms = step_totals(found)
    host_ms = min(host_ms, max(row.value - busy_ms, 0.0))
    result = describe() | {
        "benchmark": "step_report",
        "model": args.shape,
        "dtype": args.dtype,
        "phase": args.phase,
        "num_tokens": phase.num_tokens,
        "input_len": args.input_len,
        "wall_ms": round(row.value, 4),
        "busy_ms": round(busy_ms, 4),
        "gaps_ms": round(max(row.value - busy_ms - host_ms, 0.0), 4),
        "host_ms": round(host_ms, 4),
        "kernels_per_step": round(kernels, 2),
        "copies_per_step": round(copies, 2),
        "launches": launches,
        "copy_bytes_per_s": copy.value,
        "wall": row.as_json(),
        "spread": row.spread,
        "flagged": row.flagged,
        "kernels": kernel_rows(found, *rates),
    }
    print(report(result))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Engines taking turns on one machine, on the same requests: at least three turns each.

    PYTHONPATH=. python bench/compare.py --shape qwen2.5-0.5b --engines jaxserve vllm-v2 \
        --workloads decode 512x512 sharegpt prefill-1024

Each turn of an engine is a process of its own, which gives the GPU back. The order is turned round
every time. Before the first turn jaxserve's logits are checked against plain JAX on the same
weights (`bench/check_logits.py`). The file has that, every record, the ceilings measured in the
same session, the floors, and for each pair of engines the ratios turn by turn and their median; a
turn that either engine flagged (two passes over 15% apart) takes no part in it. It is written after
each engine's turn, and a further call with the same --session goes on with it, from the first turn
that lacks something, with what it lacks.
"""

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratios import ratios_of

from jaxserve.bench.environment import describe
from jaxserve.bench.floors import decode_floor_ms, workload_floor_s
from jaxserve.bench.offline import LEAST_PROFILED_OUTPUT, short_output
from jaxserve.bench.shapes import SHAPES, write_shape
from jaxserve.bench.workloads import is_prefill, lengths_of, make_requests, save_requests

ROOT = Path(__file__).parent.parent
ENGINES = (
    "jaxserve", "vllm", "vllm-v2", "transformers-eager", "transformers-continuous",
    "transformers-compiled",
)  # fmt: skip
_VLLM = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT = {
    # Graphs stay on while a profile counts a step's kernels. JAX takes three quarters of the GPU
    # unless it is told otherwise, the others nine tenths.
    "jaxserve": {
        "XLA_FLAGS": "--xla_enable_command_buffers_during_profiling=true",
        "XLA_CLIENT_MEM_FRACTION": "0.95",
    },
    "vllm": _VLLM,
    "vllm-v2": _VLLM | {"VLLM_USE_V2_MODEL_RUNNER": "1"},
}
"""What an engine's process needs beside this one's environment."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--engines", choices=ENGINES, nargs="+", required=True)
    parser.add_argument(
        "--workloads", nargs="+", default=["decode", "512x512", "sharegpt", "prefill-1024"]
    )
    parser.add_argument("--session", default=time.strftime("%Y-%m-%d-%H%M"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--num-prompts", type=int, help="of INPUTxOUTPUT (default: 512)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--input-len", type=int, default=512, help="of decode")
    parser.add_argument("--output-len", type=int, default=512, help="of decode")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=4352)
    parser.add_argument("--warm-up-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="count kernels in decode, in one turn of each engine",
    )
    parser.add_argument("--no-ceilings", action="store_true", help="measure no ceilings, no floors")
    parser.add_argument("--no-check", action="store_true", help="of jaxserve's logits, before")
    parser.add_argument("--time-limit-s", type=float, help="start no engine that may end after it")
    parser.add_argument(
        "--option", action="append", default=[], metavar="ENGINE:NAME=JSON",
        help="of one engine alone: an option of its own, or another value of one above, as "
        "jaxserve:max_num_batched_tokens=8192 transformers-eager:max_num_seqs=64",
    )  # fmt: skip
    parser.add_argument(
        "--site", action="append", default=[], metavar="ENGINE=FOLDER",
        help="a folder of packages for one engine's process (vllm and vllm-v2 share theirs)",
    )  # fmt: skip
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH",
        help="an interpreter for one engine (default: this one)",
    )  # fmt: skip
    parser.add_argument("--output-dir", type=Path, default=Path("bench/results"))
    args = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+", args.session):
        parser.error(f"--session is part of a file's name, got {args.session!r}")
    least_output = LEAST_PROFILED_OUTPUT if args.profile else 8
    if args.output_len < least_output:
        parser.error(
            f"--output-len must be at least {least_output}"
            f"{' with --profile' if args.profile else ''}, got {args.output_len}"
        )
    if max(args.batch_sizes) > args.max_num_seqs:
        parser.error(f"--batch-sizes must be at most --max-num-seqs, {args.max_num_seqs}")
    return args


def options_of(engine: str, given: list[str]) -> dict[str, Any]:
    options = {}
    for text in given:
        target, _, assignment = text.partition(":")
        name, _, value = assignment.partition("=")
        if target == engine:
            options[name] = json.loads(value)
    return options


def value_of(engine: str, given: list[str]) -> str | None:
    """From ENGINE=VALUE flags; a v2 engine takes its family's."""
    values = dict(text.split("=", 1) for text in given)
    family = engine.split("-")[0]
    return values.get(engine, values.get(family))


def run_turn(args: argparse.Namespace, engine: str, job: dict, folder: Path) -> list[dict]:
    """The records of one turn, as many as its process lived to write."""
    job_path, records_path = folder / "job.json", folder / "records.json"
    records_path.unlink(missing_ok=True)
    job_path.write_text(json.dumps(job))
    arguments = [str(job_path), str(records_path)]
    done = run_script(args, engine, "bench/engines/worker.py", arguments, stdout=sys.stderr)
    if done.returncode != 0:
        print(f"{engine} ended with exit code {done.returncode}", file=sys.stderr)
    return json.loads(records_path.read_text()) if records_path.exists() else []


def run_script(
    args: argparse.Namespace, engine: str, script: str, arguments: list[str], **options: Any
) -> subprocess.CompletedProcess:
    """Run a script of this repository with an engine's interpreter, packages and environment.

    Only jaxserve keeps the caller's PYTHONPATH: it may hold packages in versions that the others
    do not go with.
    """
    paths = [value_of(engine, args.site), str(ROOT), str(ROOT / "bench" / "engines")]
    if engine == "jaxserve":
        paths.append(os.environ.get("PYTHONPATH"))
    environment = os.environ | _OFFLINE | ENVIRONMENT.get(engine, {})
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [value_of(engine, args.python) or sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, env=environment, check=False, **options)


def measure_ceilings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = folder / "ceilings.json"
    arguments = ["--output", str(path)]
    done = run_script(args, "jaxserve", "bench/ceilings.py", arguments, stdout=sys.stderr)
    if done.returncode != 0:
        raise SystemExit("no ceilings: bench/ceilings.py has failed (--no-ceilings goes without)")
    result = json.loads(path.read_text())
    names = ("copy_bytes_per_s", "matmul_flops_per_s", "rows", "spread", "flagged")
    return {name: result[name] for name in names}


def check_logits(args: argparse.Namespace) -> dict[str, Any]:
    """Whether jaxserve computes the right thing in the configuration that is timed."""
    options = options_of("jaxserve", args.option)
    options = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len} | options
    arguments = [
        "--shape", args.shape, "--dtype", args.dtype, "--seed", str(args.seed),
        "--options", json.dumps(options), "--longest", str(min(512, args.max_model_len // 2)),
    ]  # fmt: skip
    done = run_script(
        args, "jaxserve", "bench/check_logits.py", arguments, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"jaxserve's logits are not those of plain JAX: {done.stdout or 'none'}")
    return json.loads(done.stdout.splitlines()[-1])


def floors(args: argparse.Namespace, ceilings: dict[str, Any]) -> dict[str, Any]:
    """The least milliseconds of a decode step by batch size, at the middle of its context, and the
    highest rates of each workload."""
    shape, itemsize = SHAPES[args.shape], 2 if args.dtype == "bfloat16" else 4
    middle = args.input_len + (args.output_len + short_output(args.output_len)) / 2
    rates = ceilings["copy_bytes_per_s"], ceilings["matmul_flops_per_s"]
    found: dict[str, dict[str, float]] = {
        "decode_step_ms": {
            str(size): round(decode_floor_ms(shape, size, middle, *rates, itemsize), 4)
            for size in args.batch_sizes
        }
    }
    for workload, lengths in workload_lengths(args).items():
        seconds = workload_floor_s(shape, lengths, args.max_num_seqs, *rates, itemsize)
        inputs, outputs = (sum(column) for column in zip(*lengths, strict=True))
        amounts = {"output_tokens_per_s": outputs, "total_tokens_per_s": inputs + outputs}
        if is_prefill(workload):
            amounts = {"prefill_tokens_per_s": inputs}
        for name, amount in amounts.items():
            found.setdefault(name, {})[workload] = round(amount / seconds, 1)
    return found


def workload_lengths(args: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Of each workload but decode."""
    names = [workload for workload in args.workloads if workload != "decode"]
    fixed = [name for name in names if name[0].isdigit() or is_prefill(name)]
    return {name: lengths_of(name, args.num_prompts if name in fixed else None) for name in names}


def main() -> int:
    args = parse()
    begin = time.monotonic()
    path = args.output_dir / f"compare-{args.shape}-{args.session}.json"
    if path.exists():
        result = json.loads(path.read_text())
    else:
        result = describe() | {
            "benchmark": "compare",
            "session": args.session,
            "model": args.shape,
            "records": [],
        }
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not args.no_ceilings and "ceilings" not in result:
            result["ceilings"] = measure_ceilings(args, folder)
            result["floors"] = floors(args, result["ceilings"])
        if not args.no_check and "jaxserve" in args.engines and "check" not in result:
            result["check"] = check_logits(args)
        job = {
            "session": args.session,
            "model": args.shape,
            "model_folder": str(write_shape(args.shape, folder / args.shape)),
            "vocab_size": SHAPES[args.shape]["vocab_size"],
            "command": describe()["command"],
            "requests": write_requests(args, folder),
        }
        for name in ("dtype", "batch_sizes", "input_len", "output_len", "max_num_seqs",
                     "max_model_len", "warm_up_s", "seed"):  # fmt: skip
            job[name] = getattr(args, name)
        missing = functools.partial(missing_workloads, result["records"], args.workloads)
        turns = ((turn, name) for turn in itertools.count() for name in args.engines)
        first = next(turn for turn, name in turns if missing(turn, name))
        longest_s: dict[str, float] = {}
        for turn, engine in turns_of(args.engines, first, args.turns):
            workloads = missing(turn, engine)
            if not workloads:
                continue
            needed_s = longest_s.get(engine, 0)
            if args.time_limit_s and time.monotonic() - begin + needed_s > args.time_limit_s:
                print(f"no time for {engine}'s turn {turn}: {needed_s:.0f} s", file=sys.stderr)
                break
            started = time.monotonic()
            options = options_of(engine, args.option)
            own = {name: options.pop(name) for name in list(options) if name in job}
            todo = job | own | {"engine": engine, "turn": turn, "engine_options": options}
            todo["workloads"] = workloads
            todo["profile"] = args.profile and not has_profile(result["records"], engine)
            records = result["records"] + run_turn(args, engine, todo, folder)
            # Ratios are of an engine over those that come after it, whoever had the first turn.
            result["records"] = sorted(records, key=lambda r: ENGINES.index(r["engine"]))
            longest_s[engine] = max(longest_s.get(engine, 0), time.monotonic() - started)
            result["ratios"] = ratios_of(result["records"])
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"turn {turn}, {engine}: {longest_s[engine]:.0f} s", file=sys.stderr)
    print(json.dumps(result.get("ratios", {}), indent=2))
    print(path)
    wanted = args.turns * len(args.engines) * len(args.workloads)
    made = [r for r in result["records"] if r["turn"] >= first and r["engine"] in args.engines]
    return int(sum(r["workload"] in args.workloads for r in made) < wanted)


def missing_workloads(
    records: list[dict[str, Any]], workloads: list[str], turn: int, engine: str
) -> list[str]:
    """What an engine has yet to do in a turn: all, or what its process did not live to do."""
    done = {r["workload"] for r in records if (r["turn"], r["engine"]) == (turn, engine)}
    return [workload for workload in workloads if workload not in done]


def has_profile(records: list[dict[str, Any]], engine: str) -> bool:
    """Whether one of an engine's turns has counted kernels: one is enough."""
    return any(r["engine"] == engine and r.get("profiles") for r in records)


def turns_of(engines: list[str], first: int, number: int) -> Iterator[tuple[int, str]]:
    """(turn, engine), with the engines' order turned round every time."""
    for turn in range(first, first + number):
        yield from ((turn, engine) for engine in engines[:: -1 if turn % 2 else 1])


def write_requests(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """A file of token-id requests for each workload, the same for every engine."""
    files = {}
    for index, (workload, lengths) in enumerate(workload_lengths(args).items()):
        requests = make_requests(lengths, SHAPES[args.shape]["vocab_size"], args.seed)
        files[workload] = str(folder / f"requests-{index}.jsonl")
        save_requests(Path(files[workload]), requests)
    return files


if __name__ == "__main__":
    sys.exit(main())

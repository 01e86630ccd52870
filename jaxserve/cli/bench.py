"""`jaxserve bench`: a server through HTTP, or the engine in this process."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxserve.bench.serving.config import ServingBenchConfig
from jaxserve.bench.shapes import SHAPES, write_shape
from jaxserve.bench.workloads import FILES, lengths_of, make_requests, save_requests
from jaxserve.cli.flags import UsageError, add_flags, build, given
from jaxserve.config import EngineConfig

# --seed is of the requests and of dummy weights; prompts are token ids, and no two passes may find
# each other's prefixes.
_NO_FLAGS = ("model", "seed", "skip_tokenizer_init", "enable_prefix_caching")
_WORKLOADS = f"INPUTxOUTPUT, prefill-INPUT, {', '.join(FILES)}, or a CSV file of lengths"


def add_arguments(commands: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """`commands(name, run, help)` makes a parser."""
    add_flags(commands("serve", _serve, "measure a server that speaks OpenAI's HTTP API"),
              ServingBenchConfig)  # fmt: skip

    latency = commands("latency", _latency, "time decode steps by batch size")
    latency.add_argument("--batch-sizes", metavar="N", type=_count, nargs="+", default=[1, 8, 32])
    latency.add_argument("--input-len", metavar="N", type=_count, default=512)
    latency.add_argument("--output-len", metavar="N", type=_count, default=512)
    latency.add_argument(
        "--profile", action="store_true", help="count a step's kernels too, on a GPU"
    )
    latency.add_argument(
        "--sampled", action="store_true",
        help="sample every request, with cuts and penalties; default: greedily",
    )  # fmt: skip
    throughput = commands("throughput", _throughput, "time many requests at once")
    throughput.add_argument("--workload", metavar="NAME", default="512x512", help=_WORKLOADS)
    throughput.add_argument(
        "--num-prompts", metavar="N", type=_count,
        help="default: all of a file, 512 of one size, 128 to prefill",
    )  # fmt: skip
    throughput.add_argument(
        "--requests-file", metavar="F.jsonl", type=Path,
        help="write the requests there, as generate --prompts-file reads them",
    )  # fmt: skip
    startup = commands("startup", _startup, "time the start, with and without compiled programs")
    for parser in (latency, throughput, startup):
        model = parser.add_mutually_exclusive_group(required=True)
        model.add_argument("--model", metavar="MODEL", help="any name that --model takes elsewhere")
        model.add_argument("--shape", choices=SHAPES, help="of this model, with random weights")
        parser.add_argument("--session", metavar="NAME", help="what compared runs have in common")
        parser.add_argument(
            "--output-json",
            metavar="F",
            type=_new_file,
            help="write the result there, not to stdout",
        )
        add_flags(parser, EngineConfig, skip=_NO_FLAGS)
    for parser in (latency, throughput):
        parser.add_argument("--seed", metavar="N", type=int, default=0, help="default: 0")
        parser.add_argument(
            "--warm-up-s", metavar="X", type=float, default=3.0,
            help="least seconds of work before each timing (default: 3)",
        )  # fmt: skip


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _serve(args: argparse.Namespace) -> int:
    """1 if any request has failed."""
    config = build(ServingBenchConfig, given(args, ServingBenchConfig))
    needed = ["aiohttp"] if config.plot is None else ["aiohttp", "matplotlib"]
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"bench serve needs {' and '.join(missing)}, which the extra `bench` brings: "
            "pip install jaxserve[bench]"
        )

    from jaxserve.bench.serving.command import run

    return run(config)


def _latency(args: argparse.Namespace) -> int:
    from jaxserve.bench.offline import LEAST_PROFILED_OUTPUT, run_decode

    least_output = LEAST_PROFILED_OUTPUT if args.profile else 8
    if args.output_len < least_output:
        raise UsageError(
            f"--output-len must be at least {least_output}"
            f"{' with --profile' if args.profile else ''}, got {args.output_len}"
        )
    need = {
        "max_model_len": args.input_len + args.output_len,
        "max_num_seqs": max(args.batch_sizes),
    }
    for name, least in need.items():
        if (told := getattr(args, name, None)) is not None and told < least:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} must be at least {least} for these requests, got {told}")
    with _engine(args, need, args.sampled) as (engine, record):
        result = run_decode(
            engine,
            args.batch_sizes,
            args.input_len,
            args.output_len,
            engine.vocab_size,
            args.seed,
            args.warm_up_s,
            profile=args.profile,
        )
        _finish(args, record(workload="decode", sampled=args.sampled, **result))
    return 0


def _throughput(args: argparse.Namespace) -> int:
    try:
        lengths = lengths_of(args.workload, args.num_prompts)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with _engine(args, {"max_model_len": max(map(sum, lengths))}) as (engine, record):
        from jaxserve.bench.offline import run_workload

        requests = make_requests(lengths, engine.vocab_size, args.seed)
        if args.requests_file is not None:
            save_requests(args.requests_file, requests)
        result = run_workload(engine, requests, args.warm_up_s)
        _finish(args, record(workload=args.workload, **result))
    return 0


def _startup(args: argparse.Namespace) -> int:
    if "compilation_cache_dir" in args:
        raise UsageError("startup makes compilation caches of its own: no --compilation-cache-dir")
    from jaxserve.bench.records import make_record
    from jaxserve.bench.startup import measure_startup
    from jaxserve.version import __version__

    with _fields(args, {}) as fields:
        result = measure_startup(fields)
    about = {"engine": "jaxserve", "engine_version": __version__, "model": args.shape or args.model}
    num_gpus = fields.get("tensor_parallel_size", 1)
    _finish(args, make_record(args.session, num_gpus, workload="startup", **about, **result))
    return 0


@contextmanager
def _fields(args: argparse.Namespace, need: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """EngineConfig's fields: those given, and `need` for the others."""
    fields = need | given(args, EngineConfig, skip=_NO_FLAGS)
    fields |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    fields["seed"] = getattr(args, "seed", 0)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is None:
            fields["model"] = args.model
        else:
            fields["model"] = str(write_shape(args.shape, Path(folder)))
            fields["load_format"] = "dummy"
        build(EngineConfig, fields)
        yield fields


@contextmanager
def _engine(
    args: argparse.Namespace, need: dict[str, Any], sampled: bool = False
) -> Iterator[tuple[Any, Callable]]:
    """The engine, and what makes a record of it."""
    from jaxserve.bench.engine import GREEDY, SAMPLED, JaxserveEngine
    from jaxserve.bench.records import make_record

    with _fields(args, need) as fields:
        engine = JaxserveEngine(SAMPLED if sampled else GREEDY, **fields)
        try:
            yield (
                engine,
                lambda **result: make_record(
                    args.session,
                    engine.num_gpus,
                    engine=engine.name,
                    engine_version=engine.version,
                    model=args.shape or args.model,
                    dtype=engine.dtype,
                    max_num_seqs=engine.max_num_seqs,
                    ready_s=engine.ready_s,
                    settings=engine.settings,
                    seed=args.seed,
                    **result,
                ),
            )
        finally:
            engine.close()


def _finish(args: argparse.Namespace, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=2) + "\n"
    if args.output_json is None:
        sys.stdout.write(text)
    else:
        args.output_json.write_text(text)
        print(_summary(record))
    if record["flagged"]:
        print(
            f"jaxserve: warning: the passes differ by {record['spread']:.0%}: this result proves "
            "nothing", file=sys.stderr,
        )  # fmt: skip


def _summary(record: dict[str, Any]) -> str:
    """The figures that were measured, in one line."""
    figures: Sequence[tuple[str, str]] = (
        ("output_tokens_per_s", "output tokens/s"),
        ("total_tokens_per_s", "tokens/s in all"),
        ("prefill_tokens_per_s", "prompt tokens/s"),
        ("ready_s", "s until ready"),
        ("ready_warm_s", "s with compiled programs"),
    )
    shown = [f"{record[key]:.1f} {unit}" for key, unit in figures if record.get(key) is not None]
    steps = record["decode_step_ms"] or {}
    shown += [f"{ms:.3f} ms a step at batch {size}" for size, ms in steps.items()]
    return f"{record['model']}, {record['workload']}: {', '.join(shown)}"

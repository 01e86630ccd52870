"""Write the tables in docs/ that come from the files in `bench/results/`.

python tools/docs_tables.py          # rewrites what is between the markers
python tools/docs_tables.py --check  # exit code 1 if that would change anything
"""

import argparse
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
NOTED_SPREAD = 0.05
"""A pass that took longer than the other by more than this share is mentioned."""
KERNELS_SHOWN = 6
"""Of a step: the rest takes a few per cent."""

Table = list[str]


def clients(result: dict) -> Table:
    """What each client was tried with."""
    lines = ["| client | version | what was tried | outcome |", "|---|---|---|---|"]
    for name, outcome in result["scripts"].items():
        checks = outcome["checks"]
        failed = [check for check, said in checks.items() if said != "passed"]
        tried = ", ".join(check.replace("_", " ") for check in checks)
        figures = {k: v for k, v in outcome["figures"].items() if not isinstance(v, dict)}
        notes = "".join(f"; {key} {value:g}" for key, value in figures.items())
        said = f"failed: {', '.join(failed)}" if failed else f"passed{notes}"
        label = f"{outcome['client']} ({Path(name).suffix[1:] or 'py'})"
        lines.append(f"| {label} | {outcome['version']} | {tried} | {said} |")
    return lines


def soak(result: dict) -> Table:
    """What the clients of the soak saw, and what they left."""
    memory = ", ".join(f"{k} {100 * v['growth']:+.1f}%" for k, v in result["memory"].items())
    statuses = ", ".join(f"{count:,} x {status}" for status, count in result["statuses"].items())
    rows = {
        "time, clients at once": f"{result['minutes']:g} minutes, {result['num_clients']}",
        "things done": f"{sum(result['requests'].values()):,}",
        "answers by status": statuses,
        "greedy texts compared with those given alone": f"{result['greedy_texts_compared']:,}",
        "preemptions": f"{result['num_preemptions']:,.0f}",
        "memory, last minute against first": memory,
        "failures": f"{result['num_failures']}",
        "where": f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads",
    }
    return _rows(rows)


def shutdown(result: dict) -> Table:
    """How a killed engine and a stopped server end."""
    killed, stopped = result["engine_killed"], result["sigterm"]
    rows = {
        "engine killed: `/health` says 503 after": f"{killed['health_503_s']} s",
        f"engine killed: the last of {killed['num_clients']} clients has its error after": (
            f"{killed['last_client_error_s']} s"
        ),
        "SIGTERM: requests finished": f"{stopped['finished']} of {stopped['num_clients']}",
        "SIGTERM: exit code, processes left": (
            f"{stopped['exit_code']}, {stopped['processes_left']}"
        ),
        "where": f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads",
    }
    return _rows(rows)


def paged_attention(result: dict) -> Table:
    """The ceilings of the session; every kernel and shape, with what it reaches of its own."""
    copy, product = result["copy_bytes_per_s"] / 1e12, result["matmul_flop_per_s"] / 1e12
    lines = [
        f"A copy moved {copy:.2f} TB/s, a large matrix product reached {product:.0f} TFLOP/s, with "
        f"jax {result['versions']['jax']}.",
        "",
    ]
    lines += ["| rows | heads, kv heads, size; block | impl | time | |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        reached = ""
        if "of_copy_bandwidth" in row:
            reached = f"{100 * row['of_copy_bandwidth']:.0f}% of copy bandwidth"
        elif "tflop_per_s" in row:
            reached = f"{row['tflop_per_s']:.0f} TFLOP/s"
        if row["spread"] > NOTED_SPREAD:
            reached += f"; the other pass took {100 * row['spread']:.0f}% longer"
        shape = f"{row['num_heads']}, {row['num_kv_heads']}, {row['head_dim']}; {row['block_size']}"
        what = row["workload"].replace("-", " ").replace("x", " x ")
        time = f"{row['time_us']:.{1 if row['time_us'] < 1000 else 0}f} us"
        lines.append(f"| {what} | {shape} | {row['impl']} | {time} | {reached} |")
    return lines


def step_reports(*results: dict) -> Table:
    """Where each reported step goes, and what it launches."""
    names = [
        "step", "ms", "GPU busy", "between kernels", "host", "kernels", "graphs",
        "outside of graphs",
    ]  # fmt: skip
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for result in results:
        shares = [f"{100 * result[k] / result['wall_ms']:.0f}%" for k in
                  ("busy_ms", "gaps_ms", "host_ms")]  # fmt: skip
        flag = " !" if result["flagged"] else ""
        outside = sum(result["launches"]["outside_of_graphs"].values())
        cells = [
            step_name(result),
            f"{result['wall_ms']:.2f}{flag}", *shares, f"{result['kernels_per_step']:.0f}",
            f"{result['launches']['graphs']}", f"{outside}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *longest_kernels(*results)]


def step_name(result: dict) -> str:
    return f"{result['model']}, {result['phase']} of {result['num_tokens']} tokens"


def longest_kernels(*results: dict) -> Table:
    """What takes longest in each reported step, and all the rest."""
    lines = ["| step | kernel or copy | times | us | of busy GPU |", "|---|---|---|---|---|"]
    for result in results:
        step = step_name(result)
        first, rest = result["kernels"][:KERNELS_SHOWN], result["kernels"][KERNELS_SHOWN:]
        rows = [(f"`{k['kernel']}`", k["count"], k["us"]) for k in first]
        if rest:
            rows.append(("others", sum(k["count"] for k in rest), sum(k["us"] for k in rest)))
        for name, count, us in rows:
            share = 100 * us / 1000 / result["busy_ms"]
            lines.append(f"| {step} | {name} | {count:.0f} | {us:.0f} | {share:.0f}% |")
            step = ""
    return lines


def latency(*results: dict) -> Table:
    """Milliseconds of a decode step by batch size, and how long the engine took to start."""
    batch_sizes = sorted({int(size) for result in results for size in result["decode_step_ms"]})
    head = " | ".join(f"batch {size}" for size in batch_sizes)
    lines = [f"| model, requests | {head} | ready after |", f"|---|{'---|' * len(batch_sizes)}---|"]
    runs: Counter[str] = Counter()
    for result in results:
        cells = []
        for size in map(str, batch_sizes):
            row = result["rows"].get(size)
            passes = [] if row is None else row["passes"]
            flag = " !" if row and row["flagged"] else ""
            cells.append(" / ".join(f"{ms:.2f}" for ms in passes) + flag)
        kind = "sampled" if result["sampled"] else "greedy"
        first, last = result["input_len"], result["input_len"] + result["output_len"]
        where = f"{result['model']}, {kind}, contexts of {first} to {last} tokens"
        runs[where] += 1
        if runs[where] > 1:
            where += f", run {runs[where]}"
        lines.append(f"| {where} | {' | '.join(cells)} | {result['ready_s']:.1f} s |")
    return lines


def startup(*results: dict) -> Table:
    """Seconds until ready with nothing compiled and with everything, and what takes them. Weights
    load while programs compile."""
    phases = {"import": "import", "compile": "compile", "weights": "weights", "warm_up": "warm-up"}
    lines = [
        f"| model, cache | ready | {' | '.join(phases.values())} |",
        f"|---|{'---|' * (1 + len(phases))}",
    ]
    for result in results:
        flag = " !" if result["flagged"] else ""
        for kind, cache in (("cold", "empty"), ("warm", "full")):
            starts = result["starts"][kind]
            ready = " / ".join(f"{start['ready_s']:.1f}" for start in starts) + " s" + flag
            cells = [
                " / ".join(f"{start['phases_s'][phase]:.1f}" for start in starts)
                for phase in phases
            ]
            lines.append(f"| {result['model']}, {cache} | {ready} | {' | '.join(cells)} |")
    return lines


def linear(result: dict, other: str = "cuBLAS") -> Table:
    """Each product's kernel and what it was compared with."""
    lines = [
        f"| product | tokens | our kernel | | {other} |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        flag = " !" if row["flagged"] else ""
        speed = (
            f"{row['tflop_per_s']:.0f} TFLOP/s"
            if "tflop_per_s" in row
            else f"{100 * row['of_copy_bandwidth']:.0f}% of copy bandwidth"
        )
        lines.append(
            f"| {row['product']} | {row['num_tokens']} | {row['time_us']:.1f} us{flag} | "
            f"{speed} | {row['xla_time_us']:.1f} us |"
        )
    return lines


def launch_overhead(result: dict) -> Table:
    """Microseconds of one small kernel."""
    names = {
        "eager": "an operation called by itself",
        "jitted_call": "a compiled program of one",
        "program": "one of many in a program, without graphs",
        "graph": "one of many in a graph",
        "graph_launch": "a graph's launch, beside its kernels",
    }
    rows = {what: f"{result['us'][name]:.2f} us" for name, what in names.items()}
    return _rows(rows, f"one small kernel, {result['device']}")


def _rows(rows: dict[str, str], what: str = "what") -> Table:
    return [f"| {what} | measured |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]


TABLES: dict[str, Callable[..., Table]] = {
    "clients": clients,
    "soak": soak,
    "shutdown": shutdown,
    "paged_attention_decode_h200": paged_attention,
    "paged_attention_h200": paged_attention,
    "latency-*": latency,
    "startup-*": startup,
    "linear_h200": linear,
    "linear_normed_h200": functools.partial(linear, other="two kernels"),
    "linear_many_h200": linear,
    "linear_between_h200": linear,
    "step_report-*": step_reports,
    "launch_overhead": launch_overhead,
}
"""By the names of their result files, without the ending."""


def _markers(name: str) -> re.Pattern[str]:
    """Both of a table's, and what is between."""
    name = re.escape(name)
    return re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)


def filled(text: str) -> str:
    """The document with its tables made anew. SystemExit where one has no results."""
    for name, make in TABLES.items():
        results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{name}.json"))]
        markers = _markers(name)
        if markers.search(text):
            if not results:
                raise SystemExit(f"{name}: a table without a file in {RESULTS.relative_to(ROOT)}")
            table = "\n".join(make(*results)) + "\n"
            text = markers.sub(lambda m, table=table: m[1] + table + m[2], text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    changed = False
    shown = set()
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text()
        shown |= {name for name in TABLES if _markers(name).search(before)}
        after = filled(before)
        changed |= before != after
        if not args.check:
            path.write_text(after)
    if missing := TABLES.keys() - shown:
        raise SystemExit(f"docs/ has no place for {', '.join(sorted(missing))}")
    return int(args.check and changed)


if __name__ == "__main__":
    sys.exit(main())

"""Write the README's tables of measurements from the files in `bench/results/`.

python tools/results_table.py          # rewrites the part of README.md between the markers
python tools/results_table.py --check  # exit code 1 if that would change anything
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator

from compare_files import (
    RATES,
    ROOT,
    compare_files,
    engines_of,
    median,
    of_engine,
    rates,
    step_profiles,
    step_times,
)

MARKERS = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)
RESULTS = ROOT / "bench" / "results"
PLOTS = ROOT / "docs" / "plots"


def offline_rows(result: dict) -> list[str]:
    where = f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads"
    rows = []
    for engine, figures in result["engines"].items():
        rates = " / ".join(f"{rate:.1f}" for rate in figures["output_tokens_per_s"])
        flag = " (flagged: spread over 15%)" if figures["flagged"] else ""
        what = f"{result['model']}, {result['dtype']}, {result['workload']}, {engine}"
        rows.append(f"| {what} | {rates} output tokens/s{flag} | {where} |")
    rows.append(
        f"| the same, jaxserve over transformers | {result['ratio_median']:.2f} times | {where} |"
    )
    return rows


def host_rows(result: dict) -> list[str]:
    where = result["hardware"]["cpu"]
    rows = []
    for row in result["rows"]:
        flag = " (flagged: spread over 15%)" if row["flagged"] else ""
        times, waits = (
            " / ".join(f"{p[key]:.3f}" for p in row["passes"])
            for key in ("total_ms_p50", "device_idle_ms_a_step")
        )
        steps = row["steps_in_dispatch"]
        rows.append(
            f"| the host's work for a dispatch, {row['num_running']} running, "
            f"{steps} step{'s' if steps > 1 else ''} | {times} ms{flag}; a device of "
            f"{result['step_ms']:g} ms a step waits {waits} ms a step | {where} |"
        )
    return rows


def structured_rows(result: dict) -> list[str]:
    where = f"{result['device']}, {result['hardware']['cpu']}"
    flag = " (flagged: spread over 15%)" if result["flagged"] else ""
    ratios = " / ".join(f"{ratio:.2f}" for ratio in result["ratios"])
    return [
        f"| {result['model']}, a step of {result['num_requests']} requests with as many different "
        f"JSON schemas, over one without ({result['answers_valid']} answers validate) | "
        f"{ratios} times{flag} | {where} |"
    ]


def streaming_rows(result: dict) -> list[str]:
    where = f"{result['hardware']['cpu']}, {result['hardware']['threads']} threads"
    clients = f"{result['num_clients']} streaming clients"
    rows = []
    for what, figures, shown in (
        (
            "and an engine that computes nothing",
            result["instant"],
            " / ".join(f"{p['tokens_per_s']:,.0f}" for p in result["instant"]["passes"])
            + " tokens/s",
        ),
        (
            f"{result['model']}, {result['num_tokens']} tokens each, over `LLM.generate`",
            result["real"],
            f"{result['real']['ratio_median']:.2f} times the tokens/s",
        ),
    ):
        flag = " (flagged: spread over 15%)" if figures["flagged"] else ""
        rows.append(f"| the HTTP server, {clients}, {what} | {shown}{flag} | {where} |")
    return rows


ROWS: dict[str, Callable[[dict], list[str]]] = {
    "offline_vs_transformers": offline_rows,
    "host_time": host_rows,
    "http_streaming": streaming_rows,
    "structured_output": structured_rows,
}


def single_rows() -> list[str]:
    """The table of all result files that have a maker in ROWS; nothing if there are none."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("benchmark") in ROWS:
            rows += ROWS[result["benchmark"]](result)
    return ["| what | measured | where |", "|---|---|---|", *rows] if rows else []


def compare_table(result: dict) -> list[str]:
    """One session: engines across, medians of their turns, and what the device allows."""
    engines = engines_of(result)
    ratios = result.get("ratios", {})
    pairs = [f"{engines[0]} over {other}" for other in engines[1:]]
    floors = result.get("floors", {})
    first = result["records"][0]
    where = first["gpu"] or result["hardware"]["cpu"]
    turns = {engine: len({r["turn"] for r in of_engine(result, engine)}) for engine in engines}
    columns = [f"{name}, {n} turn{'s' if n > 1 else ''}" for name, n in turns.items()]
    limit = ["device's limit"] if floors else []
    head = ["", *columns, *limit, *pairs]
    caption = (
        f"{result['model']}, {first['dtype']}, {where}, session {result['session']}; medians of "
        "the turns, `!` if any two passes were over 15% apart"
    )
    if pairs:
        caption += (
            "; a ratio is the median of those turns that both have and neither flagged; over 1: "
            "the first is faster"
        )
    lines = [f"{caption}.", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]

    def add(title: str, cells: list[str], floor: str = "", key: str = "") -> None:
        shown = [ratios.get(pair, {}).get(key, {}).get("median") for pair in pairs]
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in shown]
        limits = [floor] if floors else []
        lines.append(f"| {' | '.join([title, *cells, *limits, *shown])} |")

    steps = {engine: step_times(result, engine) for engine in engines}
    for size in sorted({size for its in steps.values() for size in its}):
        cells = [cell(steps[engine].get(size), 2) for engine in engines]
        floor = floors.get("decode_step_ms", {}).get(str(size))
        key = f"decode, decode_steps_per_s at batch {size}"
        add(f"decode step, batch {size}, ms", cells, "" if floor is None else f"{floor:.2f}", key)
    profiles = {engine: step_profiles(result, engine) for engine in engines}
    for size in sorted({size for its in profiles.values() for size in its}):
        found = [profiles[engine].get(size) for engine in engines]
        cells = [
            f"{step[0]:,.0f}; {100 * step[1]:.0f}%{' !' if step[2] else ''}" if step else ""
            for step in found
        ]
        add(f"kernels of a step in one turn, batch {size}; GPU busy", cells)
    for name in RATES:
        found = {engine: rates(result, engine, name) for engine in engines}
        for workload in dict.fromkeys(w for its in found.values() for w in its):
            cells = [cell(found[engine].get(workload), 0) for engine in engines]
            ceiling = floors.get(name, {}).get(workload)
            title = f"{workload}, {name.removesuffix('_per_s').replace('_', ' ')}/s"
            shown = "" if ceiling is None else f"{ceiling:,.0f}"
            add(title, cells, shown, f"{workload}, {name}")
    return lines


def pairs_tables(results: list[dict]) -> Iterator[list[str]]:
    """One model's ratios in every pair of turns of all sessions, a table for each two engines."""
    for pair in dict.fromkeys(pair for result in results for pair in result.get("ratios", {})):
        found = {r["session"]: r["ratios"][pair] for r in results if r.get("ratios", {}).get(pair)}
        if not found:
            continue
        lines = [
            f"{results[0]['model']}, {pair} in every pair of turns, sessions {', '.join(found)}, "
            "whose machines and versions may differ; over 1: the first is faster; `!`: two passes "
            "were over 15% apart.",
            "",
            f"| {pair} | pairs | median of those without `!` |",
            "|---|---|---|",
        ]
        keys = {key for rows in found.values() for key in rows}
        for key in sorted(keys, key=lambda key: (key.split(",")[0], len(key), key)):
            if key.endswith("total_tokens_per_s"):
                continue  # as of output tokens
            rows = [rows[key] for rows in found.values() if key in rows]
            turns = [turn for r in rows for turn in zip(r["turns"], r["flagged"], strict=True)]
            shown = ", ".join(f"{ratio:.3f}{' !' if flagged else ''}" for ratio, flagged in turns)
            good = [ratio for ratio, flagged in turns if not flagged]
            title = key.replace("decode, decode_steps_per_s at", "decode step,")
            title = title.replace("_tokens_per_s", " tokens/s")
            middle = f"{median(good):.3f} of {len(good)}" if good else ""
            lines.append(f"| {title} | {shown} | {middle} |")
        yield lines


def cell(figure: tuple[list[float], bool] | None, digits: int) -> str:
    if figure is None:
        return ""
    values, flagged = figure
    return f"{median(values):,.{digits}f}{' !' if flagged else ''}"


def plots(pattern: str) -> list[str]:
    """Lines that show the plots whose names fit, as `tools/plots.py` has left them."""
    paths = sorted(PLOTS.glob(f"{pattern}.svg"))
    return [f"![{path.stem}]({path.relative_to(ROOT)})" for path in paths]


def tables() -> str:
    """All tables as Markdown: of a model that was compared in several sessions first the pairs of
    all; each session's plots below its own."""
    parts = [single_rows()]
    of_model: dict[str, list[dict]] = {}
    for result in compare_files(RESULTS):
        of_model.setdefault(result["model"], []).append(result)
    for results in of_model.values():
        if len(results) > 1:
            parts += pairs_tables(results)
        for result in results:
            parts += [compare_table(result), plots(f"*-{result['model']}-{result['session']}")]
    parts.append(plots("breakdown-*"))
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text()
    made = tables()
    after = MARKERS.sub(lambda m: m[1] + made + m[2], before)
    if args.check:
        return int(before != after)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

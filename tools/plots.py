"""Plots of what `bench/results/` holds: of comparisons, step times and rates; of reports, where a
step goes.

python tools/plots.py    # docs/plots/{step,throughput,prefill}-MODEL-SESSION.svg and
                         # docs/plots/breakdown-MODEL.svg
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from compare_files import (
    ROOT,
    compare_files,
    engines_of,
    median,
    rates,
    step_reports,
    step_times,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator


def step_plot(axes: Axes, result: dict[str, Any]) -> bool:
    """Milliseconds of a decode step against the batch size, one line an engine, bars from the
    fastest to the slowest turn, and the floor."""
    batch_sizes: set[int] = set()
    for engine in engines_of(result):
        steps = step_times(result, engine)
        if not steps:
            continue
        batch_sizes |= set(steps)
        middle = [median(values) for values, _ in steps.values()]
        below = [m - min(values) for m, (values, _) in zip(middle, steps.values(), strict=True)]
        above = [max(values) - m for m, (values, _) in zip(middle, steps.values(), strict=True)]
        axes.errorbar(list(steps), middle, (below, above), marker="o", capsize=3, label=engine)
    floor = {
        int(size): ms for size, ms in result.get("floors", {}).get("decode_step_ms", {}).items()
    }
    if floor:
        axes.plot(list(floor), list(floor.values()), "k--", label="floor: memory or arithmetic")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="ms a decode step")
    axes.set_xticks(sorted(batch_sizes), [str(size) for size in sorted(batch_sizes)])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.minorticks_off()
    return bool(batch_sizes)


def rate_plot(axes: Axes, result: dict[str, Any], rate: str, label: str) -> bool:
    """One of the rates by workload, medians of the turns, bars by engine."""
    engines = engines_of(result)
    found = {engine: rates(result, engine, rate) for engine in engines}
    workloads = list(dict.fromkeys(w for of_one in found.values() for w in of_one))
    width = 0.8 / len(engines)
    for index, engine in enumerate(engines):
        places = [place for place, w in enumerate(workloads) if w in found[engine]]
        heights = [median(found[engine][workloads[place]][0]) for place in places]
        bars = axes.bar(
            [place + (index - (len(engines) - 1) / 2) * width for place in places],
            heights, width, label=engine,
        )  # fmt: skip
        axes.bar_label(bars, [f"{height:,.0f}" for height in heights], fontsize=7)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set(ylabel=label)
    return bool(workloads)


def breakdown_plot(axes: Axes, reports: list[dict[str, Any]]) -> None:
    """Each reported step as shares of its time: the GPU computes, waits between kernels, or waits
    for the host."""
    names = [f"{r['phase']}, {r['num_tokens']} tokens\n{r['wall_ms']:.2f} ms" for r in reports]
    bottom = [0.0] * len(reports)
    for key, label in (("busy_ms", "GPU busy"), ("gaps_ms", "between kernels"),
                       ("host_ms", "waits for the host")):  # fmt: skip
        heights = [100 * report[key] / report["wall_ms"] for report in reports]
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(ylabel="% of a step", ylim=(0, 125))  # with room for the legend


PLOTS: dict[str, Callable[[Axes, dict[str, Any]], bool]] = {
    "step": step_plot,
    "throughput": partial(rate_plot, rate="output_tokens_per_s", label="output tokens/s"),
    "prefill": partial(rate_plot, rate="prefill_tokens_per_s", label="prompt tokens/s"),
}
"""Each draws one figure of a session; False if the session has not measured it."""


def save(name: str, title: str, result: dict[str, Any], folder: Path, figure: Figure) -> None:
    (axes,) = figure.axes
    gpus = result["hardware"]["gpus"]
    machine = gpus[0] if gpus else result["hardware"]["cpu"]
    axes.set_title(f"{result['model']}, {machine}, {title}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    # No date in the file: the same results make the same picture.
    figure.savefig(path, metadata={"Date": None})
    print(path)


def new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    return figure, figure.subplots()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "docs" / "plots")
    args = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "jaxserve"  # else ids are random
    for result in compare_files(args.results):
        for name, draw in PLOTS.items():
            figure, axes = new_figure()
            if draw(axes, result):
                stem = f"{name}-{result['model']}-{result['session']}"
                save(stem, result["session"], result, args.output_dir, figure)
    reports: dict[str, list[dict[str, Any]]] = {}
    for report in step_reports(args.results):
        reports.setdefault(report["model"], []).append(report)
    for model, of_model in reports.items():
        figure, axes = new_figure()
        breakdown_plot(axes, of_model)
        save(f"breakdown-{model}", of_model[0]["date"], of_model[0], args.output_dir, figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())

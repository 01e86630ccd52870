"""Plots of the comparisons in `bench/results/`: step times, throughput, and where a step goes.

python tools/plots.py                  # docs/plots/{step,throughput,breakdown}-MODEL-SESSION.svg
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from compare_files import ROOT, compare_files, engines_of, median, of_engine, rates, step_times
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


def throughput_plot(axes: Axes, result: dict[str, Any]) -> bool:
    """Output tokens a second (prompt tokens where a workload only prefills), bars by engine."""
    engines = engines_of(result)
    found = {
        engine: rates(result, engine, "output_tokens_per_s")
        | rates(result, engine, "prefill_tokens_per_s")
        for engine in engines
    }
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
    axes.set(ylabel="tokens/s")
    return bool(workloads)


def breakdown_plot(axes: Axes, result: dict[str, Any]) -> bool:
    """jaxserve's decode steps: the GPU computes, waits between kernels, or waits for the host.

    Busy time is from a profile; the wait for the host is the engine's own count, at most; what is
    left of the step lies between kernels.
    """
    records = [r for r in of_engine(result, "jaxserve") if r.get("profiles")]
    if not records:
        return False
    sizes = list(records[0]["profiles"])
    step = [median([r["decode_step_ms"][size] for r in records]) for size in sizes]
    busy = [median([r["profiles"][size]["busy_ms"] for r in records]) for size in sizes]
    host = [median([r["host_gap_ms"][size] for r in records]) for size in sizes]
    host = [min(h, max(s - b, 0)) for h, s, b in zip(host, step, busy, strict=True)]
    gaps = [max(s - b - h, 0) for s, b, h in zip(step, busy, host, strict=True)]
    bottom = [0.0] * len(sizes)
    for label, heights in (("GPU busy", busy), ("between kernels", gaps), ("host", host)):
        axes.bar(sizes, heights, bottom=bottom, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(xlabel="batch size", ylabel="ms of a decode step")
    return True


PLOTS: dict[str, Callable[[Axes, dict[str, Any]], bool]] = {
    "step": step_plot,
    "throughput": throughput_plot,
    "breakdown": breakdown_plot,
}
"""Each draws one figure; False if the session has not measured it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "docs" / "plots")
    args = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "jaxserve"  # else ids are random
    for result in compare_files(args.results):
        for name, draw in PLOTS.items():
            figure = Figure(figsize=(7, 4.5), layout="constrained")
            axes = figure.subplots()
            if not draw(axes, result):
                continue
            gpus = result["hardware"]["gpus"]
            machine = gpus[0] if gpus else result["hardware"]["cpu"]
            axes.set_title(f"{result['model']}, {machine}, {result['session']}", fontsize=10)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            axes.legend()
            args.output_dir.mkdir(parents=True, exist_ok=True)
            path = args.output_dir / f"{name}-{result['model']}-{result['session']}.svg"
            # No date in the file: the same results make the same picture.
            figure.savefig(path, metadata={"Date": None})
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

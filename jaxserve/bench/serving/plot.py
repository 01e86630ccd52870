"""Latency against throughput over a sweep of request rates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.serving.metrics import TITLES


def plot_sweep(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel for each metric of time, one point for each run. Needs matplotlib."""
    from matplotlib.figure import Figure

    metrics = [metric for metric in ("ttft", "tpot", "e2el") if f"median_{metric}_ms" in runs[0]]
    figure = Figure(figsize=(5 * len(metrics), 4), layout="constrained")
    runs = sorted(runs, key=lambda run: float(run["request_rate"]))
    throughput = [run["output_throughput"] for run in runs]
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        keys = [key for key in runs[0] if key.endswith(f"_{metric}_ms")]
        shown = [key for key in keys if key.split("_")[0] not in ("mean", "std")]
        for key in shown:
            latencies = [run[key] for run in runs]
            axes.plot(throughput, latencies, marker="o", label=key.split("_")[0])
        for run in runs:
            point = (run["output_throughput"], run[shown[-1]])
            if point[1] is not None:
                label = f"{float(run['request_rate']):g}/s"
                axes.annotate(label, point, (0, 5), textcoords="offset points", ha="center")
        axes.set(title=TITLES[metric], xlabel="output tokens/s", ylabel="ms", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)

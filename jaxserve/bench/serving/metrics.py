"""The figures of a run, under vLLM's names."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.bench.serving.client import Outcome
from jaxserve.bench.serving.load import Load

TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (after the first)",
    "itl": "Time between events",
    "e2el": "End-to-end latency",
}


def summarise(
    load: Load, metrics: Sequence[str], percentiles: Sequence[float], bounds_ms: dict[str, float]
) -> dict[str, Any]:
    """Counts, rates, and mean, median, standard deviation and percentiles of each metric in
    milliseconds; of the requests that succeeded alone. Figures of nothing are None."""
    good = [outcome for outcome in load.outcomes if outcome.error is None]
    failed = len(load.outcomes) - len(good)
    num_in = sum(outcome.input_len for outcome in good)
    num_out = sum(outcome.output_len for outcome in good)
    result = {
        "duration": load.duration_s,
        "completed": len(good),
        "failed": failed,
        "errors": dict(Counter(o.error for o in load.outcomes if o.error).most_common()),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(good) / load.duration_s,
        "request_goodput": _goodput(good, bounds_ms) / load.duration_s if bounds_ms else None,
        "output_throughput": num_out / load.duration_s,
        "total_token_throughput": (num_in + num_out) / load.duration_s,
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(load.outcomes),
        "client_busy": load.client_busy,
    }
    values = values_ms(good)
    for metric in metrics:
        result |= _statistics(metric, values[metric], percentiles)
    return result


def values_ms(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """All values of each metric."""
    return {
        "ttft": [1000 * o.ttft_s for o in outcomes],
        "tpot": [1000 * o.tpot_s for o in outcomes if o.tpot_s is not None],
        "itl": [1000 * itl for o in outcomes for itl in o.itls_s],
        "e2el": [1000 * o.latency_s for o in outcomes],
    }


def percentile_key(percentile: float) -> str:
    return f"p{percentile:g}"


def _statistics(
    metric: str, values: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    array = np.array(values)
    figures = {"mean": np.mean, "median": np.median, "std": np.std}
    result = {name: float(figure(array)) if values else None for name, figure in figures.items()}
    for percentile in percentiles:
        value = float(np.percentile(array, percentile)) if values else None
        result[percentile_key(percentile)] = value
    return {f"{name}_{metric}_ms": value for name, value in result.items()}


def _goodput(outcomes: Sequence[Outcome], bounds_ms: dict[str, float]) -> int:
    """How many are within all bounds; a request of one token has no time per token."""

    def is_good(outcome: Outcome) -> bool:
        values = {
            "ttft": outcome.ttft_s,
            "tpot": outcome.tpot_s or 0.0,
            "e2el": outcome.latency_s,
        }
        return all(values[metric] * 1000 <= bound for metric, bound in bounds_ms.items())

    return sum(map(is_good, outcomes))


def _peak_rate(outcomes: Sequence[Outcome]) -> float | None:
    """Most events with tokens in any whole second of the run."""
    if not outcomes:
        return None
    firsts = np.array([o.sent_s + o.ttft_s for o in outcomes])
    times = np.concatenate(
        [first + np.cumsum([0.0, *o.itls_s]) for first, o in zip(firsts, outcomes, strict=True)]
    )
    begin = min(o.sent_s for o in outcomes)
    return float(np.bincount((times - begin).astype(int)).max())


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    changes = [(o.sent_s, 1) for o in outcomes] + [(o.sent_s + o.latency_s, -1) for o in outcomes]
    num_open = most = 0
    for _, change in sorted(changes):
        num_open += change
        most = max(most, num_open)
    return most


def table(result: dict[str, Any]) -> str:
    """The figures for a terminal."""
    rows: list[tuple[str, Any]] = [
        ("Request rate (1/s)", result["request_rate"]),
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Duration (s)", result["duration"]),
        ("Input tokens", result["total_input_tokens"]),
        ("Output tokens", result["total_output_tokens"]),
        ("Requests/s", result["request_throughput"]),
        ("Good requests/s", result["request_goodput"]),
        ("Output tokens/s", result["output_throughput"]),
        ("Total tokens/s", result["total_token_throughput"]),
        ("Most requests at once", result["max_concurrent_requests"]),
        ("The client's own load", result["client_busy"]),
    ]
    for metric, title in TITLES.items():
        figures = [key for key in result if key.endswith(f"_{metric}_ms")]
        rows += [(f"{title}, {key.split('_')[0]} (ms)", result[key]) for key in figures]
    shown = [(name, f"{v:,.2f}" if isinstance(v, float) else f"{v:,}")
             if not isinstance(v, str) else (name, v)
             for name, v in rows if v is not None]  # fmt: skip
    return "\n".join(f"{name:<56}{value:>14}" for name, value in shown)

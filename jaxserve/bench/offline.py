"""Throughput, prefill and decode steps of an engine in this process, whichever it is."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.bench.timing import Row, measure
from jaxserve.bench.workloads import TokenRequest, make_requests

SHORT_OUTPUT = 64
"""Output tokens of the shorter of a decode step's two runs, and most of a warm-up's requests."""
_PROFILED = (8, 24)


@dataclass(frozen=True)
class KernelStats:
    """What one profile has seen on the first GPU, each kernel once."""

    num_kernels: int
    num_copies: int
    busy_s: float
    """Kernels and copies, added up."""


class OfflineEngine(Protocol):
    """An engine that is ready."""

    name: str
    """As records have it: "jaxserve", "vllm", ..."""
    version: str
    dtype: str
    num_gpus: int
    max_num_seqs: int
    ready_s: float
    """From the start of making the engine until it could take requests."""
    settings: dict[str, Any]
    """What it was told, for the record."""

    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        """Run them all, past any end token, greedily unless it was told otherwise; how many tokens
        each has got."""

    def profile(self, requests: Sequence[TokenRequest]) -> KernelStats | None:
        """As `generate`, under a profiler; None where the engine or machine has none."""

    def host_gap_s(self) -> float | None:
        """Seconds so far that the device has waited for the host between steps, at most; None where
        the engine does not tell."""

    def close(self) -> None:
        """Give the memory back."""


def run_workload(
    engine: OfflineEngine, requests: Sequence[TokenRequest], warm_up_s: float
) -> dict[str, Any]:
    """Rates over the whole workload: of output and of all tokens, or of prompt tokens if every
    request has one output token."""
    row = _timed(engine, requests, warm_up_s)
    num_in = sum(len(request.prompt_token_ids) for request in requests)
    num_out = sum(request.output_len for request in requests)
    result = {"num_requests": len(requests), "seconds": row.as_json(), "spread": row.spread}
    result["flagged"] = row.flagged
    if num_out == len(requests):
        return result | {"prefill_tokens_per_s": round(num_in / row.value, 1)}
    return result | {
        "output_tokens_per_s": round(num_out / row.value, 1),
        "total_tokens_per_s": round((num_in + num_out) / row.value, 1),
    }


def run_decode(
    engine: OfflineEngine,
    batch_sizes: Sequence[int],
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
    warm_up_s: float,
    *,
    profile: bool = False,
) -> dict[str, Any]:
    """Milliseconds of a decode step at each batch size: what `output_len` tokens take longer than
    SHORT_OUTPUT, or a quarter of `output_len` if that is less, over the steps between.

    `host_gap_ms` is the part of it that the device may have waited for the host, where the engine
    tells. The context grows from `input_len` plus the short output to `input_len + output_len`.
    """
    short = min(SHORT_OUTPUT, output_len // 4)
    rows: dict[int, Row] = {}
    kernels: dict[int, dict[str, float]] = {}
    gaps_ms: dict[int, list[float]] = {size: [] for size in batch_sizes}
    for batch_size in batch_sizes:

        def batch(num_tokens: int, size: int = batch_size) -> list[TokenRequest]:
            return make_requests([(input_len, num_tokens)] * size, vocab_size, seed)

        few, many = batch(short), batch(output_len)

        def step_ms(few=few, many=many, gaps=gaps_ms[batch_size]) -> float:
            marks = [engine.host_gap_s()]
            seconds = []
            for requests in (few, many):
                seconds.append(_seconds(engine, requests))
                marks.append(engine.host_gap_s())
            if None not in marks:
                waited_s = (marks[2] - marks[1]) - (marks[1] - marks[0])
                gaps.append(waited_s / (output_len - short) * 1000)
            return (seconds[1] - seconds[0]) / (output_len - short) * 1000

        rows[batch_size] = measure(step_ms, lambda few=few: _run(engine, few), warm_up_s)
        if profile:
            found = [engine.profile(batch(num_tokens)) for num_tokens in _PROFILED]
            if None not in found:
                stats = _per_step(*found)
                stats["busy_share"] = round(stats["busy_ms"] / rows[batch_size].value, 3)
                kernels[batch_size] = stats
    first = min(batch_sizes)
    return {
        "input_len": input_len,
        "output_len": output_len,
        "decode_step_ms": {str(size): round(row.value, 4) for size, row in rows.items()},
        "kernels_per_step": kernels[first]["kernels"] if first in kernels else None,
        "profiles": {str(size): stats for size, stats in kernels.items()},
        "host_gap_ms": {str(s): round(sum(g) / len(g), 4) for s, g in gaps_ms.items() if g},
        "rows": {str(size): row.as_json() for size, row in rows.items()},
        "spread": max(row.spread for row in rows.values()),
        "flagged": any(row.flagged for row in rows.values()),
    }


def _per_step(few: KernelStats, many: KernelStats) -> dict[str, float]:
    """What a decode step adds to a profile."""
    steps = _PROFILED[1] - _PROFILED[0]
    return {
        "kernels": round((many.num_kernels - few.num_kernels) / steps, 1),
        "copies": round((many.num_copies - few.num_copies) / steps, 1),
        "busy_ms": round((many.busy_s - few.busy_s) / steps * 1000, 4),
    }


def _timed(engine: OfflineEngine, requests: Sequence[TokenRequest], warm_up_s: float) -> Row:
    # As many as run at once, cut short: a round of warm-up must not take as long as a pass.
    warm = [
        TokenRequest(request.prompt_token_ids, min(request.output_len, SHORT_OUTPUT))
        for request in requests[: engine.max_num_seqs]
    ]
    return measure(lambda: _seconds(engine, requests), lambda: _run(engine, warm), warm_up_s)


def _seconds(engine: OfflineEngine, requests: Sequence[TokenRequest]) -> float:
    begin = time.perf_counter()
    _run(engine, requests)
    return time.perf_counter() - begin


def _run(engine: OfflineEngine, requests: Sequence[TokenRequest]) -> None:
    got = engine.generate(requests)
    wanted = [request.output_len for request in requests]
    if got != wanted:
        wrong = next(
            i for i, pair in enumerate(zip(got, wanted, strict=True)) if len(set(pair)) > 1
        )
        raise RuntimeError(
            f"request {wrong} got {got[wrong]} tokens where {wanted[wrong]} were asked for"
        )

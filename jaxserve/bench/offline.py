"""Throughput, prefill and decode steps of an engine in this process, whichever it is."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxserve.bench.device_events import (
    DeviceEvent,
    ProfileError,
    StepKernel,
    step_kernels,
    step_totals,
)
from jaxserve.bench.timing import Row, measure
from jaxserve.bench.workloads import TokenRequest, make_requests

SHORT_OUTPUT = 64
"""Most output tokens of the shorter of a decode step's two runs, and of a warm-up's requests."""
WARM_REQUESTS = 128
"""Most requests of a workload's warm-up."""
LEAST_PROFILED_OUTPUT = 32
"""Fewest output tokens of decode steps that are profiled."""
_STEPS_PROFILED = 16
"""At most."""


class OfflineEngine(Protocol):
    """An engine that is ready."""

    name: str
    """As records have it: "jaxserve", "vllm", ..."""
    version: str
    dtype: str
    num_gpus: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    """Of one step; None where a step takes all prompts."""
    ready_s: float
    """From the start of making the engine until it could take requests."""
    settings: dict[str, Any]
    """What it was told, for the record."""

    def generate(self, requests: Sequence[TokenRequest]) -> list[int]:
        """Run them all, past any end token, greedily unless it was told otherwise; how many tokens
        each has got."""

    def profile(self, requests: Sequence[TokenRequest]) -> list[DeviceEvent] | None:
        """What `generate` runs on the first GPU, each kernel once, in the order of their starts;
        None where the engine or machine has no profiler."""

    def waits(self, kind: str) -> tuple[float, int] | None:
        """Seconds so far that the device has waited, at most, for launches of steps of this kind
        ("decode", "prefill" or "mixed"), and how many such steps there were; None where the engine
        does not tell."""

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

    `host_gap_ms` is how long the device may have waited for the launch of one, over all decode
    steps of these runs, where the engine tells. The context grows from `input_len` plus the short
    output to `input_len + output_len`. A profile is of the steps in the middle, whose contexts are
    the mean of those that are timed; a size whose profiles cannot be right has none, and a line on
    stderr says why. ValueError where the short output is done before all prompts are, or too few
    steps are left to profile.
    """
    short = short_output(output_len)
    profiled: dict[int, tuple[int, int]] = {}
    for size in batch_sizes:
        prompts = count_prompt_steps(size, input_len, output_len, engine.max_num_batched_tokens)
        if profile:
            profiled[size] = profiled_steps(short, output_len, prompts)
    rows: dict[int, Row] = {}
    kernels: dict[int, dict[str, float]] = {}
    gaps_ms: dict[int, float] = {}
    for batch_size in batch_sizes:

        def batch(num_tokens: int, size: int = batch_size) -> list[TokenRequest]:
            return make_requests([(input_len, num_tokens)] * size, vocab_size, seed)

        rows[batch_size], gap_ms = time_steps(
            engine, "decode", batch(short), batch(output_len), output_len - short, warm_up_s
        )
        if gap_ms is not None:
            gaps_ms[batch_size] = gap_ms
        if batch_size in profiled:
            try:
                found = profile_steps(engine, batch, profiled[batch_size], after=short)
            except ProfileError as error:
                # What was timed is still good.
                print(f"no profile of {batch_size} requests: {error}", file=sys.stderr)
                found = None
            if found is not None:
                stats = _per_step(found)
                stats["busy_share"] = round(stats["busy_ms"] / rows[batch_size].value, 3)
                kernels[batch_size] = stats
    first = min(batch_sizes)
    return {
        "input_len": input_len,
        "output_len": output_len,
        "decode_step_ms": {str(size): round(row.value, 4) for size, row in rows.items()},
        "kernels_per_step": kernels[first]["kernels"] if first in kernels else None,
        "profiles": {str(size): stats for size, stats in kernels.items()},
        "host_gap_ms": {str(size): round(ms, 4) for size, ms in gaps_ms.items()},
        "rows": {str(size): row.as_json() for size, row in rows.items()},
        "spread": max(row.spread for row in rows.values()),
        "flagged": any(row.flagged for row in rows.values()),
    }


def count_prompt_steps(batch_size: int, input_len: int, output_len: int, budget: int | None) -> int:
    """About as many as all prompts take, of `budget` tokens each. ValueError where the short output
    is done before."""
    short = short_output(output_len)
    prompt_steps = math.ceil(batch_size * input_len / budget) if budget else 1
    if prompt_steps > short:
        raise ValueError(
            f"output_len must be longer, or max_num_batched_tokens more, than {output_len} and "
            f"{budget}: {batch_size} prompts of {input_len} tokens take {prompt_steps} steps, and "
            f"decode steps are told from those by what comes after {short} tokens"
        )
    return prompt_steps


def time_steps(
    engine: OfflineEngine,
    kind: str,
    few: Sequence[TokenRequest],
    many: Sequence[TokenRequest],
    num_steps: int,
    warm_up_s: float,
) -> tuple[Row, float | None]:
    """(milliseconds of a step, of which the device may have waited for the host; None if unknown).

    A step is what `many` takes longer than `few`, over the `num_steps` between. The wait is that of
    steps of this kind in the same runs, not a difference: it has no noise of their prompts.
    """
    gaps_ms: list[float] = []

    def step_ms() -> float:
        before = engine.waits(kind)
        few_s, many_s = _seconds(engine, few), _seconds(engine, many)
        after = engine.waits(kind)
        if before is not None and after[1] > before[1]:
            gaps_ms.append(1000 * (after[0] - before[0]) / (after[1] - before[1]))
        return 1000 * (many_s - few_s) / num_steps

    row = measure(step_ms, lambda: _run(engine, few), warm_up_s)
    return row, sum(gaps_ms) / len(gaps_ms) if gaps_ms else None


def short_output(output_len: int) -> int:
    """Tokens of the shorter of a decode step's two runs."""
    return min(SHORT_OUTPUT, output_len // 4)


def profiled_steps(short: int, output_len: int, prompt_steps: int) -> tuple[int, int]:
    """The middle of the steps `short` to `output_len`: whole dispatches of 8, with at least `short`
    steps after them. They are those of the average request, which begins when half of the prompts
    are done. ValueError if none are left."""
    if output_len < LEAST_PROFILED_OUTPUT:
        raise ValueError(
            f"output_len of a profile must be at least {LEAST_PROFILED_OUTPUT}, got {output_len}"
        )
    middle = (short + output_len) // 2
    half = min(_STEPS_PROFILED // 2, (output_len - short - middle) // 4 * 4)
    middle -= prompt_steps // 2
    return middle - half, middle + half


def profile_steps(
    engine: OfflineEngine,
    requests: Callable[[int], Sequence[TokenRequest]],
    steps: tuple[int, int],
    after: int,
) -> dict[str, StepKernel] | None:
    """Kernels of a step, from the steps between the two, in runs that go on for `after` more;
    `requests` makes those of a run of so many. None where the engine or machine has no profiler.
    ProfileError as by `step_kernels`."""
    few, many = (engine.profile(requests(num_steps + after)) for num_steps in steps)
    if few is None or many is None:
        return None
    return step_kernels(few, many, steps[1] - steps[0], after)


def _per_step(found: dict[str, StepKernel]) -> dict[str, float]:
    """Of all kernels and copies of a step together."""
    kernels, copies, busy_ms = step_totals(found)
    return {"kernels": round(kernels, 1), "copies": round(copies, 1), "busy_ms": round(busy_ms, 4)}


def _timed(engine: OfflineEngine, requests: Sequence[TokenRequest], warm_up_s: float) -> Row:
    # Some, cut short: a round of warm-up must not take as long as a pass.
    warm = [
        TokenRequest(request.prompt_token_ids, min(request.output_len, SHORT_OUTPUT))
        for request in requests[:WARM_REQUESTS]
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

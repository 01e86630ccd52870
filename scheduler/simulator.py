"""Replays a trace of request lengths through the real scheduler, with a cost model for the device.

No model runs: a step takes the time that `CostModel` says, on a fake clock, and every sampled
token is new, so that only the lengths matter. Host time counts as zero.
"""

import csv
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean

from scheduler.config import SchedulerConfig
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; it always generates all of `output_len` tokens."""

    arrival_s: float
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of device time of one step: a sum of four terms.

    The defaults are the order of an 8-billion-parameter model (32 layers, width 4096, 8 KV heads
    of 128) in bfloat16 on a GPU with 4 TB/s and 500 TFLOP/s attained.
    """

    step_s: float = 4e-3
    """Fixed: reading the weights."""
    token_s: float = 32e-6
    """For each token of the step: 2 operations a parameter."""
    context_token_s: float = 32e-9
    """For each KV-cache position that a row reads (once a row): its bytes."""
    attention_s: float = 1e-9
    """For each pair of a token and a position that it attends to: its operations."""

    def step_time_s(self, output: SchedulerOutput) -> float:
        num_context_tokens = num_pairs = 0
        for row in output.scheduled:
            num_context_tokens += row.start + row.num_tokens
            num_pairs += row.num_tokens * (2 * row.start + row.num_tokens + 1) // 2
        return (
            self.step_s
            + self.token_s * output.num_tokens
            + self.context_token_s * num_context_tokens
            + self.attention_s * num_pairs
        )


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Clock times in seconds of one request of the trace."""

    arrival_s: float
    first_token_s: float
    finish_s: float
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Time from arrival to the last token."""
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for a single token."""
        return (self.finish_s - self.first_token_s) / max(1, self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Nearest-rank percentiles."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Percentiles of at least one value."""
        ordered = sorted(values)
        ranks = (-(-percent * len(ordered) // 100) for percent in (50, 90, 99, 100))
        return cls(*(ordered[rank - 1] for rank in ranks))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    duration_s: float
    """From the start of the clock to the last token."""
    num_steps: int
    num_preemptions: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt tokens, those from the prefix cache included, and output tokens."""
    ttft_s: Percentiles
    tpot_s: Percentiles
    """Over the requests with more than one output token."""
    e2e_s: Percentiles
    peak_kv_usage: float
    mean_kv_usage: float
    """Fractions of the KV blocks in use; the mean is over the steps, weighted with their times."""
    mean_budget_fill: float
    """Mean over the steps of scheduled tokens / `max_num_batched_tokens`."""
    num_cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""
    requests: tuple[RequestTiming, ...]
    """In the order of the trace."""


def read_trace(path: Path, num_requests: int) -> list[TraceRequest]:
    """The first requests of a CSV file with columns input_len, output_len and maybe arrival_s.

    Without arrival times all requests arrive at 0.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [
            TraceRequest(
                float(row.get("arrival_s", 0)), int(row["input_len"]), int(row["output_len"])
            )
            for row, _ in zip(rows, range(num_requests), strict=False)
        ]


def simulate(
    trace: Sequence[TraceRequest],
    config: SchedulerConfig,
    cost: CostModel,
    *,
    num_steps_ahead: int = 1,
    shared_prefix_len: int = 0,
) -> SimulationResult:
    """Runs the whole trace; two calls with the same arguments give the same result.

    Args:
        trace: at least one request, in any order.
        num_steps_ahead: steps launched before a step's tokens are read; 0 leaves the device idle
            between steps (which costs nothing here), 1 is the engine's overlap.
        shared_prefix_len: leading prompt tokens that all prompts have in common (a prompt that is
            shorter is cut from it). All other token ids differ.
    """
    scheduler = Scheduler(config)
    new_ids = count(shared_prefix_len)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[
                position if position < shared_prefix_len else next(new_ids)
                for position in range(entry.input_len)
            ],
            max_tokens=entry.output_len,
        )
        for index, entry in enumerate(trace)
    ]
    arrivals = deque(sorted(range(len(trace)), key=lambda index: trace[index].arrival_s))
    first_token_s: dict[str, float] = {}
    finish_s: dict[str, float] = {}
    in_flight: deque[tuple[SchedulerOutput, float]] = deque()
    step_times_s: list[float] = []
    kv_usages: list[float] = []
    fills: list[float] = []
    clock_s = device_free_s = 0.0

    while arrivals or scheduler.has_unfinished or in_flight:
        while arrivals and trace[arrivals[0]].arrival_s <= clock_s:
            scheduler.add(requests[arrivals.popleft()])
        output = scheduler.schedule()
        if output is not None:
            step_time_s = cost.step_time_s(output)
            device_free_s = max(device_free_s, clock_s) + step_time_s
            in_flight.append((output, device_free_s))
            step_times_s.append(step_time_s)
            kv_usages.append(scheduler.kv_usage)
            fills.append(output.num_tokens / config.max_num_batched_tokens)
            if len(in_flight) <= num_steps_ahead:
                continue
        if in_flight:
            finished, end_s = in_flight.popleft()
            clock_s = max(clock_s, end_s)
            sampled = [(next(new_ids),) for _ in finished.scheduled]
            for event in scheduler.update(finished, sampled):
                first_token_s.setdefault(event.request_id, clock_s)
                if event.finish_reason is not None:
                    finish_s[event.request_id] = clock_s
        else:
            clock_s = trace[arrivals[0]].arrival_s

    timings = tuple(
        RequestTiming(entry.arrival_s, first_token_s[name], finish_s[name], entry.output_len)
        for name, entry in zip(map(str, range(len(trace))), trace, strict=True)
    )
    num_output_tokens = sum(entry.output_len for entry in trace)
    num_total_tokens = num_output_tokens + sum(entry.input_len for entry in trace)
    return SimulationResult(
        duration_s=clock_s,
        num_steps=len(step_times_s),
        num_preemptions=scheduler.num_preemptions,
        output_tokens_per_s=num_output_tokens / clock_s,
        total_tokens_per_s=num_total_tokens / clock_s,
        ttft_s=Percentiles.of(timing.ttft_s for timing in timings),
        tpot_s=Percentiles.of(t.tpot_s for t in timings if t.num_output_tokens > 1),
        e2e_s=Percentiles.of(timing.e2e_s for timing in timings),
        peak_kv_usage=max(kv_usages),
        mean_kv_usage=fmean(kv_usages, weights=step_times_s),
        mean_budget_fill=fmean(fills),
        num_cached_tokens=sum(request.num_cached_tokens for request in requests),
        requests=timings,
    )

"""What an engine counts of itself. Plain data, so that it can cross to another process."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler import PrefixCacheStats, SchedulerOutput

STEP_KINDS = ("decode", "prefill", "mixed")
_STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_GAP_BOUNDS_S = (0.00001, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Histogram:
    """Counts of observed values by upper bound, as Prometheus has them."""

    bounds: tuple[float, ...]
    counts: list[int]
    """One for each bound, not cumulative, and one for what is over the last."""
    total: float = 0.0
    """The sum of all values."""

    @classmethod
    def of(cls, bounds: Sequence[float]) -> "Histogram":
        return cls(tuple(bounds), [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, list(self.counts), self.total)


@dataclass(slots=True)
class StepStats:
    """How the steps so far went."""

    step_time_s: dict[str, Histogram] = field(
        default_factory=lambda: {kind: Histogram.of(_STEP_BOUNDS_S) for kind in STEP_KINDS}
    )
    """By kind: from a step's launch, or the end of the one before it if that is later, until its
    tokens were on the host."""
    host_gap_s: dict[str, Histogram] = field(
        default_factory=lambda: {kind: Histogram.of(_GAP_BOUNDS_S) for kind in STEP_KINDS}
    )
    """By kind: how long the device may have waited for a launch, at most: 0 if the dispatch before
    was still running by then, else the host's time since the result before that."""
    num_tokens: Histogram = field(default_factory=lambda: Histogram.of(_TOKEN_BOUNDS))
    """Tokens in a step."""

    def observe(self, scheduled: SchedulerOutput, seconds: float) -> None:
        num_steps = scheduled.num_steps
        self.step_time_s[_kind(scheduled)].observe(seconds / num_steps, num_steps)
        self.num_tokens.observe(scheduled.num_tokens, num_steps)

    def observe_gap(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Before the launch of `scheduled`."""
        self.host_gap_s[_kind(scheduled)].observe(seconds)

    def copy(self) -> "StepStats":
        return StepStats(
            {kind: histogram.copy() for kind, histogram in self.step_time_s.items()},
            {kind: histogram.copy() for kind, histogram in self.host_gap_s.items()},
            self.num_tokens.copy(),
        )


def _kind(scheduled: SchedulerOutput) -> str:
    if scheduled.num_decode in (0, len(scheduled.scheduled)):
        return "decode" if scheduled.num_decode else "prefill"
    return "mixed"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of the engine."""

    num_running: int
    num_waiting: int
    kv_usage: float
    """The fraction of the KV blocks that running requests hold."""
    num_preemptions: int
    num_steps: int
    prefix_cache: PrefixCacheStats
    steps: StepStats

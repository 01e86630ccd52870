"""How everything is timed: warm until the clock is up, then twice, and flagged if they differ."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.gpu import ClockMonitor

FLAG_OVER = 0.15
"""Passes that differ by more than this share prove nothing."""
NO_FIGURE = 999.0
_SETTLED = 0.03
_MOST_WARM_UPS = 5
"""Times the least warm-up that a clock gets to settle."""


@dataclass(frozen=True)
class Row:
    """One figure, measured twice."""

    passes: list[float]
    spread: float
    flagged: bool
    warm_up_s: float
    clock: dict[str, Any]
    """SM clock and power while the passes ran."""

    @property
    def value(self) -> float:
        """The mean of the passes."""
        return sum(self.passes) / len(self.passes)

    def as_json(self) -> dict[str, Any]:
        return {
            "passes": [round(value, 4) for value in self.passes],
            "spread": self.spread,
            "flagged": self.flagged,
            "warm_up_s": round(self.warm_up_s, 1),
        } | self.clock


def spread_of(passes: Sequence[float]) -> float:
    """How much the largest exceeds the smallest, as a share. A figure that is not positive is noise
    and no figure: the spread is then NO_FIGURE."""
    if min(passes) <= 0:
        return NO_FIGURE
    return round(max(passes) / min(passes) - 1, 3)


def measure(run: Callable[[], float], warm_up: Callable[[], object], warm_up_s: float) -> Row:
    """Run `warm_up` again and again for `warm_up_s` seconds, on a GPU until its clock has settled,
    then `run` twice. `run` returns the figure that it has measured."""
    with ClockMonitor() as monitor:
        warmed_s = _warm_up(warm_up, warm_up_s, monitor)
        first = monitor.num_readings
        passes = [run(), run()]
        clock = monitor.summary(first)
    spread = spread_of(passes)
    return Row(passes, spread, spread > FLAG_OVER, warmed_s, clock)


def _warm_up(work: Callable[[], object], least_s: float, monitor: ClockMonitor) -> float:
    begin = time.monotonic()
    marks = [monitor.num_readings]
    while True:
        work()
        seconds = time.monotonic() - begin
        if monitor.num_readings > marks[-1]:
            marks.append(monitor.num_readings)
        if seconds >= least_s and (not monitor.available or _is_settled(monitor, marks)):
            return seconds
        if seconds >= _MOST_WARM_UPS * least_s:
            return seconds


def _is_settled(monitor: ClockMonitor, marks: Sequence[int]) -> bool:
    """Whether the clock was about the same in the last two rounds of work that were read."""
    if len(marks) < 3:
        return False
    before = monitor.sm_clock_mhz(marks[-3], marks[-2])
    last = monitor.sm_clock_mhz(marks[-2], marks[-1])
    return abs(last - before) <= _SETTLED * before

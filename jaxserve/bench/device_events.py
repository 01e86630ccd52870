"""What a profiler saw on the first GPU, whichever profiler it was, and what of it is a step's."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class DeviceEvent(NamedTuple):
    """A kernel, a copy or a fill. Launch gaps and host time are not in it."""

    name: str
    start_ns: float
    duration_ns: float


def is_copy(name: str) -> bool:
    """Whether an event is a copy or a fill, by its name."""
    return name.lower().startswith(("memcpy", "memset"))


def step_kernels(
    few: Sequence[DeviceEvent], many: Sequence[DeviceEvent], num_steps: int
) -> dict[str, tuple[float, float]]:
    """By name, how many kernels and copies a step has and the milliseconds of all of them.

    `few` and `many` are all events of two runs, in the order of their starts; the second is
    `num_steps` steps longer at its end. What it has more is counted, and timed where it is: at the
    end. A difference of times would have the noise of what comes before, prompts that take many
    times as long as a few steps.
    """
    counts = Counter(event.name for event in many)
    counts.subtract(event.name for event in few)
    times_ns: dict[str, list[float]] = {}
    for event in many[len(few) :]:
        times_ns.setdefault(event.name, []).append(event.duration_ns)
    return {
        name: (counts[name] / num_steps, counts[name] / num_steps * sum(ns) / len(ns) / 1e6)
        for name, ns in times_ns.items()
        if counts[name] > 0
    }

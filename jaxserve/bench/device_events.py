"""What a profiler saw on one GPU, whichever profiler it was, and what of it is a step's."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
    few: Sequence[DeviceEvent], many: Sequence[DeviceEvent], num_steps: int, after: int
) -> dict[str, tuple[float, float]]:
    """By name, how many kernels and copies a step has and the milliseconds of all of them.

    `few` and `many` are all events of two runs, in the order of their starts, of which the second
    has `num_steps` steps more. What it has more is counted, and timed where it is: as many events,
    up to `after` steps before the end, in which requests that began first are done already. A
    difference of times would have the noise of the prompts, which take many times as long as a few
    steps. What does not run in those steps is no part of them. ValueError if there are none.
    """
    num_events = len(many) - len(few)
    end = len(many) - round(num_events * after / num_steps)
    if not 0 < num_events <= end:
        raise ValueError(
            f"profiles of {len(few)} and {len(many)} events cannot be {num_steps} steps apart, "
            f"{after} before the end: one has lost events"
        )
    counts = Counter(event.name for event in many)
    counts.subtract(event.name for event in few)
    times_ns: dict[str, list[float]] = {}
    for event in many[end - num_events : end]:
        times_ns.setdefault(event.name, []).append(event.duration_ns)
    return {
        name: (counts[name] / num_steps, counts[name] / num_steps * sum(ns) / len(ns) / 1e6)
        for name, ns in times_ns.items()
        if counts[name] > 0
    }


def step_totals(found: Mapping[str, tuple[float, float]]) -> tuple[float, float, float]:
    """(kernels, copies, milliseconds of both) of a step, from `step_kernels`."""
    copies = sum(count for name, (count, _) in found.items() if is_copy(name))
    kernels = sum(count for count, _ in found.values()) - copies
    return kernels, copies, sum(ms for _, ms in found.values())

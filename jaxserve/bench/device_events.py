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


class StepKernel(NamedTuple):
    """Of one name, what a step has."""

    count: float
    ms: float
    """Of all of them."""


class ProfileError(Exception):
    """Two profiles that are not the steps apart that they should be."""


def step_kernels(
    few: Sequence[DeviceEvent], many: Sequence[DeviceEvent], num_steps: int, after: int
) -> dict[str, StepKernel]:
    """Kernels and copies of a step by name, from two runs of which one has more of these steps.

    `few` and `many` are all events of two runs, in the order of their starts, the second with
    `num_steps` steps more. What it has more is counted, and timed where it is: as many events, up
    to `after` steps of as many events each before the end, in which requests that began first may
    be done already. A difference of times would have the noise of the prompts, which take many
    times as long as a few steps. ProfileError where those events are not what the second run has
    more, but for as many as a step has: then other work than the steps differs.
    """
    num_events = len(many) - len(few)
    end = len(many) - round(num_events * after / num_steps)
    counts = Counter(event.name for event in many)
    counts.subtract(event.name for event in few)
    window = many[max(end - num_events, 0) : max(end, 0)]
    found = Counter(event.name for event in window)
    odd = sum(abs(found[name] - count) for name, count in counts.items())
    if num_events <= 0 or odd > num_events / num_steps:
        raise ProfileError(
            f"profiles of {len(few)} and {len(many)} events are not {num_steps} steps apart: "
            f"{odd} events are of other work"
        )
    times_ns = dict.fromkeys(found, 0.0)
    for event in window:
        times_ns[event.name] += event.duration_ns
    return {
        name: StepKernel(count / num_steps, count / num_steps * times_ns[name] / found[name] / 1e6)
        for name, count in counts.items()
        if count > 0 and found[name]
    }


def step_totals(kernels: Mapping[str, StepKernel]) -> tuple[float, float, float]:
    """(kernels, copies, milliseconds of both) of a step."""
    copies = sum(kernel.count for name, kernel in kernels.items() if is_copy(name))
    both = sum(kernel.count for kernel in kernels.values())
    return both - copies, copies, sum(kernel.ms for kernel in kernels.values())

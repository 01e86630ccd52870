"""What ran on the first GPU, by JAX's profiler: each kernel and copy once."""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

from jaxserve.bench.offline import KernelStats


class DeviceEvent(NamedTuple):
    """A kernel, a copy or a fill. Launch gaps and host time are not in it."""

    name: str
    start_ns: float
    duration_ns: float


def trace(run: Callable[[], object]) -> list[DeviceEvent]:
    """The events until `run` has returned and what it returned is ready, in the order of their
    starts."""
    options = jax.profiler.ProfileOptions()
    # Calls of Python functions, which nobody reads here.
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return device_events(ProfileData.from_file(str(path)))


def device_events(profile: ProfileData) -> list[DeviceEvent]:
    """The events of a profile, in the order of their starts.

    XLA's tracer also lists modules and operations that span several kernels, in lines of their own;
    only the streams' lines are read.
    """
    events = [
        DeviceEvent(event.name, event.start_ns, event.duration_ns)
        for line in profile.find_plane_with_name("/device:GPU:0").lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(events, key=lambda event: event.start_ns)


def is_copy(name: str) -> bool:
    """Whether an event is a copy or a fill, by its name."""
    return name.lower().startswith(("memcpy", "memset"))


def kernel_stats(events: Iterable[DeviceEvent]) -> KernelStats:
    """Counts and the sum of all durations."""
    num_kernels = num_copies = 0
    busy_ns = 0.0
    for event in events:
        busy_ns += event.duration_ns
        num_copies += is_copy(event.name)
        num_kernels += not is_copy(event.name)
    return KernelStats(num_kernels, num_copies, busy_ns / 1e9)

"""What ran on the first GPU, by JAX's profiler: each kernel and copy once."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.profiler import ProfileData

from jaxserve.bench.device_events import DeviceEvent


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
        return read_profile(ProfileData.from_file(str(path)))


def read_profile(profile: ProfileData) -> list[DeviceEvent]:
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

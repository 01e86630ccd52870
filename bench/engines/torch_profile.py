"""torch's profiler, read so that each kernel counts once."""

import torch
from torch.profiler import ProfilerActivity, profile

from jaxserve.bench.device_events import DeviceEvent


def start_profile() -> profile:
    torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    profiler.start()
    return profiler


def stop_profile(profiler: profile) -> list[DeviceEvent]:
    """The device's events in the order of their starts. The tables that torch prints list an
    operation and its kernels, which counts time twice."""
    torch.cuda.synchronize()
    profiler.stop()
    events = [
        DeviceEvent(event.name(), event.start_ns(), event.duration_ns())
        for event in profiler.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type())
    ]
    return sorted(events, key=lambda event: event.start_ns)

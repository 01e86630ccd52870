"""torch's profiler, read so that each kernel counts once."""

import torch
from torch.profiler import ProfilerActivity, profile


def start_profile() -> profile:
    torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
    profiler.start()
    return profiler


def stop_profile(profiler: profile) -> tuple[int, int, float]:
    """(kernels, copies, seconds of both). The tables that torch prints list an operation and its
    kernels, which counts time twice; these are the device's events alone."""
    torch.cuda.synchronize()
    profiler.stop()
    events = [
        event
        for event in profiler.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type())
    ]
    num_copies = sum(event.name().startswith(("Memcpy", "Memset")) for event in events)
    busy_s = sum(event.duration_ns() for event in events) / 1e9
    return len(events) - num_copies, num_copies, busy_s

"""What the driver says of GPUs, here by a stand-in for nvidia-smi."""

import stat
import time

import pytest

from jaxserve.bench.gpu import ClockMonitor

_DRIVER = """#!/bin/sh
case "$*" in
*"-i $GPU "*clocks.sm*)
    while echo "1605, 692.5"; do sleep 0.01; done;;
*clocks.sm*) while echo "345, 75.0"; do sleep 0.01; done;;
*) echo "NVIDIA H200"; echo "NVIDIA H200";;
esac
"""
"""Of two GPUs: $GPU works, the other is idle."""


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("1", "1"), ("GPU-7f,0", "GPU-7f")])
def test_the_clock_is_that_of_the_first_gpu_that_cuda_shows(tmp_path, monkeypatch, visible, first):
    driver = tmp_path / "nvidia-smi"
    driver.write_text(_DRIVER)
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("GPU", first)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with ClockMonitor() as monitor:
        end = time.monotonic() + 10
        while not monitor.num_readings and time.monotonic() < end:
            time.sleep(0.01)
    assert monitor.summary() == {"sm_clock_mhz": 1605.0, "power_w": 692.5}

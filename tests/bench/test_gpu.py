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


@pytest.fixture
def make_driver(tmp_path, monkeypatch):
    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("1", "1"), ("GPU-8f,0", "GPU-8f")])
def test_the_clock_is_of_the_first_gpu_that_cuda_shows(make_driver, monkeypatch, visible, first):
    make_driver(_DRIVER)
    monkeypatch.setenv("GPU", first)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with ClockMonitor() as monitor:
        end = time.monotonic() + 10
        while not monitor.num_readings and time.monotonic() < end:
            time.sleep(0.01)
        assert monitor.available
    assert monitor.summary() == {"sm_clock_mhz": 1605.0, "power_w": 692.5}


def test_a_driver_that_tells_nothing_is_not_waited_for(make_driver):
    make_driver("#!/bin/sh\ncase $* in *clocks.sm*) exit 6;; *) echo NVIDIA H200;; esac\n")
    with ClockMonitor() as monitor:
        end = time.monotonic() + 10
        while monitor.available and time.monotonic() < end:
            time.sleep(0.01)
        assert not monitor.available
    assert monitor.summary() == {"sm_clock_mhz": None, "power_w": None}

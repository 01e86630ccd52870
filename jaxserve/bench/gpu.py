"""What the driver says of the GPUs: names, and the clock that they run at."""

import os
import shutil
import statistics
import subprocess
import threading
from typing import Any

_PERIOD_MS = 200


def gpu_names() -> list[str]:
    """One name a GPU; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def _first_visible() -> str:
    """Its number or UUID: CUDA hides GPUs, and nvidia-smi does not."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


class ClockMonitor:
    """Reads SM clock and power of the first GPU that CUDA shows this process, while the `with`
    block runs, in another process.

    Without nvidia-smi there is nothing to read, and every figure is None.
    """

    def __init__(self) -> None:
        self._readings: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ClockMonitor":
        if gpu_names():
            command = [
                "nvidia-smi", "-i", _first_visible(), "-lms", str(_PERIOD_MS),
                "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits",
            ]  # fmt: skip
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            with self._process as process:
                process.terminate()
                self._thread.join()

    @property
    def available(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def num_readings(self) -> int:
        return len(self._readings)

    def sm_clock_mhz(self, since: int = 0, until: int | None = None) -> float | None:
        """The median of the readings with these numbers; None if there are none."""
        clocks = [clock for clock, _ in self._readings[since:until]]
        return statistics.median(clocks) if clocks else None

    def summary(self, since: int = 0) -> dict[str, Any]:
        """Median SM clock and power from reading number `since` on."""
        power = [watts for _, watts in self._readings[since:]]
        return {
            "sm_clock_mhz": self.sm_clock_mhz(since),
            "power_w": statistics.median(power) if power else None,
        }

    def _read(self) -> None:
        for line in self._process.stdout:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # "[N/A]" where a GPU does not tell
                continue
            self._readings.append((clock, power))

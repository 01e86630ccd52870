"""Where a result was measured: what every file in `bench/results/` says of its machine and run."""

import importlib.metadata
import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = (
    "jaxserve",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "transformers",
    "llguidance",
    "torch",
    "jax-triton",
)


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Installed versions of what the figures depend on; absent packages are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(threads: int) -> dict:
    """Hardware, versions, date and command of this run; absolute paths, which say nothing
    elsewhere, are cut to their names."""
    arguments = [Path(a).name if a.startswith("/") else a for a in sys.argv]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *arguments]),
        "hardware": {"cpu": cpu_name(), "threads": threads},
        "versions": versions(),
    }


def write_result(path: Path, result: dict) -> None:
    """Write one result file and print it."""
    text = json.dumps(result, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")

"""Where a result was measured: what every result file says of its machine and run."""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxserve.bench.gpu import gpu_names

PACKAGES = (
    "jaxserve", "jax", "jaxlib", "flax", "numpy", "transformers", "llguidance",
    "torch", "vllm", "triton",
    "jax-triton",
)  # fmt: skip
_SECRET_FLAG = "--api-key"
_ABSOLUTE_PATH = re.compile(r"(^|=)/(?:[^/]*/)*([^/]+)")


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


def describe(threads: int | None = None) -> dict[str, Any]:
    """Hardware, versions, date and command of this run. In the command, keys are blanked and of
    absolute paths only the last part is left."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(
            [_program(sys.argv[0]), *map(shlex.quote, _without_secrets(sys.argv[1:]))]
        ),
        "hardware": {
            "cpu": cpu_name(),
            "threads": threads or len(os.sched_getaffinity(0)),
            "gpus": gpu_names(),
        },
        "versions": versions(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write one result file and print it."""
    text = json.dumps(result, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")


def _program(path: str) -> str:
    """`jaxserve`, also by `python -c`, or `python` and the script below the current folder."""
    if Path(path).stem in ("jaxserve", "__main__", "-c"):
        return "jaxserve"
    script = Path(path)
    if script.is_absolute() and script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    return f"python {script}"


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    kept = []
    for index, argument in enumerate(arguments):
        if index and arguments[index - 1] == _SECRET_FLAG:
            argument = "..."
        elif argument.startswith(f"{_SECRET_FLAG}="):
            argument = f"{_SECRET_FLAG}=..."
        kept.append(_ABSOLUTE_PATH.sub(r"\1\2", argument))
    return kept

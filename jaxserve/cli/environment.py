"""`jaxserve collect-env`: what a report of a problem should say about the machine."""

import argparse
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "jaxserve", "jax", "jaxlib",
    "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
    "flax", "orbax-checkpoint", "transformers", "tokenizers", "numpy", "triton", "jax-triton",
)  # fmt: skip
_GPU_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


def run(args: argparse.Namespace) -> int:
    """One line each; no host name, user name or path."""
    for name, value in _facts():
        print(f"{name}: {value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "jax devices", _jax_devices()
    for index, gpu in enumerate(_gpus()):
        yield f"gpu {index}", gpu
    yield "cpu", _cpu()
    yield "memory", _memory()


def _jax_devices() -> str:
    import jax

    # Only to look: the memory stays free for a server that runs on the same GPU.
    jax.config.update("jax_pjrt_client_create_options", "preallocate:false")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return "error: " + " ".join(str(error).split())
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU, as the driver says."""
    if shutil.which(_GPU_QUERY[0]) is None:
        return ["none (no nvidia-smi)"]
    done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return ["error: " + " ".join((done.stdout + done.stderr).split())]
    return [line.strip() for line in done.stdout.splitlines()]


def _cpu() -> str:
    model = _line_of("/proc/cpuinfo", "model name") or platform.machine()
    return f"{os.cpu_count()} x {model}"


def _memory() -> str:
    total = _line_of("/proc/meminfo", "MemTotal")
    return "unknown" if total is None else f"{int(total.split()[0]) / 2**20:.1f} GiB"


def _line_of(path: str, name: str) -> str | None:
    """What follows `name:` in a file of the kernel's, if there."""
    if not Path(path).exists():
        return None
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None

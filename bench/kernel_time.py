"""Device time of single kernels, and the ceilings of the GPU they run on."""

import functools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp


def kernel_times(run: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds that each kernel took on the device while `run` did its work, by kernel name.

    From the profiler's trace: launch gaps and host time are not in it.
    """
    times = defaultdict(list)
    for name, _, seconds in _kernels(run):
        times[name].append(seconds)
    return dict(times)


def kernel_durations(run: Callable[[], object]) -> list[float]:
    """Seconds that the kernels took on the device, in the order of their starts."""
    return [seconds for _, _, seconds in sorted(_kernels(run), key=lambda kernel: kernel[1])]


def _kernels(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """Name, start in nanoseconds and seconds of each."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        found = []
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        found.append((event.name, event.start_ns, event.duration_ns * 1e-9))
    return found


def copy_bandwidth() -> float:
    """Bytes read plus bytes written each second by a large copy, by memcpy or by a kernel."""
    x = jnp.ones((1 << 29,), jnp.float32)
    rates = []
    for f in (jax.jit(jnp.copy), jax.jit(jnp.negative)):
        jax.block_until_ready([f(x) for _ in range(3)])
        times = kernel_times(functools.partial(_repeat, f, x))
        rates.append(2 * x.nbytes / statistics.median(max(times.values(), key=sum)))
    return max(rates)


def _repeat(f: Callable[..., jax.Array], *arguments: jax.Array) -> list[jax.Array]:
    return [f(*arguments) for _ in range(5)]


def matmul_rate() -> float:
    """Operations each second of an 8192^3 bfloat16 product of random numbers."""
    a, b = jax.random.normal(jax.random.key(0), (2, 8192, 8192), jnp.bfloat16)
    f = jax.jit(jnp.dot)
    jax.block_until_ready([f(a, b) for _ in range(20)])
    times = kernel_times(functools.partial(_repeat, f, a, b))
    return 2 * 8192**3 / statistics.median(max(times.values(), key=sum))

"""Four CPU devices to shard over (the GPU suite, `-m gpu`, alone sees the GPU as well), and what
tests in several folders use."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Before JAX is first imported, which reads both.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4".strip()
    if not _runs_on_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("gpu", "clients"):
            if name in item.keywords and config.option.markexpr.strip() != name:
                item.add_marker(pytest.mark.skip(reason=f"runs with -m {name}"))


def _runs_on_gpu(config: pytest.Config) -> bool:
    return config.option.markexpr.strip() == "gpu"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command; returns exit code, stdout and stderr."""
    from jaxserve.cli import main

    def run(*argv: object) -> tuple[int, str, str]:
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What XLA has compiled in this process since the test began."""
    import jax.monitoring

    heard: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if "backend_compile" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield heard
    jax.monitoring.unregister_event_duration_listener(listen)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for_condition(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    """Waits until a condition holds."""
    return wait_for_condition


@pytest.fixture(scope="session")
def wait_gone() -> Callable[[list[int]], None]:
    """Waits until none of these processes is left."""

    def wait(pids: list[int]) -> None:
        wait_for_condition(lambda: all(is_gone(pid) for pid in pids), timeout_s=10)

    return wait

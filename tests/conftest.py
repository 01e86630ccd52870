"""Four CPU devices to shard over (the GPU suite, `-m gpu`, alone sees the GPU as well), and what
tests in several folders use."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Adds none: of all hooks only this one runs before the conftest files of folders that the
    command line names are imported, which may start JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=4".strip()
    options = pluginmanager.get_plugin("pytestconfig").known_args_namespace
    if options.markexpr.strip() != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("gpu", "clients"):
            if name in item.keywords and config.option.markexpr.strip() != name:
                item.add_marker(pytest.mark.skip(reason=f"runs with -m {name}"))


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


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        if "/org/name" not in self.path:
            self._head(404, 0, {"X-Error-Code": "RepoNotFound"})
            return
        size = 1_000_000 if self.server.endless == "files" else 2
        self._head(200, size, {"ETag": f'"{"b" * 40}"', "X-Repo-Commit": "a" * 40})

    def do_GET(self) -> None:
        if "/org/name" not in self.path:
            self.do_HEAD()
        elif "/api/" in self.path:
            body = json.dumps(self._listing()).encode()
            is_endless = self.server.endless == "listing"
            size = 1_000_000 if is_endless else len(body)
            self._head(200, size, {"Content-Type": "application/json"})
            self._send(body, is_endless)
        else:
            self.do_HEAD()
            self._send(b"{}", self.server.endless == "files")

    def _send(self, body: bytes, is_endless: bool) -> None:
        if not is_endless:
            self.wfile.write(body)
            return
        self.server.is_sending.set()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" ")
                time.sleep(0.1)

    def _head(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(size)}).items():
            self.send_header(name, value)
        self.end_headers()

    def _listing(self) -> object:
        if "/tree/" in self.path:
            return [
                {"type": "file", "path": name, "size": 2, "oid": "c" * 40}
                for name in self.server.files
            ]
        siblings = [{"rfilename": name} for name in self.server.files]
        return {"id": "org/name", "sha": "a" * 40, "siblings": siblings}


class Hub(ThreadingHTTPServer):
    """A Hugging Face hub of one model, org/name."""

    daemon_threads, block_on_close = True, False

    def __init__(self, cache: Path) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files = ["config.json", "model.safetensors", "tokenizer.json"]
        self.endless: Literal["listing", "files"] | None = None
        """What it sends a byte of now and then, and never gets to the end."""
        self.is_sending = threading.Event()
        """Set once that has begun."""
        self.environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
        }
        """What makes a process use it."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()

"""`jaxserve serve smollm2-135m`, and the environments in which clients run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.environment import describe
from jaxserve.model.resolve import resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "smollm2-135m"
FLAGS = (
    "--max-model-len", "2048", "--max-num-batched-tokens", "64", "--max-num-seqs", "16",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
START_S = 300
END_S = 60
RESULTS = ROOT / "bench" / "results" / "clients.json"
INTERPRETERS = {
    "py": {"main": sys.executable, "clients": ROOT / ".venv-clients" / "bin" / "python"},
    "mjs": {"clients": "node"},
}


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server's address; it has to end well."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "serve", MODEL, "--port", "0", *FLAGS],
            stderr=output,
            env=environment,
        )
    try:
        deadline = time.monotonic() + START_S
        while " ready: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield re.search(r"listening on (http://\S+)", log.read_text())[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, Any]]:
    """Outcomes by script, which go into the results file; None, if it came to none, takes out the
    one from before. Those of scripts not run now stay."""
    found: dict[str, dict[str, Any] | None] = {}
    yield found
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scripts": {}}
    body = {**describe(), "command": "make clients", "benchmark": "clients"}
    body |= {"model": MODEL, "flags": list(FLAGS)}
    outcomes = sorted((before["scripts"] | found).items())
    body["scripts"] = {name: outcome for name, outcome in outcomes if outcome is not None}
    RESULTS.write_text(json.dumps(body, indent=2) + "\n")


@pytest.fixture
def run_client(url: str, results: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a script by name, in the environment "clients" or in this one ("main")."""

    def run(script: str, environment: str = "clients", *, timeout_s: float) -> dict[str, Any]:
        path = HERE / "scripts" / script
        interpreter = INTERPRETERS[path.suffix[1:]][environment]
        command = [str(interpreter), str(path), url, str(tmp_path), str(resolve_model(MODEL))]
        name = f"{path.stem} ({environment})" if environment == "main" else path.name
        results[name] = None
        begin = time.monotonic()
        stdout, stderr, code = _run(command, timeout_s)
        last = (stdout.splitlines() or [""])[-1]
        assert last.startswith("{"), stderr
        outcome = json.loads(last) | {"seconds": round(time.monotonic() - begin, 1)}
        results[name] = outcome
        assert code == 0, f"{json.dumps(outcome, indent=2)}\n{stderr[-5000:]}"
        return outcome

    return run


def _run(command: list[str], timeout_s: float) -> tuple[str, str, int]:
    """What the command says, and its exit code. It and what it has started end in time."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
        pytest.fail(f"not done within {timeout_s:g} s:\n{stderr[-5000:]}")
    return stdout, stderr, process.returncode

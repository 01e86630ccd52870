"""`jaxserve serve smollm2-135m`, and the environments in which clients run."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.model.resolve import resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "smollm2-135m"
FLAGS = (
    "--max-model-len", "2048", "--max-num-batched-tokens", "64", "--max-num-seqs", "16",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
)  # fmt: skip
RESULTS = ROOT / "bench" / "results" / "clients.json"
INTERPRETERS = {
    "py": {"main": sys.executable, "clients": ROOT / ".venv-clients" / "bin" / "python"},
    "mjs": {"clients": "node"},
}


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server's address; it has to end well."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "serve", MODEL, "--port", "0", *FLAGS],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    log = ""
    for line in process.stderr:
        log += line
        if " ready: " in line:
            break
    else:
        pytest.fail(f"the server did not start:\n{log}")
    yield re.search(r"listening on (http://\S+)", log)[1]
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in log


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, Any]]:
    """Outcomes by script, which go into the results file; those not run now stay in it."""
    found: dict[str, Any] = {}
    yield found
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scripts": {}}
    body = {"benchmark": "clients", "flags": list(FLAGS), "model": MODEL}
    body["scripts"] = dict(sorted((before["scripts"] | found).items()))
    RESULTS.write_text(json.dumps(body, indent=2) + "\n")


@pytest.fixture
def run_client(url: str, results: dict[str, Any], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a script by name, in the environment "clients" or in this one ("main")."""

    def run(script: str, environment: str = "clients") -> dict[str, Any]:
        path = HERE / "scripts" / script
        interpreter = INTERPRETERS[path.suffix[1:]][environment]
        command = [str(interpreter), str(path), url, str(tmp_path), str(resolve_model(MODEL))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        last = (done.stdout.splitlines() or [""])[-1]
        assert last.startswith("{"), done.stderr
        outcome = json.loads(last)
        results[f"{path.stem} ({environment})" if environment == "main" else path.name] = outcome
        assert done.returncode == 0, f"{json.dumps(outcome, indent=2)}\n{done.stderr[-5000:]}"
        return outcome

    return run

"""`jaxserve serve --ray` on a cluster of this machine alone: three replicas, one of them killed."""

import concurrent.futures
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the ray extra: make ray")
pytestmark = pytest.mark.ray

LONG = {"prompt": "abc", "ignore_eos": True}
START_S = 180


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def processes(title):
    """Ids of the processes whose command line has the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if title.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has just ended
    return found


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(server_environment):
    """The address of a cluster of one machine with four CPUs, as far as it is told."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    port = free_port()
    log = Path(folder) / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
             "--num-cpus=4", f"--port={port}", "--node-ip-address=127.0.0.1",
             "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"],
            stdout=output, stderr=subprocess.STDOUT, env=server_environment,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(start_fake, cluster):
    """Three engines of one slot each."""
    server = start_fake(
        "--ray", "--data-parallel-size", "3", "--max-num-seqs", "1", "--step-time", "0.05",
        "--api-key", "key", port=free_port(), env={"RAY_ADDRESS": cluster},
    )  # fmt: skip
    server.http.headers["Authorization"] = "Bearer key"
    return server.ready()


class Stream:
    """A streamed completion, read by a thread of its own."""

    def __init__(self, pool, server, max_tokens):
        self.text = ""
        self.error = None
        self._body = LONG | {"stream": True, "max_tokens": max_tokens}
        self.task = pool.submit(self._read, server)

    def _read(self, server):
        with server.http.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, response.read()
            lines = []
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.error = event.get("error", self.error)
                    self.text += event["choices"][0]["text"] if "choices" in event else ""
                lines.append(line)
            assert lines[-2] == "data: [DONE]"


def test_a_start_that_fails(cluster, model_folder, server_environment):
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "serve", str(model_folder), "--ray",
         "--port", str(free_port()), "--load-format", "dummy", "--max-model-len", "9999"],
        env=server_environment | {"RAY_ADDRESS": cluster},
        capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "max_model_len=9999 is more than" in done.stderr
    *_, last = done.stderr.splitlines()
    assert last == "jaxserve: error: Ray Serve could not start the engines; see above"


def test_the_same_server(server, events):
    assert "3 engines" in server.wait_for(r"ready: .*")[0]
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models", headers={"Authorization": ""}).status_code == 401
    answer = server.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
    assert answer.json()["choices"][0]["text"] == "hellohello"
    assert answer.headers["x-request-id"]
    chunks = events(server, "/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hellohello"
    refused = server.post("/v1/completions", prompt="hello", max_tokens=-1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert server.post("/reset_prefix_cache").json() == {"success": True}


def test_a_dropped_request_is_aborted(server):
    body = LONG | {"stream": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert server.http.get("/load").json() == {"server_load": 1}
    # 400 steps would take 20 s.
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0}, timeout_s=10)
    wait_until(lambda: sum(server.metric("num_requests_running", engine=r) for r in "012") == 0, 10)


def test_a_killed_replica_takes_only_what_it_has_begun(server):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        # Three run and three wait, of which one does at the engine that is killed.
        streams = [Stream(pool, server, max_tokens=200) for _ in range(6)]
        wait_until(lambda: sum(bool(stream.text) for stream in streams) == 3)
        (replica,) = processes("ray::ServeReplica:jaxserve:engine-1")
        os.kill(replica, signal.SIGKILL)
        for stream in streams:
            stream.task.result(120)
    (broken,) = [stream for stream in streams if stream.error]
    assert broken.error["type"] == "service_unavailable_error"
    assert 0 < len(broken.text) < 150
    for stream in streams:
        assert stream is broken or stream.text == "abc" * 50
    # Ray Serve starts it again.
    wait_until(lambda: server.http.get("/health").status_code == 200, START_S)
    (again,) = processes("ray::ServeReplica:jaxserve:engine-1")
    assert again != replica
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        streams = [Stream(pool, server, max_tokens=20) for _ in range(6)]
        for stream in streams:
            stream.task.result(120)
        assert [stream.text for stream in streams] == ["abc" * 5] * 6
    assert server.metric("num_requests_running", engine="1") == 0


def test_its_end(server, wait_gone):
    replicas = processes("ray::ServeReplica:jaxserve:engine")
    assert len(replicas) == 3
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = Stream(pool, server, max_tokens=60)
        wait_until(lambda: stream.text)
        server.signal(signal.SIGTERM)
        stream.task.result(60)
    assert stream.text == "abc" * 15
    assert server.wait(60) == 0
    wait_gone(replicas)
    assert not processes("ray::ServeReplica:jaxserve")

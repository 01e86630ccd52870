"""`jaxserve serve --ray` on a cluster of this machine alone: three replicas, one of them killed."""

import concurrent.futures
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
import pytest

pytest.importorskip("ray", reason="needs the ray extra: make ray")
pytestmark = pytest.mark.ray

START_S = 180
FAIL_TOKEN = 7


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


def children(pid):
    """Ids of the processes that this one has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def start_head(folder, port, environment):
    """Ray's processes, which are told that there are four CPUs; None if they gave up."""
    log = folder / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
             "--num-cpus=4", f"--port={port}", "--node-ip-address=127.0.0.1",
             "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"],
            stdout=output, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in log.read_text():
        if head.poll() is not None:
            print(log.read_text())
            return None
        if time.monotonic() > deadline:
            head.kill()
            head.wait()
            pytest.fail(log.read_text())
        time.sleep(0.1)
    return head


@pytest.fixture(scope="module")
def cluster(server_environment):
    """The address of a cluster of this machine."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # its sockets need short paths
    port = free_port()
    try:
        # On a busy machine Ray's own limits of 30 and 60 s may be too short for it.
        starts = (start_head(folder, port, server_environment) for _ in range(3))
        head = next(filter(None, starts), None)
        assert head is not None
        try:
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replica_and_engine(rank):
    """Process ids of a replica and of the engine that it runs."""
    (replica,) = processes(f"ray::ServeReplica:jaxserve:engine-{rank}")
    (engine,) = [pid for pid in children(replica) if pid in processes("spawn_main")]
    return replica, engine


@pytest.fixture(scope="module")
def server(start_fake, cluster):
    """Three engines of one slot each."""
    server = start_fake(
        "--ray", "--data-parallel-size", "3", "--max-num-seqs", "1", "--step-time", "0.05",
        "--api-key", "key", port=free_port(), env={"RAY_ADDRESS": cluster},
    )  # fmt: skip
    server.http.headers["Authorization"] = "Bearer key"
    try:
        yield server.ready()
    finally:
        server.ask_to_end()
        server.wait(60)  # its cluster ends after it


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


def test_a_dropped_request_is_aborted(server, wait_until):
    body = {"prompt": "abc", "ignore_eos": True, "stream": True, "max_tokens": 400}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert server.http.get("/load").json() == {"server_load": 1}
    # 400 steps would take 20 s.
    wait_until(lambda: server.http.get("/load").json() == {"server_load": 0}, timeout_s=10)
    wait_until(lambda: sum(server.metric("num_requests_running", engine=r) for r in "012") == 0, 10)


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("replica", "the engine's replica has died, or does not answer"),
        ("engine", "the engine's process has died"),
    ],
)
def test_a_killed_replica_takes_only_what_it_has_begun(
    server, open_stream, wait_until, wait_gone, victim, message
):
    replica, engine = replica_and_engine(1)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        # Three run and three wait, of which one does at the engine that is killed.
        streams = [open_stream(pool, server, max_tokens=200) for _ in range(6)]
        wait_until(lambda: sum(bool(stream.text) for stream in streams) == 3)
        os.kill(replica if victim == "replica" else engine, signal.SIGKILL)
        for stream in streams:
            stream.task.result(120)
    (broken,) = [stream for stream in streams if stream.error]
    assert broken.error["type"] == "service_unavailable_error"
    assert message in broken.error["message"]
    assert 0 < len(broken.text) < 150
    for stream in streams:
        assert stream is broken or stream.text == "abc" * 50
    # Ray Serve starts it again.
    wait_until(lambda: server.http.get("/health").status_code == 200, START_S)
    wait_gone([replica, engine])
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        streams = [open_stream(pool, server, max_tokens=20) for _ in range(6)]
        for stream in streams:
            stream.task.result(120)
        assert [stream.text for stream in streams] == ["abc" * 5] * 6
    # Their figures come twice a second.
    wait_until(lambda: sum(server.metric("num_requests_running", engine=r) for r in "012") == 0, 10)


def test_a_request_that_breaks_its_engine_breaks_no_other(server, wait_until):
    before = [replica_and_engine(rank) for rank in range(3)]
    failing = server.post("/v1/completions", prompt=[FAIL_TOKEN])
    assert failing.status_code == 503, failing.text
    wait_until(lambda: server.http.get("/health").status_code == 200, START_S)
    after = [replica_and_engine(rank) for rank in range(3)]
    assert sum(old == new for old, new in zip(before, after, strict=True)) == 2


def test_killed_routes_take_all_open_requests(server, open_stream, wait_until, wait_gone):
    (routes,) = processes("ray::ServeReplica:jaxserve:routes")
    engines = [replica_and_engine(rank) for rank in range(3)]
    whole = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        streams = [open_stream(pool, server, max_tokens=400) for _ in range(3)]
        wait_until(lambda: all(stream.text for stream in streams))
        waiting = pool.submit(server.post, "/v1/completions", **whole)
        wait_until(lambda: server.http.get("/load").json() == {"server_load": 4})
        os.kill(routes, signal.SIGKILL)
        for stream in streams:
            # Nothing that could be taken for the answer's end.
            assert isinstance(stream.task.exception(60), httpx2.RemoteProtocolError)
            assert 0 < len(stream.text) < 300
        assert waiting.result(60).status_code == 500
    # Ray Serve starts them again, and the engines go on.
    wait_until(lambda: server.http.get("/health").status_code == 200, START_S)
    wait_gone([routes])
    assert [replica_and_engine(rank) for rank in range(3)] == engines
    answer = server.post("/v1/completions", prompt="abc", max_tokens=8, ignore_eos=True)
    assert answer.json()["choices"][0]["text"] == "abcabc"
    # The engines have let go of what was open: it would have run for 20 s and more.
    wait_until(lambda: sum(server.metric("num_requests_running", engine=r) for r in "012") == 0, 10)


def test_its_end(server, open_stream, wait_until, wait_gone):
    replicas = processes("ray::ServeReplica:jaxserve:engine")
    assert len(replicas) == 3
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = open_stream(pool, server, max_tokens=60)
        wait_until(lambda: stream.text)
        server.signal(signal.SIGTERM)
        stream.task.result(60)
    assert stream.text == "abc" * 15
    assert server.wait(60) == 0, server.log
    wait_gone(replicas)
    assert not processes("ray::ServeReplica:jaxserve")

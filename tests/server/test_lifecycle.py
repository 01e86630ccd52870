"""From the start to the end of a server's process."""

import concurrent.futures
import os
import re
import signal
import socket
import time

import httpx2
import pytest

LONG = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True}


def stream(server):
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        return list(response.iter_lines())


@pytest.fixture(scope="module")
def server(start_fake):
    return start_fake("--step-time", "0.02")


def test_before_and_when_ready(server):
    for path in ("/health", "/v1/models"):
        response = server.http.get(path)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["message"] == "the model is being loaded"
    line = server.ready().wait_for(r"ready: .*")[0]
    assert re.search(
        r"ready: fake, max_model_len 512, KV cache of 65536 tokens, enough for 128\.0 requests of "
        r"that length; started in \d+\.\d s \(tokenizer 0\.1 s\)",
        line,
    )
    assert server.http.get("/health").status_code == 200
    assert server.url.startswith("http://127.0.0.1:")


def test_fault_17_streams_finish_after_sigterm(server, wait_gone):
    server.ready()
    children = server.children()
    assert children
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(stream, server) for _ in range(4)]
        whole = pool.submit(server.post, "/v1/completions", **LONG)
        while server.http.get("/load").json()["server_load"] < 5:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        server.wait_for("shutting down")
        for task in streams:
            lines = task.result(30)
            assert '"finish_reason":"length"' in "".join(lines)
            assert lines[-2] == "data: [DONE]"
        assert whole.result(30).json()["usage"]["completion_tokens"] == 60
    assert server.wait() == 0
    wait_gone(children)
    host, port = server.url.removeprefix("http://").split(":")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), timeout=5)


def test_fault_17_what_does_not_finish_in_time_is_aborted(start_fake, wait_gone):
    server = start_fake("--step-time", "0.2", "--shutdown-timeout", "0.3").ready()
    children = server.children()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        task = pool.submit(stream, server)
        while server.http.get("/load").json()["server_load"] < 1:
            time.sleep(0.01)
        server.signal(signal.SIGINT)
        lines = task.result(30)
    assert '"finish_reason":"abort"' in "".join(lines)
    assert lines[-2] == "data: [DONE]"
    assert server.wait() == 0
    wait_gone(children)


def test_fault_17_no_child_outlives_a_killed_server(start_fake, wait_gone):
    server = start_fake("--step-time", "0.02").ready()
    children = server.children()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        task = pool.submit(stream, server)
        while server.http.get("/load").json()["server_load"] < 1:
            time.sleep(0.01)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        with pytest.raises(httpx2.TransportError):
            task.result(30)
    wait_gone(children)


@pytest.mark.parametrize("endless", ["listing", "files"])
def test_a_signal_while_the_model_is_downloaded(start_server, hub, wait_gone, endless):
    hub.endless = endless
    server = start_server("-m", "jaxserve", "serve", "org/name", env=hub.environment)
    assert hub.is_sending.wait(60)
    children = server.children()
    assert children
    # As a terminal does it, which tells all of them.
    for process in (*children, server.process.pid):
        os.kill(process, signal.SIGINT)
    assert server.wait(20) == 0
    wait_gone(children)
    assert "Traceback" not in server.log


def test_a_signal_while_loading(start_fake):
    server = start_fake()
    server.wait_for("loading")
    server.signal(signal.SIGTERM)
    assert server.wait() == 0

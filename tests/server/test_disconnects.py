"""Clients that go: what was theirs is free again."""

import json
import socket
import time

import pytest

FREE_S = 5.0


def send(server, **body):
    """A connection with a completion request on its way."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def figures(server):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [server.http.get("/load").json()["server_load"], *map(server.metric, names)]


def wait_idle(server):
    deadline = time.monotonic() + FREE_S
    while any(figures(server)):
        assert time.monotonic() < deadline, figures(server)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def slow(start_fake):
    """Steps of 20 ms; 40 slots, so that some of 50 requests wait; a small pool."""
    return start_fake(
        "--step-time", "0.02", "--max-num-seqs", "40", "--kv-cache-memory-bytes", "2000"
    ).ready()


def test_fault_9_fifty_streams_dropped_midway(slow):
    connections = [
        send(slow, prompt=f"{i} abc", max_tokens=400, stream=True, ignore_eos=True)
        for i in range(50)
    ]
    for connection in connections[:40]:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    while slow.metric("num_requests_running") < 40:
        time.sleep(0.02)
    assert slow.http.get("/load").json()["server_load"] == 50
    for connection in connections:
        connection.close()
    wait_idle(slow)
    assert slow.metric("request_success_total", finished_reason="abort") == 0


def test_dropped_before_the_answer(slow):
    connections = [send(slow, prompt="abc", max_tokens=400, ignore_eos=True) for _ in range(5)]
    while slow.http.get("/load").json()["server_load"] < 5:
        time.sleep(0.01)
    for connection in connections:
        connection.close()
    wait_idle(slow)
    slow.wait_for(r"POST /v1/completions 499")


def test_several_prompts_dropped(slow):
    connection = send(slow, prompt=["a", "b", "c"], n=2, max_tokens=400, stream=True)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    wait_idle(slow)


def test_fault_10_two_thousand_requests_on_a_tiny_pool(start_fake):
    """Preemption all the time; at the end no block is missing and everything was right."""
    server = start_fake(
        "--kv-cache-memory-bytes", "40", "--max-num-seqs", "16", "--max-num-batched-tokens", "64"
    ).ready()
    prompts = [f"{i} abcdefghij klmnop" for i in range(2000)]
    for start in range(0, 2000, 500):
        part = prompts[start : start + 500]
        answer = server.post("/v1/completions", prompt=part, max_tokens=60).json()
        for prompt, choice in zip(part, answer["choices"], strict=True):
            assert (prompt * 4).startswith(choice["text"])
            assert len(choice["text"]) >= 50
    assert server.metric("num_preemptions_total") > 10
    wait_idle(server)
    assert server.http.get("/health").status_code == 200
    assert server.post("/reset_prefix_cache").json() == {"success": True}


def test_slow_readers_get_everything(fake):
    connection = send(fake, prompt="hello", max_tokens=400, stream=True, ignore_eos=True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    wait_idle(fake)
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(100)
    connection.close()
    texts = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in data.split(b"\n")
        if line.startswith(b"data: {")
    ]
    assert "".join(texts) == "hello" * 200

"""Several engines behind one port."""

import concurrent.futures
import os
import signal

import pytest

ENGINES = ("0", "1", "2")


def running(server):
    return [server.metric("num_requests_running", engine=rank) for rank in ENGINES]


@pytest.fixture(scope="module")
def server(start_fake):
    """Three engines of one slot each."""
    return start_fake(
        "--data-parallel-size", "3", "--step-time", "0.02", "--max-num-seqs", "1"
    ).ready()


def test_requests_are_spread(server, open_stream, wait_until):
    assert "3 engines" in server.wait_for(r"ready: .*")[0]
    assert "KV cache of 196608 tokens" in server.log
    assert len(server.engine_pids()) == 3
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        streams = [open_stream(pool, server, max_tokens=200) for _ in range(6)]
        wait_until(lambda: running(server) == [1, 1, 1])
        wait_until(lambda: server.http.get("/load").json() == {"server_load": 6})
        for stream in streams:
            stream.task.result(60)
            assert stream.text == "abc" * 50
    for rank in ENGINES:
        assert server.metric("generation_tokens_total", engine=rank) == 2 * 200
        assert server.metric("request_success_total", engine=rank, finished_reason="length") == 2
        assert server.metric("e2e_request_latency_seconds_count", engine=rank) == 2
        assert server.metric("cache_config_info", engine=rank) == 1
    assert server.http.get("/load").json() == {"server_load": 0}


def test_a_prompt_goes_where_its_beginning_is_cached(server):
    text = "a long conversation that goes on and on and on, "
    for turn in range(1, 5):
        body = {"prompt": text * turn, "max_tokens": 1}
        usage = server.post("/v1/completions", **body).json()["usage"]
        if turn > 1:
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 48 * (turn - 1) - 16
    served = [server.metric("prefix_cache_hits_total", engine=rank) > 0 for rank in ENGINES]
    assert sorted(served) == [False, False, True]
    assert server.post("/reset_prefix_cache").json() == {"success": True}
    usage = server.post("/v1/completions", prompt=text * 4, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_fault_4_a_killed_engine_takes_only_what_it_has_begun(server, open_stream, wait_until):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        # Three run and three wait, of which one does at the engine that is killed.
        streams = [open_stream(pool, server, max_tokens=100) for _ in range(6)]
        wait_until(lambda: sum(bool(stream.text) for stream in streams) == 3)
        os.kill(server.engine_pids()[1], signal.SIGKILL)
        wait_until(lambda: server.http.get("/health").status_code == 503, timeout_s=2)
        assert server.post("/v1/completions", prompt="abc").status_code == 200
        for stream in streams:
            stream.task.result(60)
    (broken,) = [stream for stream in streams if stream.error]
    assert broken.error["type"] == "service_unavailable_error"
    assert 0 < len(broken.text) < 75
    for stream in streams:
        assert stream is broken or stream.text == "abc" * 25
    assert server.http.get("/ping").status_code == 503
    assert server.http.get("/v1/models").status_code == 200
    server.wait_for(r"engine \d cannot serve requests: the engine's process has died")
    samples = server.http.get("/metrics").text.splitlines()
    assert sum(line.startswith("jaxserve:num_requests_running{") for line in samples) == 2


def test_fault_17_no_engine_is_left(server, open_stream, wait_until, wait_gone):
    children = server.children()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [open_stream(pool, server) for _ in range(2)]
        wait_until(lambda: all(stream.text for stream in streams))
        server.signal(signal.SIGTERM)
        for stream in streams:
            stream.task.result(30)
            assert stream.text == "abc" * 15
    assert server.wait() == 0
    wait_gone(children)


def test_the_others_finish_before_the_server_ends(start_fake, open_stream, wait_until, wait_gone):
    server = start_fake(
        "--data-parallel-size", "2", "--step-time", "0.02", "--exit-on-engine-failure"
    ).ready()
    children = server.children()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [open_stream(pool, server) for _ in range(2)]
        wait_until(lambda: all(stream.text for stream in streams))
        os.kill(server.engine_pids()[0], signal.SIGKILL)
        for stream in streams:
            stream.task.result(30)
    assert sorted(bool(stream.error) for stream in streams) == [False, True]
    assert server.wait() == 1
    wait_gone(children)

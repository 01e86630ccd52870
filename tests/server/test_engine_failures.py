"""An engine that dies, hangs or raises: nobody waits for it in vain."""

import concurrent.futures
import json
import os
import signal
import time

HEALTH_S, ERROR_S = 2.0, 5.0
LONG = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}


def stream_to_the_end(server):
    """The last error event, and when it came."""
    error = None
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        if response.status_code != 200:  # the engine had not even taken it
            response.read()
            return response.json()["error"], time.monotonic()
        for line in response.iter_lines():
            if line.startswith('data: {"error"'):
                error = json.loads(line.removeprefix("data: "))["error"]
    return error, time.monotonic()


def wait_whole(server):
    response = server.post("/v1/completions", **LONG)
    error = response.json().get("error")
    return (error and {**error, "status": response.status_code}), time.monotonic()


def break_under_load(server, break_engine, within_s=0.0):
    """Break the engine while requests run; check what everybody sees."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(stream_to_the_end, server) for _ in range(4)]
        tasks += [pool.submit(wait_whole, server) for _ in range(4)]
        while server.http.get("/load").json()["server_load"] < 8:
            time.sleep(0.01)
        broken = time.monotonic()
        break_engine()
        while server.http.get("/health").status_code == 200:
            assert time.monotonic() < broken + within_s + HEALTH_S
            time.sleep(0.01)
        for task in tasks:
            error, when = task.result(30)
            assert error["type"] == "service_unavailable_error"
            assert error.get("status", 503) == 503
            assert when < broken + within_s + ERROR_S
    assert server.post("/v1/completions", **LONG).status_code == 503
    assert server.http.get("/metrics").status_code == 503
    assert server.http.get("/ping").status_code == 503
    assert server.http.get("/v1/models").status_code == 503


def test_fault_4_a_killed_engine(start_fake):
    server = start_fake("--step-time", "0.02").ready()
    break_under_load(server, lambda: os.kill(server.engine_pid(), signal.SIGKILL))
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_fault_4_a_stopped_engine(start_fake):
    server = start_fake("--step-time", "0.02", "--engine-stall-timeout", "1").ready()
    pid = server.engine_pid()
    # Long idle is no stall.
    time.sleep(1.2)
    assert server.http.get("/health").status_code == 200
    break_under_load(server, lambda: os.kill(pid, signal.SIGSTOP), within_s=1.0)
    assert "no step has ended for 1 s" in server.post("/v1/completions", **LONG).text
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_fault_4_a_failing_step_and_the_server_ends(start_fake):
    server = start_fake("--step-time", "0.02", "--exit-on-engine-failure").ready()
    response = server.post("/v1/completions", prompt=[7], max_tokens=5)
    assert response.status_code == 503
    assert "the device is lost" in response.json()["error"]["message"]
    assert server.wait() == 1
    assert "Traceback" in server.log
    assert "the engine cannot serve requests: the engine failed: the device is lost" in server.log

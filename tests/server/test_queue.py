"""One slot: who waits, in what order, and who may not even wait."""

import concurrent.futures
import time

LONG = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True}


def submit(pool, server, count, **body):
    """Send a request in the pool; returns when `count` are open."""
    task = pool.submit(server.post, "/v1/completions", **LONG | body)
    while server.http.get("/load").json()["server_load"] < count:
        time.sleep(0.01)
    return task


def test_priority_needs_its_policy(fake):
    response = fake.post("/v1/completions", **LONG, priority=-1)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "priority must be 0 without scheduling_policy='priority', got -1"
    assert fake.post("/v1/completions", prompt="ab", priority=0).status_code == 200


def test_priority_is_obeyed(narrow):
    finished = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        tasks = [submit(pool, narrow, i + 1, priority=p) for i, p in enumerate((0, 5, 1))]
        for task, priority in zip(tasks, (0, 5, 1), strict=True):
            task.add_done_callback(lambda task, priority=priority: finished.append(priority))
        concurrent.futures.wait(tasks, 60)
    assert finished == [0, 1, 5]


def test_a_full_queue(narrow):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        tasks = [submit(pool, narrow, count) for count in (1, 2, 3)]
        for stream in (False, True):
            response = narrow.post("/v1/completions", **LONG, stream=stream)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert "max_num_queued_reqs=2" in response.json()["error"]["message"]
        assert [task.result(60).status_code for task in tasks] == [200] * 3
    assert narrow.post("/v1/completions", prompt="ab").status_code == 200

"""/metrics: vLLM's names, and figures that add up."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "request_success", "iteration_tokens_total", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "cache_config_info", "compilations", "step_time_seconds", "host_gap_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(start_fake):
    return start_fake("--step-time", "0.01").ready()


def test_figures(server):
    prompt = "hello world, hello world, hello world"
    ids = server.post("/tokenize", prompt=prompt).json()["tokens"]
    for _ in range(2):
        answer = server.post("/v1/completions", prompt=prompt, n=2, max_tokens=9).json()
    # Full blocks of 16 tokens, of which the last token is always computed.
    cached = (len(ids) - 1) // 16 * 16
    assert cached > 0
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    assert {name.removeprefix("jaxserve:") for name in families} == NAMES
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            assert sample.labels["engine"] == "0"

    assert server.metric("prompt_tokens_total") == 2 * len(ids)
    assert server.metric("generation_tokens_total") == 4 * 9
    assert server.metric("request_success_total", finished_reason="length") == 4
    assert server.metric("request_success_total", finished_reason="stop") == 0
    assert server.metric("prefix_cache_queries_total") == 4 * len(ids)
    assert server.metric("prefix_cache_hits_total") >= 2 * cached
    for name, count in (
        ("time_to_first_token_seconds", 4),
        ("inter_token_latency_seconds", 4 * 8),
        ("e2e_request_latency_seconds", 4),
        ("request_queue_time_seconds", 4),
        ("request_prefill_time_seconds", 4),
        ("request_decode_time_seconds", 4),
        ("request_time_per_output_token_seconds", 4),
        ("request_prompt_tokens", 2),
        ("request_generation_tokens", 4),
    ):
        assert server.metric(f"{name}_count") == count
        assert server.metric(f"{name}_bucket", le="+Inf") == count
    assert server.metric("request_generation_tokens_sum") == 4 * 9
    # Steps of 10 ms: a token every step, eight after the first.
    assert server.metric("inter_token_latency_seconds_sum") > 4 * 8 * 0.009
    assert server.metric("e2e_request_latency_seconds_sum") > 4 * 9 * 0.009
    steps = server.metric("iteration_tokens_total_count")
    assert steps >= 2 * 9
    kinds = ("decode", "prefill", "mixed")
    assert sum(server.metric("step_time_seconds_count", kind=kind) for kind in kinds) == steps
    assert server.metric("cache_config_info", block_size="16", num_gpu_blocks="4096") == 1


def test_the_prefix_cache_is_forgotten(server):
    body = {"prompt": "something else, something else", "max_tokens": 1}

    def num_cached():
        usage = server.post("/v1/completions", **body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (num_cached(), num_cached()) == (0, 16)
    assert server.post("/reset_prefix_cache").json() == {"success": True}
    assert num_cached() == 0


def test_small_routes(server):
    assert server.http.get("/load").json() == {"server_load": 0}
    assert server.http.get("/version").json() == {"version": "0.1.0"}
    assert server.http.get("/ping").status_code == 200
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 512)
    tokens = server.post("/tokenize", prompt="hello", return_token_strs=True).json()
    assert tokens == {
        "count": 2,
        "max_model_len": 512,
        "tokens": [261, 259],
        "token_strs": ["<|bos|>", "hello"],
    }
    assert server.post("/detokenize", tokens=[261, 259]).json() == {"prompt": "<|bos|>hello"}


def test_the_api_document(server):
    document = server.http.get("/openapi.json").json()
    assert document["info"]["title"] == "jaxserve"
    for path in ("/v1/completions", "/v1/chat/completions"):
        post = document["paths"][path]["post"]
        assert "422" not in post["responses"]
        assert set(post["responses"]) == {"200", "4XX", "503"}
        assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_the_dashboard_asks_for_what_there_is(server):
    server.post("/v1/completions", prompt="hello")
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    known = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = re.findall(r"jaxserve:\w+", json.dumps(dashboard))
    assert len(set(asked)) >= 12
    assert set(asked) <= known

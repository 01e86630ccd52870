"""`jaxserve bench serve` against servers that answer well, badly, or not at all."""

import asyncio
import json
import re
import socket

import numpy as np
import pytest

from jaxserve.bench.serving.ceiling import measure_ceiling
from jaxserve.bench.serving.client import Outcome
from jaxserve.bench.serving.load import Load
from jaxserve.bench.serving.metrics import summarise
from jaxserve.bench.serving.requests import arrival_times

SMALL = ("--num-prompts", 6, "--random-input-len", 5, "--random-output-len", 4)


def test_a_run_counts_what_the_server_says(bench_serve, server):
    code, result, err = bench_serve(*SMALL, "--ignore-eos", "--goodput", "e2el:60000", "ttft:60000")
    assert (code, err) == (0, "")
    assert (result["completed"], result["failed"], result["errors"]) == (6, 0, {})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 24)
    assert result["request_goodput"] == result["request_throughput"] == 6 / result["duration"]
    assert result["model_id"] == "fake"
    assert result["request_rate"] == "inf"
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= result[f"median_{metric}_ms"] <= result[f"p99_{metric}_ms"]
    for body in server.bodies:
        assert body["stream"]
        assert body["ignore_eos"]
        assert body["max_tokens"] == 4
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == 5
        assert all(0 <= token < 32000 for token in body["prompt"])


def test_the_same_seed_asks_the_same(bench_serve, server):
    for seed in (1, 1, 2):
        bench_serve(*SMALL, "--seed", seed, "--num-warmups", 0, "--random-range-ratio", 0.5)
    prompts = [
        sorted(body["prompt"] for body in server.bodies[6 * i : 6 * i + 6]) for i in range(3)
    ]
    assert prompts[0] == prompts[1] != prompts[2]
    assert all(2 <= len(body["prompt"]) <= 8 for body in server.bodies)


def test_lengths_from_a_file(bench_serve, server, tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("input_len,output_len\n3,2\n7,5\n9,9\n")
    code, result, _ = bench_serve("--dataset-name", path, "--num-prompts", 2, "--num-warmups", 0)
    asked = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    assert (code, asked) == (0, [(3, 2), (7, 5)])
    assert result["dataset_name"] == "lengths.csv"
    code, _, err = bench_serve("--dataset-name", path, "--num-prompts", 4)
    assert (code, err) == (1, f"jaxserve: error: {path} has 3 requests, 4 are needed\n")
    code, _, err = bench_serve("--dataset-name", "nowhere")
    assert code == 1
    assert "no workload 'nowhere': give INPUTxOUTPUT" in err


def test_chat_sends_words_and_times_tokens_not_roles(bench_serve, server):
    def events(body):
        delta = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
        reasons = [None, None, None, "stop"]
        return [
            {"choices": [{"index": 0, "delta": d, "finish_reason": r}]}
            for d, r in zip(delta, reasons, strict=True)
        ]

    server.events, server.gap_s = events, 0.02
    code, result, _ = bench_serve("--endpoint", "/v1/chat/completions", *SMALL)
    assert code == 0
    content = server.bodies[0]["messages"][0]["content"]
    assert re.fullmatch(r"(\w+ ){4}\w+", content)
    # Neither the role's event nor the one that ends it is a token; the server sent no usage.
    assert result["total_output_tokens"] == 2 * 6
    assert result["median_ttft_ms"] >= 40


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"status": 503}, "HTTP 503: the server says no"),
        ({"done": False}, "the stream ended early"),
        (
            {"events": lambda body: [{"error": {"message": "the engine died"}}]},
            "an error amid the stream: the engine died",
        ),
        ({"events": lambda body: []}, "no token came"),
        (
            {"events": lambda body: [{"choices": [{"text": "", "finish_reason": "abort"}]}]},
            "the stream ended with the reason 'abort'",
        ),
        ({"events": lambda body: [{"choices": 1}]}, "an event is no JSON as OpenAI has it"),
    ],
)
def test_failures_are_counted_and_shown(bench_serve, server, fault, error):
    for name, value in fault.items():
        setattr(server, name, value)
    code, result, err = bench_serve(*SMALL, "--num-warmups", 0)
    assert code == 1
    assert (result["completed"], result["failed"]) == (0, 6)
    assert result["output_throughput"] == 0
    assert result["mean_ttft_ms"] is None
    assert f"jaxserve: error: 6 failed: {error}" in err
    # The same fault before the run: nothing runs, one line.
    sent = len(server.bodies)
    code, _, err = bench_serve(*SMALL)
    assert (code, len(server.bodies)) == (1, sent + 1)
    assert re.fullmatch(r"jaxserve: error: a request to http://.* failed: .*\n", err)
    assert error in err


def test_one_failure_among_many(bench_serve, server):
    def events(body):
        fails = len(server.bodies) == 3
        return [{"error": {"message": "once"}}] if fails else server.completion(body)

    server.events = events
    code, result, _ = bench_serve(*SMALL, "--max-concurrency", 1, "--num-warmups", 0)
    assert (code, result["completed"], result["failed"]) == (1, 5, 1)
    assert result["total_output_tokens"] == 20


def test_nobody_listens(cli):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, out, err = cli("bench", "serve", "--base-url", url)
        assert (code, out) == (1, "")
        assert err == f"jaxserve: error: cannot reach {url}: Connection refused\n"
        code, out, err = cli("bench", "serve", "--base-url", url, "--model", "m", *SMALL)
        assert (code, out) == (1, "")
        assert err.endswith("before the first run failed: Connection refused\n")


def test_keys_are_sent_but_not_kept(bench_serve, server, tmp_path, monkeypatch):
    secret = "sk-secret"
    argv = ["/a/b/jaxserve", "bench", "serve", "--api-key", secret, "--plot=/home/me/a b.png"]
    monkeypatch.setattr("sys.argv", argv)
    code, result, _ = bench_serve(*SMALL, "--api-key", secret)
    assert code == 0
    assert server.headers[-1]["Authorization"] == f"Bearer {secret}"
    assert secret not in json.dumps(result)
    assert result["command"] == "jaxserve bench serve --api-key ... '--plot=a b.png'"
    key_file = tmp_path / "key"
    key_file.write_text("sk-other\n")
    bench_serve(*SMALL, "--api-key-file", key_file)
    assert server.headers[-1]["Authorization"] == "Bearer sk-other"


def test_concurrency_is_bounded(bench_serve, server):
    server.gap_s = 0.005
    code, result, _ = bench_serve("--num-prompts", 12, "--random-output-len", 4,
                                  "--max-concurrency", 3)  # fmt: skip
    assert (code, server.most_open) == (0, 3)
    assert result["max_concurrent_requests"] <= 3


def test_a_sweep_and_its_plot(bench_serve, server, tmp_path):
    plot = tmp_path / "sweep.svg"
    code, result, err = bench_serve(*SMALL, "--request-rate", "200,400,inf", "--plot", plot)
    assert (code, err) == (0, "")
    assert [run["request_rate"] for run in result["sweep"]] == [200, 400, "inf"]
    assert [run["completed"] for run in result["sweep"]] == [6, 6, 6]
    assert "<svg" in plot.read_text()
    assert len(server.bodies) == 1 + 3 * 6


def test_a_missing_package_is_named(cli, monkeypatch):
    monkeypatch.setattr("jaxserve.cli.bench.find_spec", lambda name: None)
    code, _, err = cli("bench", "serve", "--plot", "a.png")
    assert code == 1
    assert err == (
        "jaxserve: error: bench serve needs aiohttp and matplotlib, which the extra `bench` "
        "brings: pip install jaxserve[bench]\n"
    )


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("--request-rate", "1,x"), "request_rate must be numbers over 0"),
        (("--request-rate", "0"), "request_rate must be numbers over 0"),
        (("--goodput", "itl:5"), "goodput must be METRIC:MILLISECONDS with ttft, tpot, e2el"),
        (("--percentile-metrics", "ttft,fun"), "percentile_metrics must be some of"),
        (("--metric-percentiles", "101"), "metric_percentiles must be numbers from 0 to 100"),
        (("--endpoint", "/v1/embeddings"), "invalid choice: '/v1/embeddings'"),
        (("--extra-body", "[1]"), "extra_body must be None or a JSON object"),
        (("--burstiness", "0"), "burstiness must be over 0"),
        (("--plot", "a.gif"), "plot must be a .png, .svg or .pdf file"),
        (("--base-url", "localhost"), "base_url must be http(s)://"),
        (("--api-key", "a", "--api-key-file", "b"), "api_key must be None beside api_key_file"),
    ],
)
def test_usage_errors(cli, argv, error):
    code, out, err = cli("bench", "serve", *argv)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxserve: error: .*\n", err)
    assert error in err


def test_figures_of_known_outcomes():
    outcomes = [
        Outcome(0.0, ttft_s=0.1, itls_s=[0.02, 0.04], latency_s=0.16, input_len=5, output_len=3),
        Outcome(1.0, ttft_s=0.3, itls_s=[], latency_s=0.3, input_len=5, output_len=1),
        Outcome(1.1, latency_s=0.1, error="HTTP 500: no"),
    ]
    result = summarise(Load(outcomes, 2.0, 0.1), ["ttft", "tpot", "itl", "e2el"], [50.0, 90.0],
                       {"ttft": 200.0, "tpot": 35.0})  # fmt: skip
    expected = {
        "completed": 2,
        "failed": 1,
        "errors": {"HTTP 500: no": 1},
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 2.0,
        "total_token_throughput": 7.0,
        "max_output_tokens_per_s": 3.0,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 200.0,
        "std_ttft_ms": 100.0,
        "p90_ttft_ms": 280.0,
        "mean_tpot_ms": 30.0,
        "mean_itl_ms": 30.0,
        "median_e2el_ms": 230.0,
    }
    for name, value in expected.items():
        assert result[name] == pytest.approx(value), name


def test_arrivals():
    assert arrival_times(4, float("inf"), 1.0, 0).tolist() == [0, 0, 0, 0]
    deviations = {}
    for burstiness in (0.25, 1.0, 16.0):
        gaps = np.diff(arrival_times(20_000, 5.0, burstiness, 3))
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        deviations[burstiness] = gaps.std() / gaps.mean()
    assert deviations == pytest.approx({0.25: 2.0, 1.0: 1.0, 16.0: 0.25}, rel=0.05)
    again = arrival_times(100, 5.0, 1.0, 3)
    assert (again == arrival_times(100, 5.0, 1.0, 3)).all()
    assert (again != arrival_times(100, 5.0, 1.0, 4)).any()


def test_a_busy_client_warns(bench_serve, monkeypatch):
    monkeypatch.setattr("jaxserve.bench.serving.command.BUSY", 0.0)
    code, result, err = bench_serve(*SMALL)
    assert code == 0
    assert "the client was busy" in err
    assert result["client_ceiling_tokens_per_s"] >= 1000
    assert result["client_busy"] > 0


def test_the_client_measures_itself():
    assert asyncio.run(measure_ceiling(16)) > 0

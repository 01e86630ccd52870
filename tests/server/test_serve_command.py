"""`jaxserve serve` itself, with a real engine over tiny random weights."""

import concurrent.futures
import signal
import subprocess
import sys

import pytest

FLAGS = (
    "--load-format", "dummy", "--max-model-len", "128", "--max-num-seqs", "2",
    "--max-num-batched-tokens", "4", "--block-size", "8", "--kv-cache-memory-bytes", "1000000",
    "--compilation-cache-dir", "",
)  # fmt: skip
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(start_server, model_folder):
    return start_server("-m", "jaxserve", "serve", str(model_folder), *FLAGS).ready()


def test_a_real_engine(server, events):
    assert "compile" in server.wait_for(r"started in .*")[0]
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    prompts = [f"{i} hello" for i in range(12)]
    solo = []
    for prompt in prompts:
        body = {"model": model, "prompt": prompt, **GREEDY, "logprobs": 2}
        solo.append(server.post("/v1/completions", **body).json()["choices"][0])
        assert solo[-1]["finish_reason"] == "length"
        assert len(solo[-1]["logprobs"]["tokens"]) == 20

    def stream(prompt):
        chunks = events(server, "/v1/completions", prompt=prompt, **GREEDY)
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(stream, prompts)) == [choice["text"] for choice in solo]

    body = {"prompt": "hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = server.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    assert all(logprob < 0 for logprob in scored["token_logprobs"][1:])


def test_fault_2_nothing_is_compiled_while_serving(server):
    server.post("/v1/completions", prompt="hello " * 20, n=3, temperature=1, logprobs=5)
    server.post("/v1/completions", prompt="x", presence_penalty=1, logit_bias={"5": 3}, seed=4)
    assert server.metric("compilations_total", phase="startup") > 0
    assert server.metric("compilations_total", phase="serving") == 0
    assert server.metric("step_time_seconds_count", kind="decode") > 0
    assert server.metric("host_gap_seconds_count") > 0


def test_fault_3_no_room_for_the_kv_cache(server_environment, model_folder):
    """A long model length, and next to no memory: one line names the bytes of both."""
    command = [sys.executable, "-m", "jaxserve", "serve", str(model_folder), "--port", "0"]
    flags = ["--load-format", "dummy", "--max-model-len", "512", "--kv-cache-memory-bytes", "10000"]
    done = subprocess.run(
        [*command, *flags], env=server_environment, capture_output=True, text=True, timeout=60
    )
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    # K and V of 32 blocks and the padding's: 16 tokens x 1 head x 16 dims x float32.
    assert f"{33 * 2 * 16 * 16 * 4:,} bytes" in last
    assert "10,000" in last
    assert "Traceback" not in done.stderr


def test_its_end(server):
    server.signal(signal.SIGTERM)
    assert server.wait() == 0


def test_one_line_for_what_cannot_be_served(server_environment, model_folder, fake):
    port = fake.url.rpartition(":")[2]
    for arguments, code, message in (
        (["no/such/model/here"], 1, "jaxserve: error: no model 'no/such/model/here'"),
        ([str(model_folder), "--max-model-len", "9999"], 1, "max_model_len=9999 is more than"),
        ([str(model_folder), "--port", "70000"], 2, "jaxserve: error: port must be from 0 to"),
        ([str(model_folder), "--port", port], 1, "in use"),
        ([str(model_folder), "--data-parallel-size", "0"], 2, "data_parallel_size must be at"),
        ([str(model_folder), "--ray"], 2, "port must be over 0 with ray, got 0"),
        ([str(model_folder), "--otlp-endpoint", "x:4318"], 2, "otlp_endpoint must be an http"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "jaxserve", "serve", "--port", "0", *FLAGS[2:4], *arguments],
            env=server_environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        *_, last = done.stderr.splitlines()
        assert done.returncode == code, done.stderr
        assert message in last
        assert "Traceback" not in done.stderr


def test_one_line_for_what_is_not_installed(server_environment, model_folder):
    script = "import sys; sys.modules[{!r}] = None; from jaxserve.cli import main; sys.exit(main())"
    for option, value, package, extra in (
        ("--ray", (), "ray", "ray"),
        ("--otlp-endpoint", ("http://127.0.0.1:1",), "opentelemetry.exporter", "otel"),
    ):
        arguments = [str(model_folder), "--port", "65000", option, *value]
        done = subprocess.run(
            [sys.executable, "-c", script.format(package), "serve", *arguments],
            env=server_environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"jaxserve: error: {option} needs the package {package}")
        assert line.endswith(f": pip install 'jaxserve[{extra}]'")

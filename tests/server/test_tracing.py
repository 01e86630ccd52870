"""OpenTelemetry: what a collector gets."""

import http.server
import os
import signal
import socket
import threading
import time

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LATENCIES = {
    "e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill",
    "time_in_model_decode", "time_in_model_inference",
}  # fmt: skip


class Collector(http.server.ThreadingHTTPServer):
    """OTLP over HTTP, as far as it takes to keep the spans."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.spans = {}
        self.resources = []
        self.changed = threading.Condition()

    def take(self, body):
        message = ExportTraceServiceRequest.FromString(body)
        with self.changed:
            for resource_spans in message.resource_spans:
                self.resources.append(attributes_of(resource_spans.resource))
                for scope in resource_spans.scope_spans:
                    for span in scope.spans:
                        self.spans[attributes_of(span)["gen_ai.request.id"]] = span
            self.changed.notify_all()

    def wait_span(self, request_id):
        with self.changed:
            assert self.changed.wait_for(lambda: request_id in self.spans, 30)
            return self.spans[request_id]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/x-protobuf"
        assert self.headers.get("content-encoding") is None
        self.server.take(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def value_of(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


def attributes_of(message):
    return {entry.key: value_of(entry.value) for entry in message.attributes}


@pytest.fixture(scope="module")
def collector():
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(start_fake, collector):
    return start_fake("--step-time", "0.01", "--otlp-endpoint", collector.url).ready()


def test_a_span_for_each_request(server, collector, events):
    body = {"prompt": "hello world", "max_tokens": 9, "temperature": 0.5, "top_p": 0.75, "n": 2}
    before = time.time_ns()
    answer = server.post("/v1/completions", **body).json()
    after = time.time_ns()
    span = collector.wait_span(answer["id"])
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert span.parent_span_id == b""
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= after
    attributes = attributes_of(span)
    seconds = {
        name.removeprefix("gen_ai.latency."): attributes.pop(name)
        for name in list(attributes)
        if name.startswith("gen_ai.latency.")
    }
    assert attributes == {
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.usage.prompt_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 18,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert set(seconds) == LATENCIES
    # Steps of 10 ms: eight after the first token.
    assert seconds["time_in_model_decode"] > 8 * 0.009
    parts = seconds["time_in_queue"] + seconds["time_in_model_inference"]
    assert parts <= seconds["e2e"] <= (after - before) / 1e9
    assert seconds["time_in_model_inference"] == pytest.approx(
        seconds["time_in_model_prefill"] + seconds["time_in_model_decode"]
    )
    assert seconds["time_to_first_token"] < seconds["e2e"]
    assert collector.resources[0]["service.name"] == "jaxserve"

    chunks = events(server, "/v1/completions", prompt=["a", "b"], max_tokens=3, ignore_eos=True)
    attributes = attributes_of(collector.wait_span(chunks[0]["id"]))
    assert attributes["gen_ai.usage.completion_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_a_trace_is_continued(server, collector):
    traceparent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    response = server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
        headers={"traceparent": traceparent},
    )
    span = collector.wait_span(response.json()["id"])
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    # Whoever began this trace does not record it.
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "a"},
        headers={"traceparent": traceparent.removesuffix("01") + "00"},
    )
    last = server.post("/v1/completions", prompt="a").json()
    collector.wait_span(last["id"])
    assert response.json()["id"] not in collector.spans


def test_spans_of_what_failed_and_of_what_is_told_last(server, collector):
    last = server.post("/v1/completions", prompt="hello").json()
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert "error" in "".join(lines)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert last["id"] in collector.spans
    failed = [s for s in collector.spans.values() if s.status.code == Status.STATUS_CODE_ERROR]
    assert [span.status.message for span in failed] == ["the engine's process has died"]


def test_a_collector_that_does_not_answer(start_fake):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        server = start_fake("--otlp-endpoint", f"http://127.0.0.1:{port}/v1/traces").ready()
        for _ in range(30):
            assert server.post("/v1/completions", prompt="hello").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0

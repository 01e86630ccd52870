"""OpenTelemetry traces: a span for each request, with vLLM's names, sent in the background."""

import threading
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.metrics import RequestClock
from jaxserve.version import __version__

_PATH = "/v1/traces"
_SEND_S = 3.0
"""How long a batch may take, with all its attempts; then it is lost."""
_FLUSH_S = 5.0
_MAX_WAITING_SPANS = 2048
"""What comes on top while no collector takes any is lost."""


class Tracer:
    """Sends spans to the OTLP collector (HTTP, protobuf) at `endpoint`, an http URL, to which
    /v1/traces is added unless it ends so."""

    def __init__(self, endpoint: str) -> None:
        base = endpoint.rstrip("/").removesuffix(_PATH)
        exporter = OTLPSpanExporter(base + _PATH, timeout=_SEND_S)
        resource = Resource.create({"service.name": "jaxserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=_MAX_WAITING_SPANS, schedule_delay_millis=1000
            )
        )
        self._tracer = self._provider.get_tracer("jaxserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        clock: RequestClock,
        request_id: str,
        params: SamplingParams,
        headers: Mapping[str, str],
        error: Exception | None,
    ) -> None:
        """A request has ended now: its span, as part of the trace that `headers` name, if any."""
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=end_ns - round((time.monotonic() - clock.arrival_s) * 1e9),
            attributes=_request(request_id, params) | _usage(clock) | _latencies(clock),
        )
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(end_ns)

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        # The wait for a collector that does not answer must not hold up the end of the process.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSH_S)


def _request(request_id: str, params: SamplingParams) -> dict[str, str | int | float]:
    attributes = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes


def _usage(clock: RequestClock) -> dict[str, int | list[str]]:
    return {
        "gen_ai.usage.prompt_tokens": clock.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": clock.num_tokens.total(),
        "gen_ai.response.finish_reasons": [delta.finish_reason for delta in clock.finished],
    }


def _latencies(clock: RequestClock) -> dict[str, float]:
    """In seconds. Of several sequences: until the first one is scheduled, until the first token of
    any, until the last token of all."""
    latencies = {"e2e": time.monotonic() - clock.arrival_s}
    if clock.first_token_s is not None:
        latencies["time_to_first_token"] = clock.first_token_s - clock.arrival_s
    times = [delta.metrics for delta in clock.finished if delta.metrics is not None]
    times = [t for t in times if t.first_token_s is not None and t.finished_s is not None]
    if times:
        arrival_s = min(t.arrival_s for t in times)
        scheduled_s = min(t.first_scheduled_s for t in times)
        first_token_s = min(t.first_token_s for t in times)
        finished_s = max(t.finished_s for t in times)
        latencies |= {
            "time_in_queue": scheduled_s - arrival_s,
            "time_in_model_prefill": first_token_s - scheduled_s,
            "time_in_model_decode": finished_s - first_token_s,
            "time_in_model_inference": finished_s - scheduled_s,
        }
    return {f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()}

"""What /metrics shows: vLLM's names, with the prefix `jaxserve:`, and some of our own.

Nothing is global. A request's clock counts into plain histograms, and the page is made from these
and from the engine's newest figures when somebody asks for it.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxserve.engine.messages import EngineInfo
from jaxserve.engine.process import EngineProcess
from jaxserve.engine.stats import Histogram
from jaxserve.outputs import OutputDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LONG_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0, 1000.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 1e6)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token", _LONG_S),
    "inter_token_latency_seconds": ("From a sequence's token to its next", _SHORT_S),
    "request_time_per_output_token_seconds": ("A sequence's mean time of a token", _SHORT_S),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end", _LONG_S),
    "request_queue_time_seconds": ("Waiting for the first step", _LONG_S),
    "request_prefill_time_seconds": ("From the first step to the first token", _LONG_S),
    "request_decode_time_seconds": ("From the first token to the last", _LONG_S),
    "request_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "request_generation_tokens": ("Tokens of a sequence", _TOKENS),
}


class ServerMetrics:
    """The counts of one server."""

    def __init__(self, engine: EngineProcess, info: EngineInfo, model_name: str) -> None:
        self._engine = engine
        self._info = info
        self._labels = {"model_name": model_name, "engine": "0"}
        self.histograms = {name: Histogram.of(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks for."""
        yield from self._requests()
        yield from self._cache_config()
        yield from self._steps()

    def _requests(self) -> Iterator[Metric]:
        for name, (text, _) in _HISTOGRAMS.items():
            yield self._histogram(name, text, {}, [((), self.histograms[name])])
        yield self._counter("prompt_tokens", "Tokens of prompts", self.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens made", self.num_generation_tokens)
        family = CounterMetricFamily(
            "jaxserve:request_success",
            "Sequences that ended",
            labels=self._names("finished_reason"),
        )
        for reason, count in self.finished.items():
            family.add_metric([*self._labels.values(), reason], count)
        yield family

    def _cache_config(self) -> Iterator[Metric]:
        info = self._info
        facts = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks - 1,
            "enable_prefix_caching": info.enable_prefix_caching,
        }
        yield self._gauge("cache_config_info", "The KV cache", 1, facts)

    def _steps(self) -> Iterator[Metric]:
        stats = self._engine.stats.stats
        cache, steps = stats.prefix_cache, stats.steps
        yield self._gauge("num_requests_running", "Sequences with a slot", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences without one", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all", stats.kv_usage)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up", cache.num_query_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found", cache.num_hit_tokens)
        yield self._counter("num_preemptions", "Preemptions", stats.num_preemptions)
        yield self._histogram(
            "iteration_tokens_total", "Tokens in a step", {}, [((), steps.num_tokens)]
        )
        yield self._histogram(
            "step_time_seconds",
            "A step, by what it holds",
            {"kind": None},
            [((kind,), histogram) for kind, histogram in steps.step_time_s.items()],
        )
        yield self._histogram(
            "host_gap_seconds",
            "The device's wait for a launch, at most",
            {},
            [((), steps.host_gap_s)],
        )
        family = CounterMetricFamily(
            "jaxserve:compilations", "Programs compiled", labels=self._names("phase")
        )
        for phase, count in self._engine.stats.num_compilations.items():
            family.add_metric([*self._labels.values(), phase], count)
        yield family

    def _names(self, *more: str) -> list[str]:
        return [*self._labels, *more]

    def _gauge(
        self, name: str, text: str, value: float, facts: dict[str, Any] | None = None
    ) -> Metric:
        facts = facts or {}
        family = GaugeMetricFamily(f"jaxserve:{name}", text, labels=self._names(*facts))
        family.add_metric([*self._labels.values(), *map(str, facts.values())], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"jaxserve:{name}", text, labels=self._names())
        family.add_metric([*self._labels.values()], value)
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        labels: Iterable[str],
        histograms: Sequence[tuple[tuple[str, ...], Histogram]],
    ) -> Metric:
        family = HistogramMetricFamily(f"jaxserve:{name}", text, labels=self._names(*labels))
        for values, histogram in histograms:
            buckets = []
            total = 0
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
                total += count
                buckets.append((str(bound), total))
            family.add_metric([*self._labels.values(), *values], buckets, histogram.total)
        return family


class RequestClock:
    """Counts one HTTP request's prompts, tokens and times, from its arrival on."""

    def __init__(
        self, metrics: ServerMetrics, prompt_lens: Sequence[int], arrival_s: float
    ) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._last_s: dict[tuple[str, int], float] = {}
        self._num_tokens: Counter[tuple[str, int]] = Counter()
        for length in prompt_lens:
            metrics.num_prompt_tokens += length
            metrics.histograms["request_prompt_tokens"].observe(length)

    def observe(self, deltas: Sequence[OutputDelta]) -> None:
        """Called with what the engine has just sent."""
        now = time.monotonic()
        histograms = self._metrics.histograms
        for delta in deltas:
            key = (delta.request_id, delta.index)
            count = len(delta.token_ids)
            if count:
                self._metrics.num_generation_tokens += count
                self._num_tokens[key] += count
                last = self._last_s.get(key)
                self._last_s[key] = now
                if last is None:
                    histograms["time_to_first_token_seconds"].observe(now - self._arrival_s)
                else:
                    histograms["inter_token_latency_seconds"].observe((now - last) / count, count)
            if delta.finish_reason is not None:
                self._finish(delta, now)

    def _finish(self, delta: OutputDelta, now: float) -> None:
        metrics, times = self._metrics, delta.metrics
        metrics.finished[delta.finish_reason] += 1
        num_tokens = self._num_tokens[delta.request_id, delta.index]
        histograms = metrics.histograms
        histograms["e2e_request_latency_seconds"].observe(now - self._arrival_s)
        histograms["request_generation_tokens"].observe(num_tokens)
        if times is None or times.first_token_s is None or times.finished_s is None:
            return
        queue_s = times.first_scheduled_s - times.arrival_s
        decode_s = times.finished_s - times.first_token_s
        histograms["request_queue_time_seconds"].observe(queue_s)
        histograms["request_prefill_time_seconds"].observe(
            times.first_token_s - times.first_scheduled_s
        )
        histograms["request_decode_time_seconds"].observe(decode_s)
        if num_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode_s / (num_tokens - 1))

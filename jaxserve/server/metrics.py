"""What /metrics shows: vLLM's names, with the prefix `jaxserve:`, and some of our own.

Nothing is global. A request's clock counts into plain histograms, and the page is made from these
and from the engine's newest figures when somebody asks for it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxserve.engine.group import EngineGroup
from jaxserve.engine.messages import EngineInfo
from jaxserve.engine.stats import EngineStats, Histogram
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


class EngineCounts:
    """What the requests of one engine add up to, as the server sees them."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram.of(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0


type Samples = Iterable[tuple[Sequence[str], Any]]
"""Values of the labels beside the model's name, and the figure."""


class ServerMetrics:
    """The counts of one server. A lost engine's own figures are no longer shown."""

    def __init__(self, engine: EngineGroup, infos: Sequence[EngineInfo], model_name: str) -> None:
        self.engines = [EngineCounts() for _ in infos]
        self._engine = engine
        self._infos = infos
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks for."""
        yield from self._requests()
        yield self._cache_config()
        yield from self._steps()

    def _requests(self) -> Iterator[Metric]:
        engines = [(str(rank), counts) for rank, counts in enumerate(self.engines)]
        for name, (text, _) in _HISTOGRAMS.items():
            yield self._histogram(name, text, [((e,), c.histograms[name]) for e, c in engines])
        yield self._counter(
            "prompt_tokens", "Tokens of prompts", [((e,), c.num_prompt_tokens) for e, c in engines]
        )
        yield self._counter(
            "generation_tokens",
            "Tokens made",
            [((e,), c.num_generation_tokens) for e, c in engines],
        )
        yield self._counter(
            "request_success",
            "Sequences that ended",
            [((e, reason), count) for e, c in engines for reason, count in c.finished.items()],
            "finished_reason",
        )

    def _cache_config(self) -> Metric:
        names = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
        facts = [(i.block_size, i.num_blocks - 1, i.enable_prefix_caching) for i in self._infos]
        samples = [((str(rank), *map(str, f)), 1) for rank, f in enumerate(facts)]
        return self._gauge("cache_config_info", "The KV cache", samples, *names)

    def _steps(self) -> Iterator[Metric]:
        engines = enumerate(self._engine.engines)
        serving = [(str(rank), e.stats) for rank, e in engines if e.error is None]
        stats = [(rank, s.stats) for rank, s in serving]

        def each(figure: Callable[[EngineStats], Any]) -> Samples:
            return [((rank,), figure(s)) for rank, s in stats]

        yield self._gauge(
            "num_requests_running", "Sequences with a slot", each(lambda s: s.num_running)
        )
        yield self._gauge(
            "num_requests_waiting", "Sequences without one", each(lambda s: s.num_waiting)
        )
        yield self._gauge(
            "kv_cache_usage_perc", "KV blocks in use, 1 is all", each(lambda s: s.kv_usage)
        )
        yield self._counter(
            "prefix_cache_queries",
            "Prompt tokens looked up",
            each(lambda s: s.prefix_cache.num_query_tokens),
        )
        yield self._counter(
            "prefix_cache_hits",
            "Prompt tokens found",
            each(lambda s: s.prefix_cache.num_hit_tokens),
        )
        yield self._counter("num_preemptions", "Preemptions", each(lambda s: s.num_preemptions))
        yield self._histogram(
            "iteration_tokens_total", "Tokens in a step", each(lambda s: s.steps.num_tokens)
        )
        yield self._histogram(
            "step_time_seconds",
            "A step, by what it holds",
            [((rank, kind), h) for rank, s in stats for kind, h in s.steps.step_time_s.items()],
            "kind",
        )
        yield self._histogram(
            "host_gap_seconds",
            "The device's wait for a launch, at most, by what the step holds",
            [((rank, kind), h) for rank, s in stats for kind, h in s.steps.host_gap_s.items()],
            "kind",
        )
        yield self._counter(
            "compilations",
            "Programs compiled",
            [((rank, p), count) for rank, s in serving for p, count in s.num_compilations.items()],
            "phase",
        )

    def _gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(**_described(name, text, labels)), samples)

    def _counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(**_described(name, text, labels)), samples)

    def _fill(self, family: Any, samples: Samples) -> Metric:
        for values, figure in samples:
            family.add_metric([self._model_name, *values], figure)
        return family

    def _histogram(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        family = HistogramMetricFamily(**_described(name, text, labels))
        for values, histogram in samples:
            buckets = []
            total = 0
            for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
                total += count
                buckets.append((str(bound), total))
            family.add_metric([self._model_name, *values], buckets, histogram.total)
        return family


def _described(name: str, text: str, labels: Sequence[str]) -> dict[str, Any]:
    names = ["model_name", "engine", *labels]
    return {"name": f"jaxserve:{name}", "documentation": text, "labels": names}


class RequestClock:
    """Counts one HTTP request's prompts, tokens and times, from its arrival on, for the engine that
    `ranks` names for each of the engine's requests."""

    def __init__(
        self,
        metrics: ServerMetrics,
        ranks: Mapping[str, int],
        prompt_lens: Mapping[str, int],
        arrival_s: float,
    ) -> None:
        self.arrival_s = arrival_s
        """Monotonic, as all times are."""
        self.first_token_s: float | None = None
        self.num_prompt_tokens = sum(prompt_lens.values())
        self.num_tokens: Counter[tuple[str, int]] = Counter()
        """Of each sequence so far."""
        self.finished: list[OutputDelta] = []
        """The last delta of each sequence that has ended."""
        self._engines = metrics.engines
        self._ranks = ranks
        self._last_s: dict[tuple[str, int], float] = {}
        for request_id, length in prompt_lens.items():
            counts = self._engines[ranks[request_id]]
            counts.num_prompt_tokens += length
            counts.histograms["request_prompt_tokens"].observe(length)

    def observe(self, deltas: Sequence[OutputDelta]) -> None:
        """Called with what the engine has just sent."""
        now = time.monotonic()
        for delta in deltas:
            counts = self._engines[self._ranks[delta.request_id]]
            key = (delta.request_id, delta.index)
            num_new = len(delta.token_ids)
            if num_new:
                counts.num_generation_tokens += num_new
                self.num_tokens[key] += num_new
                last = self._last_s.get(key)
                self._last_s[key] = now
                if last is None:
                    self.first_token_s = self.first_token_s or now
                    waited_s = now - self.arrival_s
                    counts.histograms["time_to_first_token_seconds"].observe(waited_s)
                else:
                    gap_s = (now - last) / num_new
                    counts.histograms["inter_token_latency_seconds"].observe(gap_s, num_new)
            if delta.finish_reason is not None:
                self._finish(counts, delta, now)

    def _finish(self, counts: EngineCounts, delta: OutputDelta, now: float) -> None:
        times, histograms = delta.metrics, counts.histograms
        self.finished.append(delta)
        counts.finished[delta.finish_reason] += 1
        num_tokens = self.num_tokens[delta.request_id, delta.index]
        histograms["e2e_request_latency_seconds"].observe(now - self.arrival_s)
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

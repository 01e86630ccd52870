"""What `jaxserve bench serve` can be told. Names and meanings follow vLLM's."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; per token after it; between events; end to end."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBenchConfig:
    """Raises ValueError, naming the field and what it allows."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = "/v1/completions"
    """Completions get prompts of random token ids, chats random words."""
    model: str | None = None
    """The name in the requests; None: the first that the server lists."""
    api_key: str | None = None
    """The command line is public on most machines: prefer api_key_file."""
    api_key_file: str | None = None
    """A file whose first line is the key."""
    dataset_name: str = "random"
    """Where lengths come from: "random" (the random_* fields), "sharegpt", "lmsys-trace",
    "sharegpt-trace", "splitwise-trace", or a CSV file with columns input_len and output_len."""
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    """Lengths are even between 1 - this and 1 + this times the length."""
    vocab_size: int = 32000
    """Token ids of prompts are below it."""
    num_prompts: int = 1000
    request_rate: str = "inf"
    """Requests a second ("inf": all at once), or several after commas: a sweep, one run each."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals; 1: Poisson arrivals, less is
    burstier, more is more even."""
    max_concurrency: int | None = None
    """Most requests open at once; those that have to wait for that are sent later."""
    num_warmups: int = 1
    """Requests before the first run; if one fails, there is no run."""
    ignore_eos: bool = False
    """Ask for exactly the lengths of the dataset."""
    extra_body: str | None = None
    """A JSON object of further request fields; temperature is 0 if it has none."""
    goodput: Sequence[str] = ()
    """Bounds in milliseconds, as ttft:200 tpot:50 e2el:5000, on what counts as good."""
    percentile_metrics: str = "ttft,tpot,itl,e2el"
    metric_percentiles: str = "99"
    save_result: bool = False
    """Write a JSON file, with vLLM's names, for each command."""
    result_file: str | None = None
    """Its name; None: from the model and the time."""
    plot: str | None = None
    """An image (.png, .svg or .pdf) of latency against throughput over the runs; needs
    matplotlib."""
    seed: int = 0
    """Of lengths, prompts and arrivals."""
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        def check(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        check(self.base_url.startswith(("http://", "https://")), "base_url", "http(s)://...")
        check(bool(self.rates) and all(rate > 0 for rate in self.rates), "request_rate",
              "numbers over 0, or inf, with commas between")  # fmt: skip
        check(self.api_key is None or self.api_key_file is None, "api_key",
              "None beside api_key_file")  # fmt: skip
        for name in ("random_input_len", "random_output_len", "num_prompts"):
            check(getattr(self, name) >= 1, name, "at least 1")
        check(0 <= self.random_range_ratio < 1, "random_range_ratio", "from 0 to less than 1")
        check(self.vocab_size >= 2, "vocab_size", "at least 2")
        check(0 < self.burstiness < math.inf, "burstiness", "over 0")
        limit = self.max_concurrency
        check(limit is None or limit >= 1, "max_concurrency", "None or at least 1")
        check(self.num_warmups >= 0, "num_warmups", "at least 0")
        check(self.seed >= 0, "seed", "at least 0")
        check(self.extra_fields is not None, "extra_body", "None or a JSON object")
        check(self.bounds_ms is not None, "goodput",
              f"METRIC:MILLISECONDS with {', '.join(GOODPUT_METRICS)}")  # fmt: skip
        names = self.percentile_metrics.split(",")
        check(set(names) <= set(METRICS), "percentile_metrics", f"some of {','.join(METRICS)}")
        percentiles = self.percentiles
        check(bool(percentiles) and all(0 <= p <= 100 for p in percentiles), "metric_percentiles",
              "numbers from 0 to 100, with commas between")  # fmt: skip
        check(self.plot is None or self.plot.endswith((".png", ".svg", ".pdf")), "plot",
              "a .png, .svg or .pdf file")  # fmt: skip

    @property
    def rates(self) -> list[float]:
        return _numbers(self.request_rate)

    @property
    def percentiles(self) -> list[float]:
        return _numbers(self.metric_percentiles)

    @property
    def is_chat(self) -> bool:
        return self.endpoint == "/v1/chat/completions"

    @property
    def extra_fields(self) -> dict[str, Any] | None:
        """None: extra_body is no JSON object."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError:
            return None
        return fields if isinstance(fields, dict) else None

    @property
    def bounds_ms(self) -> dict[str, float] | None:
        """`goodput` by metric; None: it makes no sense."""
        bounds = {}
        for text in self.goodput:
            metric, _, bound = text.partition(":")
            value = _numbers(bound)
            if metric not in GOODPUT_METRICS or len(value) != 1 or not value[0] > 0:
                return None
            bounds[metric] = value[0]
        return bounds


def _numbers(text: str) -> list[float]:
    """Empty if any of them is none."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return []

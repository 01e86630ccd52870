"""The requests of a run and the times at which they arrive, from a seed."""

import json
import math
from typing import Any

import numpy as np

from jaxserve.bench.serving.config import ServingBenchConfig
from jaxserve.bench.workloads import make_requests, read_lengths

# Each is one token with a space before it in the vocabularies that are in use.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out
so up said what its about than into them can only other time new some could these two may first then
do any like my now over such our man me even most made after also did many
""".split()  # noqa: SIM905


def make_lengths(config: ServingBenchConfig) -> list[tuple[int, int]]:
    """(input, output) tokens of each request. ValueError if the dataset is none or too short."""
    if config.dataset_name != "random":
        return read_lengths(config.dataset_name, config.num_prompts)
    rng = np.random.default_rng(config.seed)

    def draw(length: int) -> np.ndarray:
        least = max(1, math.floor(length * (1 - config.random_range_ratio)))
        most = math.ceil(length * (1 + config.random_range_ratio))
        return rng.integers(least, most, config.num_prompts, endpoint=True)

    inputs, outputs = draw(config.random_input_len), draw(config.random_output_len)
    return list(zip(inputs.tolist(), outputs.tolist(), strict=True))


def make_bodies(
    config: ServingBenchConfig, model: str, lengths: list[tuple[int, int]]
) -> list[bytes]:
    """The requests as they are sent. A chat's words are about as many tokens as asked for."""
    common: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    if config.ignore_eos:
        common["ignore_eos"] = True
    common |= config.extra_fields
    vocab_size = len(_WORDS) if config.is_chat else config.vocab_size
    bodies = []
    for request in make_requests(lengths, vocab_size, config.seed):
        if config.is_chat:
            text = " ".join(_WORDS[index] for index in request.prompt_token_ids)
            prompt = {"messages": [{"role": "user", "content": text}]}
        else:
            prompt = {"prompt": request.prompt_token_ids}
        bodies.append(json.dumps(prompt | {"max_tokens": request.output_len} | common).encode())
    return bodies


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds from the start of the run, the first at 0. Times between are gamma distributed with
    the mean 1 / rate; rate inf: all at 0."""
    if math.isinf(rate):
        return np.zeros(num_requests)
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), num_requests - 1)
    return np.concatenate(([0.0], np.cumsum(gaps)))

"""Host time of decoding through the engine, with a stand-in for the device.

    python bench/host_time.py --output bench/results/host_time.json

All of the engine runs but its programs: scheduling, packing, reading tokens, making text and
outputs. Two runs for each number of running requests and of steps in a dispatch: over a device
that needs no time, which leaves the host's; and over one that needs `--step-ms` for a step, during
which the interpreter is free, which shows how long such a device waits for the host.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxserve import LLM, SamplingParams
from jaxserve.bench.environment import describe, write_result
from jaxserve.bench.timing import FLAG_OVER, spread_of
from jaxserve.engine.buckets import Bucket, make_buckets
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.programs import Programs
from jaxserve.engine.startup import EngineParts
from jaxserve.engine.state import StepOutput, StepState
from jaxserve.text.tokenizer import Tokenizer
from scheduler import SchedulerConfig, SchedulerOutput
from sharding import make_mesh

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
PROMPT_LEN = 300
VOCAB_SIZE = 256
MAX_NUM_BATCHED_TOKENS = 2048


class Launch(NamedTuple):
    at_s: float
    num_rows: int
    """Of the bucket."""
    waited_s: float
    """For the device, by then."""
    idle_s: float
    """How long the device had nothing to do before it."""


class Device:
    """Runs dispatches one after another, `step_s` a step, and samples noise."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.launches: list[Launch] = []
        self.waited_s = 0.0
        self._free_s = time.perf_counter()
        self._tokens = np.random.default_rng(0).integers(32, 127, (16, 64, 4096), np.int32)

    def program(self, bucket: Bucket, num_steps: int) -> Callable[..., Any]:
        def launch(params, state, packed, token_masks):
            now = time.perf_counter()
            idle_s = max(now - self._free_s, 0)
            self.launches.append(Launch(now, bucket.num_rows, self.waited_s, idle_s))
            self._free_s = max(now, self._free_s) + num_steps * self.step_s
            noise = self._tokens[len(self.launches) % 16, :num_steps, : bucket.num_rows]
            return StepState((), None, StepOutput(_Tokens(self, self._free_s, noise), None))

        return launch


class _Tokens:
    """As much of a `jax.Array` as the engine uses."""

    def __init__(self, device: Device, ready_s: float, values: np.ndarray) -> None:
        self._device, self._ready_s, self._values = device, ready_s, values

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._ready_s

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        begin = time.perf_counter()
        if self._ready_s > begin:
            time.sleep(self._ready_s - begin)
            self._device.waited_s += time.perf_counter() - begin
        return self._values


def make_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [chr(i) if chr(i) in alphabet else None for i in range(VOCAB_SIZE)]
    others = iter([char for char in alphabet if char not in printable])
    vocab = {char or next(others): i for i, char in enumerate(printable)}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def make_llm(num_requests: int, num_steps: int, device: Device, tokenizer: Tokenizer) -> LLM:
    max_blocks = MAX_MODEL_LEN // BLOCK_SIZE
    config = SchedulerConfig(
        num_blocks=num_requests * 200 + max_blocks,  # none is preempted
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    buckets = make_buckets(num_requests, config.max_num_batched_tokens)
    replicated = NamedSharding(make_mesh(1), P())
    programs = Programs(
        steps={b: device.program(b, 1) for b in buckets},
        decode_steps={b: device.program(b, num_steps) for b in buckets if num_steps > 1},
        receive={b: lambda inputs, packed: packed for b in buckets},
        logprobs={},
        layouts={b: BatchLayout(b, max_blocks, BLOCK_SIZE) for b in buckets},
        load_slot=lambda slots, *rows: slots,
        copy=lambda token_ids: token_ids,
        temp_bytes=0,
    )
    parts = EngineParts(
        definition=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB_SIZE)),
        tokenizer=tokenizer,
        eos_token_ids=frozenset({0}),
        scheduler_config=config,
        max_blocks=max_blocks,
        buckets=buckets,
        programs=programs,
        steps_per_dispatch=num_steps,
        no_masks=dict.fromkeys(buckets),
        replicated=replicated,
        host=replicated,
        inputs=dict.fromkeys(buckets),
        params=None,
        state=StepState((), None, None),
        sizes=None,
        phases_s={},
    )
    with mock.patch("jaxserve.engine.engine.start", return_value=parts):
        return LLM("a stand-in")


def run(
    num_requests: int, num_steps: int, num_dispatches: int, step_s: float, tokenizer: Tokenizer
) -> dict[str, float]:
    """Milliseconds of the dispatches in which all of the requests decode."""
    device = Device(step_s)
    rng = random.Random(0)
    prompts = [rng.choices(range(32, 127), k=PROMPT_LEN) for _ in range(num_requests)]
    # While prompts are read, those that have been decode a step at a time.
    num_prefills = num_requests * PROMPT_LEN // (MAX_NUM_BATCHED_TOKENS - num_requests) + 2
    max_tokens = num_prefills + num_dispatches * num_steps
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    with make_llm(num_requests, num_steps, device, tokenizer) as llm:
        engine = llm.engine
        of_decode: list[bool] = []

        def look(output: SchedulerOutput | None) -> None:
            if output is not None:
                shape = output.num_decode, len(output.scheduled), output.num_steps
                of_decode.append(shape == (num_requests, num_requests, num_steps))

        seconds = {
            "schedule": _time(engine._scheduler, "schedule", look),
            "build": _time(engine._builder, "build"),
            "update": _time(engine._scheduler, "update"),
        }
        llm.generate(prompts, params, use_tqdm=False)
    chosen = [i for i, is_decode in enumerate(of_decode) if is_decode][1:]
    launches = [device.launches[i] for i in chosen]
    host = [
        (b.at_s - a.at_s - (b.waited_s - a.waited_s)) * 1e3 for a, b in itertools.pairwise(launches)
    ]
    result = {
        f"{name}_ms_p50": statistics.median(of_part[i] for i in chosen) * 1e3
        for name, of_part in seconds.items()
    }
    result |= {
        "total_ms_p50": statistics.median(host),
        "total_ms_p99": statistics.quantiles(host, n=100)[98],
        "device_idle_ms_a_step": statistics.fmean(x.idle_s for x in launches) * 1e3 / num_steps,
    }
    return {name: round(value, 4) for name, value in result.items()}


def _time(owner: Any, name: str, look: Callable[[Any], None] = lambda result: None) -> list[float]:
    """Seconds that each call of this method will have taken; `look` sees what it returns."""
    function = getattr(owner, name)
    seconds = []

    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - begin)
        look(result)
        return result

    setattr(owner, name, call)
    return seconds


def measure(
    num_requests: int, num_steps: int, num_dispatches: int, step_s: float, tokenizer: Tokenizer
) -> dict[str, Any]:
    passes = []
    for _ in range(2):
        instant = run(num_requests, num_steps, num_dispatches, 0.0, tokenizer)
        busy = run(num_requests, num_steps, num_dispatches, step_s, tokenizer)
        passes.append(instant | {"device_idle_ms_a_step": busy["device_idle_ms_a_step"]})
    spread = spread_of([p["total_ms_p50"] for p in passes])
    return {
        "num_running": num_requests,
        "steps_in_dispatch": num_steps,
        "passes": passes,
        "spread": spread,
        "flagged": spread > FLAG_OVER,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--steps-in-dispatch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-dispatches", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=Path("bench/results/host_time.json"))
    args = parser.parse_args()
    result = describe(threads=os.cpu_count() or 1) | {"benchmark": "host_time"}
    result |= {"step_ms": args.step_ms, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
    for num_requests in args.num_requests:
        for num_steps in args.steps_in_dispatch:
            row = measure(
                num_requests, num_steps, args.num_dispatches, args.step_ms / 1e3, tokenizer
            )
            result["rows"].append(row)
    write_result(args.output, result)


if __name__ == "__main__":
    main()

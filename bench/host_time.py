"""Host time of one decode step without the device: schedule, build the batch, update.

    python bench/host_time.py --output bench/results/host_time.json

A step's host work must stay under 1 ms at 64 running requests, or the device waits for it.
"""

import argparse
import os
import random
import statistics
import time
from pathlib import Path

from jaxserve.bench.environment import describe, write_result
from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import make_buckets, pick_bucket
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.request_state import RequestState
from jaxserve.outputs import RequestMetrics
from jaxserve.sampling_params import SamplingParams
from scheduler import Request, Scheduler, SchedulerConfig

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
PROMPT_LEN = 300


def make_scheduler(num_requests: int) -> tuple[Scheduler, dict[str, RequestState]]:
    config = SchedulerConfig(
        num_blocks=num_requests * 96 + MAX_MODEL_LEN // BLOCK_SIZE,  # none is preempted
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
    )
    scheduler = Scheduler(config)
    rng = random.Random(0)
    states = {}
    for i in range(num_requests):
        prompt = [rng.randrange(50_000) for _ in range(PROMPT_LEN)]
        request = Request(str(i), prompt, max_tokens=MAX_MODEL_LEN - PROMPT_LEN)
        scheduler.add(request)
        states[str(i)] = RequestState(
            request=request,
            parent_id=str(i),
            index=0,
            params=SamplingParams(max_tokens=None),
            seed=i,
            has_bias=False,
            bad_word_token_ids=[],
            metrics=RequestMetrics(arrival_s=0.0),
            tokenizer=None,
            detokenizer=None,
            eos_token_ids=frozenset(),
        )
    return scheduler, states


def run(num_requests: int, num_steps: int) -> dict[str, float]:
    """Median and 99th percentile of the decode steps' parts, in milliseconds."""
    scheduler, states = make_scheduler(num_requests)
    buckets = make_buckets(num_requests, 2048)
    layouts = {b: BatchLayout(b, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE) for b in buckets}
    builder = BatchBuilder(num_requests, MAX_MODEL_LEN // BLOCK_SIZE)
    rng = random.Random(1)
    parts: dict[str, list[float]] = {"schedule": [], "build": [], "update": [], "total": []}
    while len(parts["total"]) < num_steps:
        begin = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        builder.build(output, states, layouts[pick_bucket(buckets, output.num_tokens)])
        built = time.perf_counter()
        token_ids = [rng.randrange(50_000) for _ in output.scheduled]
        update = time.perf_counter()
        scheduler.update(output, token_ids)
        end = time.perf_counter()
        if output.num_decode == num_requests:
            times = (scheduled - begin, built - scheduled, end - update)
            for name, seconds in zip(parts, (*times, sum(times)), strict=True):
                parts[name].append(seconds * 1e3)
    result = {}
    for name, values in parts.items():
        result[f"{name}_ms_p50"] = round(statistics.median(values), 4)
        result[f"{name}_ms_p99"] = round(statistics.quantiles(values, n=100)[98], 4)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("bench/results/host_time.json"))
    args = parser.parse_args()
    result = describe(threads=os.cpu_count() or 1) | {"benchmark": "host_time", "running": {}}
    for num_requests in args.num_requests:
        run(num_requests, 100)
        passes = [run(num_requests, args.num_steps) for _ in range(2)]
        medians = [p["total_ms_p50"] for p in passes]
        spread = max(medians) / min(medians) - 1
        result["running"][str(num_requests)] = {
            "passes": passes,
            "spread": round(spread, 3),
            "flagged": spread > 0.15,
        }
    write_result(args.output, result)


if __name__ == "__main__":
    main()

"""Step time of 32 requests with 32 different JSON schemas, against 32 without.

    PYTHONPATH=. python bench/structured_output.py

Every answer must validate; a schema bounds its answer's length (`schemas.py`), so that none is cut
off. Runs with and without grammars take turns, in an order that is turned round every time. Those
without give answers of the same lengths. Only steps that decode all the requests are timed.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
from schemas import Schema, SchemaMaker, longest

from jaxserve import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from jaxserve.bench.environment import describe, write_result

MAX_RATIO = 1.15
PROMPT = "Here is a record of the measurements, as JSON, with invented values:\n"


def constrained(schema: Schema, seed: int) -> SamplingParams:
    structure = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
    most = longest(schema) + 1  # the end is a token too
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=most, structured_outputs=structure)


def free(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=num_tokens, ignore_eos=True)


def run(llm: LLM, params: Sequence[SamplingParams]) -> tuple[list[CompletionOutput], list[float]]:
    """(answers, seconds of each step that decoded every request)."""
    engine = llm.engine
    submissions = [engine.prepare(PROMPT, one) for one in params]
    outputs = {s.output.request_id: s.output for s in submissions}
    for submission in submissions:
        engine.add(submission)
    times = []
    while engine.has_unfinished:
        launched = engine._in_flight[-1].scheduled if engine._in_flight else None
        full = launched is not None and launched.num_decode == len(params)
        begin = time.perf_counter()
        for delta in engine.step():
            outputs[delta.request_id].apply(delta)
        if full and engine.num_running == len(params):
            times.append((time.perf_counter() - begin) / launched.num_steps)
    return [s.output.outputs[0] for s in submissions], times


class MaskClock:
    """Times what the host does for the masks of a step, but for its wait for the device."""

    def __init__(self, llm: LLM) -> None:
        masks = llm.engine._masks
        fill = masks.fill
        self.seconds: list[float] = []

        def timed_fill(scheduled, states, previous, num_rows):
            if previous is not None and any(state.matcher for state in states.values()):
                previous.token_ids()
            begin = time.perf_counter()
            filled = fill(scheduled, states, previous, num_rows)
            if filled is not None:
                self.seconds.append(time.perf_counter() - begin)
            return filled

        masks.fill = timed_fill


def count_valid(answers: Sequence[CompletionOutput], schemas: Sequence[Schema]) -> int:
    """How many there are; jsonschema.ValidationError or JSONDecodeError for a wrong one."""
    checker = jsonschema.FormatChecker()
    for answer, schema in zip(answers, schemas, strict=True):
        if answer.finish_reason != "stop":
            raise RuntimeError(f"an answer was cut off: {answer.text}")
        jsonschema.validate(json.loads(answer.text), schema, format_checker=checker)
    return len(answers)


def measure(llm: LLM, schemas: list[Schema], num_pairs: int) -> dict[str, Any]:
    begin = time.perf_counter()
    grammars = [constrained(schema, i) for i, schema in enumerate(schemas)]
    for one in grammars:
        llm.engine.prepare(PROMPT, one)
    compile_s = time.perf_counter() - begin
    run(llm, [free(16, i) for i in range(len(schemas))])
    lengths: list[int] = []
    num_valid = 0
    steps: dict[str, list[float]] = {"grammars": [], "free": []}
    clock = MaskClock(llm)
    for pair in range(num_pairs):
        for name in ("grammars", "free") if pair % 2 == 0 else ("free", "grammars"):
            if name == "free":
                _, times = run(llm, [free(length, i) for i, length in enumerate(lengths)])
            else:
                answers, times = run(llm, grammars)
                num_valid += count_valid(answers, schemas)
                lengths = [len(answer.token_ids) for answer in answers]
            steps[name].append(statistics.median(times))
    ratios = [a / b for a, b in zip(steps["grammars"], steps["free"], strict=True)]
    ratio = statistics.median(ratios)
    spread = max(max(values) / min(values) for values in (*steps.values(), ratios)) - 1
    return {
        "answers_valid": f"{num_valid} of {len(schemas) * num_pairs}",
        "answer_tokens": {"least": min(lengths), "most": max(lengths), "all": sum(lengths)},
        "compile_ms_per_schema": round(compile_s / len(schemas) * 1e3, 2),
        "num_steps_timed": len(times),
        "step_ms": {name: [round(1e3 * s, 3) for s in values] for name, values in steps.items()},
        "mask_ms_p50": round(1e3 * statistics.median(clock.seconds), 3),
        "mask_ms_p99": round(1e3 * statistics.quantiles(clock.seconds, n=100)[98], 3),
        "ratios": [round(value, 3) for value in ratios],
        "ratio": round(ratio, 3),
        "spread": round(spread, 3),
        "flagged": spread > 0.15,
        "within_limit": ratio <= MAX_RATIO,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench/results/structured_output.json"))
    args = parser.parse_args()
    maker = SchemaMaker(seed=0)
    schemas = [maker.make() for _ in range(args.num_requests)]
    with LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.num_requests,
        max_num_batched_tokens=2 * args.num_requests,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    ) as llm:
        device = llm.engine._parts.replicated.mesh.devices.flat[0].device_kind
        measured = measure(llm, schemas, args.pairs)
    about = {
        "benchmark": "structured_output",
        "model": args.model,
        "device": device,
        "num_requests": args.num_requests,
    }
    write_result(args.output, describe(threads=os.cpu_count() or 1) | about | measured)


if __name__ == "__main__":
    main()

"""Step time of 32 requests with 32 different JSON schemas, against 32 without.

    PYTHONPATH=. python bench/structured_output.py

Every answer must validate; a schema bounds its answer's length (`schemas.py`), so that none is cut
off. Then steps that decode all the requests are timed, from their start until the first of them
ends: runs with and without grammars take turns, in an order that is turned round every time, and
those without ask for answers of the same lengths.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jsonschema
from schemas import Schema, SchemaMaker, longest

from jaxserve import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from jaxserve.bench.environment import describe, write_result
from jaxserve.bench.timing import FLAG_OVER, spread_of
from jaxserve.engine.grammar_masks import GrammarMasks

MAX_RATIO = 1.15
PROMPT = "Here is a record of the measurements, as JSON, with invented values:\n"


def constrained(schema: Schema, seed: int) -> SamplingParams:
    structure = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
    most = longest(schema) + 1  # the end is a token too
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=most, structured_outputs=structure)


def free(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=num_tokens, ignore_eos=True)


def answers_to(llm: LLM, params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def step_times(llm: LLM, params: Sequence[SamplingParams]) -> list[float]:
    """Seconds of each step that decodes all the requests; ends with the first of them."""
    engine = llm.engine
    submissions = [engine.prepare(PROMPT, one) for one in params]
    for submission in submissions:
        engine.add(submission)
    reading = {submission.output.request_id for submission in submissions}
    times = []
    has_ended = False
    while not has_ended:
        begin = time.perf_counter()
        deltas = engine.step()
        seconds = time.perf_counter() - begin
        has_ended = any(delta.finish_reason is not None for delta in deltas)
        # The step that gave these was launched after every request had a token: all decode in it.
        if not reading and not has_ended:
            times.append(seconds / max(len(delta.token_ids) for delta in deltas))
        reading -= {delta.request_id for delta in deltas}
    engine.reset()
    return times


@contextmanager
def mask_clock() -> Iterator[list[float]]:
    """In the block: seconds of the host for the masks of each step, but for its wait for the
    device."""
    fill = GrammarMasks.fill
    seconds: list[float] = []

    def timed_fill(masks, scheduled, states, previous, num_rows):
        if previous is not None and any(state.matcher for state in states.values()):
            previous.token_ids()
        begin = time.perf_counter()
        filled = fill(masks, scheduled, states, previous, num_rows)
        if filled is not None:
            seconds.append(time.perf_counter() - begin)
        return filled

    with patch.object(GrammarMasks, "fill", timed_fill):
        yield seconds


def count_valid(answers: Sequence[CompletionOutput], schemas: Sequence[Schema]) -> int:
    """How many there are; jsonschema.ValidationError or JSONDecodeError for a wrong one."""
    checker = jsonschema.FormatChecker()
    for answer, schema in zip(answers, schemas, strict=True):
        if answer.finish_reason != "stop":
            raise RuntimeError(f"an answer was cut off: {answer.text}")
        jsonschema.validate(json.loads(answer.text), schema, format_checker=checker)
    return len(answers)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {f"p{share}": round(1e3 * cuts[share - 1], 3) for share in (50, 99)}


def measure(llm: LLM, schemas: list[Schema], num_pairs: int) -> dict[str, Any]:
    begin = time.perf_counter()
    grammars = [constrained(schema, i) for i, schema in enumerate(schemas)]
    for one in grammars:
        llm.engine.prepare(PROMPT, one)
    compile_s = time.perf_counter() - begin
    with mask_clock() as masks_s:
        answers = answers_to(llm, grammars)
        num_valid = count_valid(answers, schemas)
        lengths = [len(answer.token_ids) for answer in answers]
        cases = {
            "grammars": grammars,
            "free": [free(length, i) for i, length in enumerate(lengths)],
        }
        steps: dict[str, list[float]] = {name: [] for name in cases}
        first_masks = len(masks_s)
        for pair in range(num_pairs):
            for name in sorted(cases, reverse=pair % 2 == 0):
                times = step_times(llm, cases[name])
                steps[name].append(statistics.median(times))
    ratios = [a / b for a, b in zip(steps["grammars"], steps["free"], strict=True)]
    ratio = statistics.median(ratios)
    spread = max(map(spread_of, (*steps.values(), ratios)))
    return {
        "answers_valid": f"{num_valid} of {len(schemas)}",
        "answer_tokens": {"least": min(lengths), "most": max(lengths), "all": sum(lengths)},
        "compile_ms_per_schema": round(compile_s / len(schemas) * 1e3, 2),
        "num_steps_a_run": len(times),
        "step_ms": {name: [round(1e3 * s, 3) for s in values] for name, values in steps.items()},
        "mask_ms": {
            "grammars_seen_first": percentiles(masks_s[:first_masks]),
            "timed": percentiles(masks_s[first_masks:]),
        },
        "ratios": [round(value, 3) for value in ratios],
        "ratio": round(ratio, 3),
        "spread": spread,
        "flagged": spread > FLAG_OVER,
        "within_limit": ratio <= MAX_RATIO,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
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
        measured = measure(llm, schemas, args.pairs)
    about = {
        "benchmark": "structured_output",
        "model": args.model,
        "device": jax.devices()[0].device_kind,
        "num_requests": args.num_requests,
    }
    write_result(args.output, describe(threads=os.cpu_count() or 1) | about | measured)


if __name__ == "__main__":
    main()

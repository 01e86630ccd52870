"""Step time of 32 requests with 32 different JSON schemas, against 32 without.

    python bench/structured_output.py --output bench/results/structured_output.json

Every output must validate. Only steps that decode all the requests at once are timed. Passes with
and without grammars take turns, so that a machine that slows down slows both.
"""

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.bench.environment import describe, write_result

MAX_RATIO = 1.15
PROMPT = "Here is a record of the measurements, as JSON, with invented values:\n"


def make_schema(rng: random.Random, number: int) -> dict[str, Any]:
    """An object of some 100 to 250 tokens, with properties of its own."""
    word = lambda: "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))  # noqa: E731
    inner = {"type": "object", "additionalProperties": False}
    inner["properties"] = {
        word(): {"type": "boolean"},
        word(): {"enum": [word() for _ in range(5)]},
    }
    inner["required"] = list(inner["properties"])
    low, count = rng.randint(-100, 0), rng.randint(6, 9)
    properties = {
        word(): {"type": "string", "minLength": 5, "maxLength": 25},
        word(): {"type": "integer", "minimum": low, "maximum": low + 1000},
        word(): {"type": "string", "pattern": rf"^[A-Z]{{{number % 4 + 2}}}-[0-9]{{4}}$"},
        word(): inner,
        word(): {
            "type": "array", "items": {"type": "integer", "minimum": low, "maximum": low + 5000},
            "minItems": count, "maxItems": count + 3,
        },
        word(): {"type": ["number", "null"], "minimum": 0, "maximum": 9},
    }  # fmt: skip
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def params_of(schema: dict[str, Any] | None, seed: int, max_tokens: int) -> SamplingParams:
    structure = None
    if schema is not None:
        structure = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")
    return SamplingParams(
        temperature=0.8,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=schema is None,
        structured_outputs=structure,
    )


def run(llm: LLM, schemas: list[dict[str, Any] | None], max_tokens: int, fill_s: list[float]):
    """(texts, seconds of each step that decoded every request)."""
    engine = llm.engine
    fill = engine._masks.fill

    def timed_fill(scheduled, states, previous, num_rows):
        if any(state.matcher is not None for state in states.values()) and previous is not None:
            previous.token_ids()  # the wait for the device is none of the host's work
        begin = time.perf_counter()
        masks = fill(scheduled, states, previous, num_rows)
        if masks is not None and scheduled.num_decode == len(schemas):
            fill_s.append(time.perf_counter() - begin)
        return masks

    engine._masks.fill = timed_fill
    submissions = [
        engine.prepare(PROMPT, params_of(schema, i, max_tokens)) for i, schema in enumerate(schemas)
    ]
    outputs = {s.output.request_id: s.output for s in submissions}
    for submission in submissions:
        engine.add(submission)
    times = []
    try:
        while engine.has_unfinished:
            in_flight = list(engine._in_flight)
            full = bool(in_flight) and in_flight[-1].scheduled.num_decode == len(schemas)
            begin = time.perf_counter()
            for delta in engine.step():
                outputs[delta.request_id].apply(delta)
            if full and engine.num_running == len(schemas):
                times.append(time.perf_counter() - begin)
    finally:
        engine._masks.fill = fill
    return [s.output.outputs[0].text for s in submissions], times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=450)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench/results/structured_output.json"))
    args = parser.parse_args()
    rng = random.Random(0)
    schemas = [make_schema(rng, i) for i in range(args.num_requests)]
    steps: dict[str, list[float]] = {"free": [], "one grammar": [], "all grammars": []}
    fill_s: list[float] = []
    num_valid = num_asked = 0
    with LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.num_requests,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    ) as llm:
        begin = time.perf_counter()
        for schema in schemas:
            llm.engine.prepare(PROMPT, params_of(schema, 0, 1))
        compile_s = time.perf_counter() - begin
        cases = {
            "free": [None] * args.num_requests,
            "one grammar": [schemas[0]] + [None] * (args.num_requests - 1),
            "all grammars": schemas,
        }
        run(llm, cases["free"], 30, [])
        for _ in range(args.passes):
            for name, chosen in cases.items():
                fills = fill_s if name == "all grammars" else []
                max_tokens = args.max_tokens if name == "all grammars" else 80
                texts, times = run(llm, chosen, max_tokens, fills)
                steps[name].append(statistics.median(times))
                for text, schema in zip(texts, chosen, strict=True):
                    if name == "all grammars":
                        num_asked += 1
                        jsonschema.validate(json.loads(text), schema)
                        num_valid += 1
        device = llm.engine._parts.replicated.mesh.devices.flat[0].device_kind
    free, one, every = (statistics.median(values) for values in steps.values())
    result = describe(threads=os.cpu_count() or 1) | {
        "benchmark": "structured_output",
        "model": args.model,
        "device": device,
        "num_requests": args.num_requests,
        "num_schemas": len(schemas),
        "outputs_valid": f"{num_valid} of {num_asked}",
        "compile_ms_per_schema": round(compile_s / len(schemas) * 1e3, 2),
        "step_ms": {
            name: [round(seconds * 1e3, 3) for seconds in values] for name, values in steps.items()
        },
        "mask_ms_p50": round(statistics.median(fill_s) * 1e3, 3),
        "mask_ms_p99": round(statistics.quantiles(fill_s, n=100)[98] * 1e3, 3),
        "ratio_all": round(every / free, 3),
        "ratio_one": round(one / free, 3),
        "spread": round(max(max(v) / min(v) for v in steps.values()) - 1, 3),
    }
    result["flagged"] = result["spread"] > 0.15
    result["within_limit"] = result["ratio_all"] <= MAX_RATIO
    write_result(args.output, result)


if __name__ == "__main__":
    main()

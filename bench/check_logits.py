"""Whether an engine as it is timed says the same as plain JAX on the same weights.

    PYTHONPATH=. python bench/check_logits.py --shape qwen2.5-0.5b

The engine answers a batch of requests of mixed lengths, greedily, with the log-probability of every
token: prompts go through its prefill steps, answers through its decode steps, both together in
mixed ones. It answers them again without log-probabilities, several decode steps in a dispatch.
Then an engine with the reference attention and small steps scores prompts and answers as prompts.
Weights are the same, from the same seed.

Exit code 1 if log-probabilities differ by more than rounding explains; or if the two answers to a
request differ, and the first tokens that do are not both, by the reference, as likely as any within
that rounding.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxserve import LLM, SamplingParams
from jaxserve.bench.shapes import SHAPES, write_shape
from jaxserve.bench.workloads import TokenRequest, make_requests

MOST_MEAN = {"bfloat16": 0.02, "float32": 1e-4}
MOST_SINGLE = {"bfloat16": 0.5, "float32": 1e-2}
"""Largest mean, and largest single, difference of log-probabilities; the latter also between the
likeliest token and one that either engine took for it."""
REFERENCE = {"attention_impl": "reference", "max_num_seqs": 8, "max_num_batched_tokens": 128}
_SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)


def logprobs_of(output: Any) -> tuple[list[int], list[float]]:
    """Ids of prompt and answer, and their log-probabilities from the second on."""
    answer = output.outputs[0]
    ids = [*output.prompt_token_ids, *answer.token_ids]
    entries = [*output.prompt_logprobs[1:], *(answer.logprobs or [])]
    return ids, [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=False)]


def greedy(request: TokenRequest, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.output_len, **fields)


def single_steps(llm: LLM, requests: list[TokenRequest]) -> list[tuple]:
    params = [greedy(request, logprobs=0, prompt_logprobs=0) for request in requests]
    outputs = llm.generate([r.prompt_token_ids for r in requests], params, use_tqdm=False)
    return [logprobs_of(output) for output in outputs]


def several_steps(llm: LLM, requests: list[TokenRequest]) -> list[list[int]]:
    """Ids of prompts and answers. RuntimeError if no dispatch has taken several steps: then
    `num_scheduler_steps`, over 1, has to be among the fields."""
    engine = llm.engine
    submissions = [engine.prepare(r.prompt_token_ids, greedy(r)) for r in requests]
    outputs = {s.output.request_id: s.output for s in submissions}
    for submission in submissions:
        engine.add(submission)
    num_dispatches, steps_before = 0, engine.stats().num_steps
    while engine.has_unfinished:
        num_dispatches += 1
        for delta in engine.step():
            outputs[delta.request_id].apply(delta)
    if engine.stats().num_steps - steps_before <= num_dispatches:
        raise RuntimeError(
            "no dispatch has taken several steps, so nothing was compared: pass "
            """--options '{"num_scheduler_steps": 4}', since by default this model takes one """
            "on this device"
        )
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs.values()]


def reference(sequences: list[list[int]], fields: dict[str, Any]) -> list[list[tuple]]:
    """For each token from the second on, its log-probability and the likeliest one's."""
    with LLM(**fields | REFERENCE) as llm:
        outputs = llm.generate(sequences, _SCORE, use_tqdm=False)
        return [
            [
                (entry[token].logprob, max(candidate.logprob for candidate in entry.values()))
                for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for ids, output in zip(sequences, outputs, strict=True)
        ]


def up_to_first_difference(one: list[int], other: list[int]) -> list[list[int]]:
    """Both, up to the first token that differs; nothing if none does."""
    for index, pair in enumerate(zip(one, other, strict=True)):
        if len(set(pair)) > 1:
            return [one[: index + 1], other[: index + 1]]
    return []


def check(requests: list[TokenRequest], fields: dict[str, Any]) -> dict[str, Any]:
    """The differences, and whether they pass. `fields` are EngineConfig's."""
    with LLM(**fields) as llm:
        ours, several = single_steps(llm, requests), several_steps(llm, requests)
    parted = [
        ids
        for (single, _), others in zip(ours, several, strict=True)
        for ids in up_to_first_difference(single, others)
    ]
    scored = reference([*(ids for ids, _ in ours), *parted], fields)
    differences = [
        abs(a - b)
        for (_, left), right in zip(ours, scored, strict=False)
        for a, (b, _) in zip(left, right, strict=True)
    ]
    mean, most = statistics.fmean(differences), max(differences)
    lag = max((best - own for *_, (own, best) in scored[len(ours) :]), default=0.0)
    dtype = fields["dtype"]
    return {
        "num_positions": len(differences),
        "mean_difference": round(mean, 6),
        "max_difference": round(most, 6),
        "num_answers": len(ours),
        "answers_that_differ": len(parted) // 2,
        "max_lag": round(lag, 6),
        "passed": mean <= MOST_MEAN[dtype] and max(most, lag) <= MOST_SINGLE[dtype],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=tuple(MOST_MEAN), default="bfloat16")
    parser.add_argument("--num-requests", type=int, default=48)
    parser.add_argument("--longest", type=int, default=512, help="of the prompts (the least is 1)")
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={}, help="EngineConfig's, as JSON")
    args = parser.parse_args()
    most = max(args.num_requests - 1, 1)
    lengths = [
        (1 + (args.longest - 1) * index // most, args.output_len)
        for index in range(args.num_requests)
    ]
    requests = make_requests(lengths, SHAPES[args.shape]["vocab_size"], args.seed)
    with tempfile.TemporaryDirectory() as folder:
        fields = {
            "model": str(write_shape(args.shape, Path(folder))),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "dtype": args.dtype,
            "max_model_len": args.longest + args.output_len + 1,
            "seed": args.seed,
            **args.options,
        }
        result = check(requests, fields)
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

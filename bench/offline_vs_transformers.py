"""Offline generation on a CPU: jaxserve's batch against transformers' `generate`, one by one.

    python bench/offline_vs_transformers.py --transformers-python PATH --output FILE

Both run the same token-id requests of the demo model in float32 with the same threads, each in a
process of its own, taking turns; `--transformers-python` may name another interpreter, one with
torch and transformers alone, since jaxserve needs no torch. Each process warms up first. Every
engine is timed `--passes` times; a spread over 15% is flagged.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run_jaxserve(model: str, requests: list[list[int]], output_len: int, threads: int) -> dict:
    import jaxserve

    with jaxserve.LLM(model, dtype="float32") as llm:
        params = jaxserve.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        short = jaxserve.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        # Other prompts than the timed ones, which must not find their prefixes in the cache.
        llm.generate([ids[::-1] for ids in requests], short, use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "token_ids": [o.outputs[0].token_ids for o in outputs]}


def run_transformers(model: str, requests: list[list[int]], output_len: int, threads: int) -> dict:
    import torch
    import transformers

    torch.set_num_threads(threads)
    lm = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(ids: list[int], num_tokens: int) -> list[int]:
        prompt = torch.tensor([ids])
        output = lm.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        return output[0, len(ids) :].tolist()

    with torch.inference_mode():
        generate(requests[0][::-1], 16)
        begin = time.perf_counter()
        token_ids = [generate(ids, output_len) for ids in requests]
        seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "token_ids": token_ids,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


ENGINES = {"jaxserve": run_jaxserve, "transformers": run_transformers}


def in_process(engine: str, python: str, job: dict) -> dict:
    """Run one engine in a process of its own and return what it measured."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        command = [python, __file__, "--worker", engine, "--job", file.name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--transformers-python", default=sys.executable)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=Path("bench/results/offline_vs_transformers_cpu.json")
    )
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(ENGINES[args.worker](**json.loads(args.job.read_text()))))
        return

    # Here, not above: the interpreter that runs transformers need not have jaxserve.
    from jaxserve.bench.environment import describe, write_result
    from jaxserve.model.loader import read_config
    from jaxserve.model.resolve import resolve_model

    folder = resolve_model(args.model)
    vocab_size = read_config(folder).vocab_size
    rng = random.Random(0)
    requests = [
        [rng.randrange(100, vocab_size) for _ in range(args.input_len)]
        for _ in range(args.num_requests)
    ]
    job = {
        "model": str(folder),
        "requests": requests,
        "output_len": args.output_len,
        "threads": args.threads,
    }
    pythons = {"jaxserve": sys.executable, "transformers": args.transformers_python}
    about = describe(args.threads) | {
        "benchmark": "offline_vs_transformers",
        "model": args.model,
        "dtype": "float32",
        "workload": f"{args.num_requests} x {args.input_len}/{args.output_len}",
    }
    runs: dict[str, list[dict]] = {engine: [] for engine in ENGINES}
    for _ in range(args.passes):
        for engine, python in pythons.items():
            done = in_process(engine, python, job)
            assert all(len(ids) == args.output_len for ids in done["token_ids"]), "short outputs"
            runs[engine].append(done)
        # After each pair, since one takes minutes.
        write_result(args.output, about | summarise(runs, args.num_requests * args.output_len))


def summarise(runs: dict[str, list[dict]], num_tokens: int) -> dict:
    """Rates of each engine, the median ratio of the pairs, and how many outputs are the same."""
    from jaxserve.bench.timing import FLAG_OVER, spread_of

    engines = {}
    for engine, passes in runs.items():
        rates = [num_tokens / done["seconds"] for done in passes]
        spread = spread_of(rates)
        engines[engine] = {
            "output_tokens_per_s": [round(rate, 2) for rate in rates],
            "spread": spread,
            "flagged": spread > FLAG_OVER,
        }
    pairs = list(zip(runs["jaxserve"], runs["transformers"], strict=True))
    ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs]
    ours, theirs = pairs[0]
    equal = sum(a == b for a, b in zip(ours["token_ids"], theirs["token_ids"], strict=True))
    return {
        "engines": engines,
        "transformers_versions": theirs["versions"],
        "ratio_median": round(statistics.median(ratios), 2),
        "requests_with_equal_tokens": equal,
    }


if __name__ == "__main__":
    main()

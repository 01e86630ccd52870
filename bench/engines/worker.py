"""One engine in a process of its own: makes it, runs the job's workloads, writes the records.

    PYTHONPATH=. python bench/engines/worker.py JOB.json RECORDS.json

`bench/compare.py` writes the job. Needs the engine's packages, numpy and this repository; of
jaxserve only what needs no JAX, unless jaxserve is the engine.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.bench.offline import OfflineEngine, run_decode, run_workload
from jaxserve.bench.records import make_record
from jaxserve.bench.workloads import load_requests


def make_jaxserve(job: dict[str, Any]) -> OfflineEngine:
    from jaxserve.bench.engine import JaxserveEngine

    return JaxserveEngine(
        model=job["model_folder"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **{name: job[name] for name in ("dtype", "max_model_len", "max_num_seqs", "seed")},
        **job["engine_options"],
    )


def make_vllm(job: dict[str, Any]) -> OfflineEngine:
    from vllm_engine import VllmEngine

    return VllmEngine(job)


def make_transformers_eager(job: dict[str, Any]) -> OfflineEngine:
    from transformers_engine import StaticBatches

    return StaticBatches(job)


def make_transformers_continuous(job: dict[str, Any]) -> OfflineEngine:
    from transformers_engine import ContinuousBatches

    return ContinuousBatches(job)


def make_transformers_compiled(job: dict[str, Any]) -> OfflineEngine:
    from transformers_engine import CompiledBatches

    return CompiledBatches(job)


ENGINES: dict[str, Callable[[dict[str, Any]], OfflineEngine]] = {
    "jaxserve": make_jaxserve,
    "vllm": make_vllm,
    "vllm-v2": make_vllm,
    "transformers-eager": make_transformers_eager,
    "transformers-continuous": make_transformers_continuous,
    "transformers-compiled": make_transformers_compiled,
}


def records(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each workload of the job, as soon as it is measured."""
    engine = ENGINES[job["engine"]](job)
    try:
        for workload in job["workloads"]:
            if workload == "decode":
                result = run_decode(
                    engine,
                    job["batch_sizes"],
                    job["input_len"],
                    job["output_len"],
                    job["vocab_size"],
                    job["seed"],
                    job["warm_up_s"],
                    profile=job["profile"],
                )
            else:
                requests = load_requests(Path(job["requests"][workload]))
                result = run_workload(engine, requests, job["warm_up_s"])
            yield make_record(
                job["session"],
                engine.num_gpus,
                engine=job["engine"],
                engine_version=engine.version,
                model=job["model"],
                dtype=engine.dtype,
                workload=workload,
                max_num_seqs=engine.max_num_seqs,
                ready_s=engine.ready_s,
                settings=engine.settings,
                command=job["command"],
                turn=job["turn"],
                **result,
            )
    finally:
        engine.close()


def main() -> None:
    job_path, records_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    done = []
    for record in records(job):
        done.append(record)
        # After each, so that a worker that dies or is stopped leaves what it has.
        records_path.write_text(json.dumps(done))


if __name__ == "__main__":
    main()

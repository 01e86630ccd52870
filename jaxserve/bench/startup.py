"""From the start of a process until its engine takes requests: with an empty cache and a full one.

Each start is a process of its own: `python -m jaxserve.bench.startup FIELDS`, EngineConfig's fields
as JSON, prints one line when it is ready.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxserve.bench.timing import FLAG_OVER, spread_of

_NUM_STARTS = 2


def measure_startup(fields: dict[str, Any]) -> dict[str, Any]:
    """Start twice with nothing compiled before, each followed by a start that finds the cache.

    `ready_s` is the cold starts' mean, `ready_warm_s` the warm ones'. What the driver and Triton
    keep is as empty or full as the engine's own cache; the model's files may be in the system's
    memory in both. RuntimeError with the child's last line if a start fails.
    """
    starts: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(_NUM_STARTS):
        with tempfile.TemporaryDirectory() as folder:
            for kind in starts:
                starts[kind].append(_start(fields, Path(folder)))
    seconds = {kind: [start["ready_s"] for start in found] for kind, found in starts.items()}
    spread = max(spread_of(passes) for passes in seconds.values())
    return {
        "ready_s": round(sum(seconds["cold"]) / _NUM_STARTS, 2),
        "ready_warm_s": round(sum(seconds["warm"]) / _NUM_STARTS, 2),
        "dtype": starts["cold"][0]["dtype"],
        "max_num_seqs": starts["cold"][0]["max_num_seqs"],
        "starts": starts,
        "spread": spread,
        "flagged": spread > FLAG_OVER,
    }


def _start(fields: dict[str, Any], cache: Path) -> dict[str, Any]:
    fields = fields | {"compilation_cache_dir": str(cache / "compiled")}
    command = [sys.executable, "-m", "jaxserve.bench.startup", json.dumps(fields)]
    # Not the engine's settings: these two belong to the driver and to Triton, which read no flags.
    caches = {"CUDA_CACHE_PATH": str(cache / "cuda"), "TRITON_CACHE_DIR": str(cache / "triton")}
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | caches
        )
        line = process.stdout.readline()
        ready_s = time.perf_counter() - begin
        process.communicate()
        if not line or process.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"the engine did not start: {last}")
    told = json.loads(line)
    # What is left is the interpreter's own start and the end of the engine's.
    phases = {"import": told["import_s"], **told["phases_s"]}
    phases["other"] = round(ready_s - sum(phases.values()), 3)
    return {"ready_s": round(ready_s, 3), "phases_s": phases} | {
        key: told[key] for key in ("dtype", "max_num_seqs")
    }


def _child(fields: dict[str, Any]) -> None:
    begin = time.perf_counter()
    from jaxserve.llm import LLM

    import_s = time.perf_counter() - begin
    with LLM(**fields) as llm:
        told = {
            "import_s": round(import_s, 3),
            "phases_s": llm.engine.startup_s,
            "dtype": str(llm.engine.dtype),
            "max_num_seqs": llm.engine.scheduler_config.max_num_seqs,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))

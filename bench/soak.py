"""Many minutes of clients that stream, leave, send garbage and exceed limits, over a small KV pool.

    python bench/soak.py --minutes 10 --output bench/results/soak.json

Exit code 1 unless: nothing but the documented statuses, every finished greedy text as when it was
alone, the log free of tracebacks, memory flat, and nothing left over at the end. One server on the
loopback, a fixed number of clients, a fixed time.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loopback import Server, memory_bytes, num_open_files
from soak_clients import MAX_MODEL_LEN, MAX_REQUEST_BYTES, Clients

from jaxserve.bench.environment import describe, write_result

BLOCKS = 18
"""Of 16 tokens; 16 running requests want about 80, and one may want 16."""
BLOCK_BYTES = 30 * 3 * 2 * 16 * 64 * 4
"""Layers x kv heads x (K, V) x block_size x head_dim x float32, of the demo model."""
SAMPLE_S = 1.0
IDLE_S = 10
"""How long leftovers may take to be cleared when all clients have gone."""
GROWTH_LIMIT = 0.02


async def run(
    clients: Clients, num_clients: int, seconds: float, pids: dict[str, int]
) -> dict[str, list[int]]:
    """Memory of each process, sampled while the clients are at it."""
    samples: dict[str, list[int]] = {name: [] for name in pids}
    until_s = time.monotonic() + seconds
    task = asyncio.create_task(clients.run(num_clients, until_s))
    while time.monotonic() < until_s and not task.done():
        for name, pid in pids.items():
            samples[name].append(memory_bytes(pid))
        await asyncio.sleep(SAMPLE_S)
    await task
    return samples


def wait_idle(server: Server) -> dict[str, float]:
    deadline = time.monotonic() + IDLE_S
    while any((left := server.open_sequences()).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def count_objects(server: Server, report: Path, pids: dict[str, int]) -> dict[str, int]:
    """Tasks of the event loop and request streams in the HTTP process (see `serve`), and open files
    of both."""
    report.unlink(missing_ok=True)
    server.process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not report.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    counts = json.loads(report.read_text())
    files = {f"{name}_open_files": num_open_files(pid) for name, pid in pids.items()}
    return counts | files


def growth(samples: list[int]) -> dict[str, Any]:
    """First minute against the last, in median bytes, and every minute's median."""
    size = min(len(samples) // 2, round(60 / SAMPLE_S))
    first, last = statistics.median(samples[:size]), statistics.median(samples[-size:])
    minutes = [samples[i : i + size] for i in range(0, len(samples), size)]
    return {
        "first_minute_mib": round(first / 2**20, 1),
        "last_minute_mib": round(last / 2**20, 1),
        "growth": round(last / first - 1, 4),
        "by_minute_mib": [round(statistics.median(minute) / 2**20, 1) for minute in minutes],
    }


def soak(args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "counts.json"
        server = Server(
            __file__, "--serve", str(report), args.model,
            "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16",
            "--max-num-batched-tokens", "64", "--max-num-queued-reqs", "24",
            "--kv-cache-memory-bytes", str((BLOCKS + 1) * BLOCK_BYTES),
            "--max-request-bytes", str(MAX_REQUEST_BYTES), "--served-model-name", "soak",
            JAX_PLATFORMS="cpu",
        )  # fmt: skip
        try:
            clients = Clients(server, args.seed)
            pids = {"server": server.process.pid, "engine": server.engine_pid()}
            asyncio.run(clients.learn())
            asyncio.run(run(clients, args.num_clients, 60 * args.warm_up_minutes, pids))
            wait_idle(server)
            before = count_objects(server, report, pids)
            samples = asyncio.run(run(clients, args.num_clients, 60 * args.minutes, pids))
            left = wait_idle(server)
            after = count_objects(server, report, pids)
            preemptions = server.metric("num_preemptions_total")
            compilations = server.metric("compilations_total", phase="serving")
        finally:
            exit_code = server.end()
    memory = {name: growth(values) for name, values in samples.items()}
    check = clients.check
    check(not any(left.values()), f"left over: {left}")
    for name, number in after.items():
        check(number <= before[name], f"{name}: {before[name]} before, {number} after")
    for name, figures in memory.items():
        check(figures["growth"] < GROWTH_LIMIT, f"memory of the {name}: {figures}")
    check(preemptions > 0, "nothing was preempted")
    check(clients.num_compared > 0, "nothing was compared")
    check(compilations == 0, f"{compilations} compilations while serving")
    check(exit_code == 0, f"exit code {exit_code}")
    bad = [line for line in server.log if "Traceback" in line or "ERROR" in line]
    check(not bad, f"in the log: {bad[:5]}")
    return {
        "model": args.model,
        "minutes": args.minutes,
        "warm_up_minutes": args.warm_up_minutes,
        "num_clients": args.num_clients,
        "requests": dict(clients.kinds.most_common()),
        "statuses": dict(sorted(clients.statuses.items())),
        "greedy_texts_compared": clients.num_compared,
        "num_preemptions": preemptions,
        "memory": memory,
        "left_over": left,
        "objects_before": before,
        "objects_after": after,
        "num_failures": len(clients.failures),
        "failures": clients.failures[:20],
    }


def serve(report: str, flags: list[str]) -> int:
    """`jaxserve serve`, which on SIGUSR1 writes how many tasks and streams it holds."""
    from jaxserve.cli import main as jaxserve
    from jaxserve.engine.streams import RequestStream

    def count(*_: object) -> None:
        gc.collect()
        streams = sum(isinstance(thing, RequestStream) for thing in gc.get_objects())
        counts = {"tasks": len(asyncio.all_tasks()), "streams": streams}
        made = Path(report).with_suffix(".new")
        made.write_text(json.dumps(counts))
        made.rename(report)

    signal.signal(signal.SIGUSR1, count)
    return jaxserve(["serve", *flags])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--warm-up-minutes", type=float, default=1,
        help="before: until every thread and pool that a server grows is there",
    )  # fmt: skip
    parser.add_argument("--num-clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("bench/results/soak.json"))
    args = parser.parse_args()
    result = describe(threads=os.cpu_count() or 1) | {"benchmark": "soak"} | soak(args)
    write_result(args.output, result)
    return int(result["num_failures"] > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.exit(serve(sys.argv[2], sys.argv[3:]))
    sys.exit(main())

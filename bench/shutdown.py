"""How long clients wait when the engine is killed under load, and what SIGTERM does to streams.

    python bench/shutdown.py --output bench/results/shutdown.json

Exit code 1 unless, after kill -9 of the engine's process, /health answers 503 within 2 s and every
client has an error within 5 s; and, after SIGTERM midway, every stream is finished, the exit code 0
and no process left.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from loopback import Server, ask, events, is_gone

from jaxserve.bench.environment import describe, write_result

HEALTH_LIMIT_S, CLIENT_LIMIT_S, PATIENCE_S = 2.0, 5.0, 120.0
FLAGS = (
    "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "64",
    "--kv-cache-memory-bytes", str(100 << 20), "--shutdown-timeout", "100",
)  # fmt: skip


def bodies(num_clients: int, num_tokens: int) -> list[dict]:
    """Half of them streams."""
    return [
        {
            "prompt": f"{i} is a number that",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": i % 2 == 0,
        }
        for i in range(num_clients)
    ]


async def timed(server: Server, body: dict) -> tuple[int, bytes, float]:
    """Status, body and the moment of the end."""
    status, answer = await asyncio.wait_for(
        ask(server.address, "/v1/completions", body), PATIENCE_S
    )
    return status, answer, time.monotonic()


async def all_running(server: Server, num_clients: int) -> None:
    while server.metric("num_requests_running") < num_clients:
        await asyncio.sleep(0.05)


async def kill_engine(server: Server, num_clients: int) -> dict:
    tasks = [asyncio.create_task(timed(server, body)) for body in bodies(num_clients, 400)]
    await all_running(server, num_clients)
    os.kill(server.engine_pid(), signal.SIGKILL)
    killed = time.monotonic()
    while server.get("/health")[0] == 200:
        await asyncio.sleep(0.002)
    health_s = time.monotonic() - killed
    errors = 0
    last = killed
    for status, answer, end in await asyncio.gather(*tasks):
        last = max(last, end)
        errors += status == 503 or b'data: {"error"' in answer
    return {
        "num_clients": num_clients,
        "health_503_s": round(health_s, 3),
        "clients_with_an_error": errors,
        "last_client_error_s": round(last - killed, 3),
    }


async def terminate(server: Server, num_clients: int) -> dict:
    tasks = [asyncio.create_task(timed(server, body)) for body in bodies(num_clients, 60)]
    await all_running(server, num_clients)
    children = server.children()
    server.process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    finished = 0
    for body, (status, answer, _) in zip(
        bodies(num_clients, 60), await asyncio.gather(*tasks), strict=True
    ):
        choices = [e["choices"][0] for e in events(answer)] if body["stream"] else []
        last = choices[-1] if body["stream"] else json.loads(answer)["choices"][0]
        finished += status == 200 and last["finish_reason"] == "length"
    exit_code = await asyncio.to_thread(server.process.wait, 60)
    return {
        "num_clients": num_clients,
        "finished": finished,
        "exit_code": exit_code,
        "seconds": round(time.monotonic() - told, 3),
        "processes_left": sum(not is_gone(pid) for pid in children),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-clients", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("bench/results/shutdown.json"))
    args = parser.parse_args()
    command = ("-m", "jaxserve", "serve", args.model, *FLAGS)
    server = Server(*command, JAX_PLATFORMS="cpu")
    killed = asyncio.run(kill_engine(server, args.num_clients))
    killed["exit_code_after_sigterm"] = server.end()
    server = Server(*command, JAX_PLATFORMS="cpu")
    stopped = asyncio.run(terminate(server, args.num_clients))
    passed = (
        killed["health_503_s"] < HEALTH_LIMIT_S
        and killed["last_client_error_s"] < CLIENT_LIMIT_S
        and killed["clients_with_an_error"] == args.num_clients
        and killed["exit_code_after_sigterm"] == 0
        and stopped["finished"] == args.num_clients
        and stopped["exit_code"] == 0
        and stopped["processes_left"] == 0
    )
    result = describe(threads=os.cpu_count() or 1) | {
        "benchmark": "shutdown",
        "model": args.model,
        "engine_killed": killed,
        "sigterm": stopped,
        "passed": passed,
    }
    write_result(args.output, result)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())

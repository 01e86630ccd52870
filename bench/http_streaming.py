"""Tokens per second through the HTTP server, streamed to many clients at once.

    python bench/http_streaming.py --output bench/results/http_streaming.json

Twice: with an engine that does everything but compute (`tests/server/fake_engine.py`), where HTTP
is all there is to wait for; and with a real one, against the same requests through `LLM.generate`.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from jaxserve import LLM, SamplingParams
from jaxserve.bench.environment import describe, write_result
from jaxserve.model.resolve import resolve_model

ROOT = Path(__file__).parent.parent
PROMPT = "The weather on the other side of the mountains"


class Client(asyncio.Protocol):
    """Sends the request `rounds` times over one connection, and counts the events that come."""

    def __init__(self, request: bytes, rounds: int) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.num_events = 0
        self._request = request
        self._rounds = rounds
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: {")
        ends = b"[DONE]" in self._tail + data
        self._tail = b"" if ends else data[-6:]
        if ends:
            self._rounds -= 1
            if self._rounds:
                self._transport.write(self._request)
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


async def stream(url: str, num_clients: int, num_tokens: int, rounds: int) -> dict[str, float]:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    data = json.dumps(body | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    begin = time.perf_counter()
    clients = [
        (await loop.create_connection(lambda: Client(request, rounds), host, int(port)))[1]
        for _ in range(num_clients)
    ]
    await asyncio.gather(*(client.done for client in clients))
    seconds = time.perf_counter() - begin
    return {
        "tokens_per_s": round(num_clients * num_tokens * rounds / seconds, 1),
        "events_per_s": round(sum(client.num_events for client in clients) / seconds, 1),
    }


def serve(command: list[str]) -> tuple[subprocess.Popen, str]:
    """A server that is ready, and its URL."""
    command = [sys.executable, *command, "--port", "0", "--disable-log-requests"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    url = ""
    for line in process.stderr:
        if match := re.search(r"listening on (\S+)", line):
            url = match[1]
        if " ready: " in line:
            return process, url
    raise RuntimeError("the server did not start")


def measure(command: list[str], num_clients: int, num_tokens: int, rounds: int) -> dict:
    process, url = serve(command)
    try:
        uvloop.run(stream(url, num_clients, num_tokens, 1))
        passes = [uvloop.run(stream(url, num_clients, num_tokens, rounds)) for _ in range(2)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    return spread_of(passes)


def spread_of(passes: list[dict[str, float]]) -> dict:
    rates = [p["tokens_per_s"] for p in passes]
    spread = max(rates) / min(rates) - 1
    return {"passes": passes, "spread": round(spread, 3), "flagged": spread > 0.15}


def measure_library(model: str, num_clients: int, num_tokens: int) -> dict:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(model) as llm:
        passes = []
        for _ in range(3):
            begin = time.perf_counter()
            llm.generate([PROMPT] * num_clients, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            passes.append({"tokens_per_s": round(num_clients * num_tokens / seconds, 1)})
    return spread_of(passes[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-clients", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("bench/results/http_streaming.json"))
    args = parser.parse_args()
    folder = str(resolve_model(args.model))
    fake = [str(ROOT / "tests/server/fake_server.py"), folder]
    real = ["-m", "jaxserve", "serve", args.model]
    result = describe(threads=os.cpu_count() or 1) | {
        "benchmark": "http_streaming",
        "num_clients": args.num_clients,
        "instant_engine": measure(fake, args.num_clients, 400, 4),
        "model": args.model,
        "num_tokens": args.num_tokens,
        "server": measure(real, args.num_clients, args.num_tokens, 1),
        "library": measure_library(args.model, args.num_clients, args.num_tokens),
    }
    write_result(args.output, result)


if __name__ == "__main__":
    main()

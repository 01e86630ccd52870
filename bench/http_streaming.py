"""Tokens per second through the HTTP server, streamed to many clients at once.

    PYTHONPATH=. python bench/http_streaming.py

Twice: with an engine that does everything but compute (`tests/server/fake_engine.py`), where HTTP
is all there is to wait for; and with a real one, in turn with the same requests through
`LLM.generate`. Both engines are there all the while; the one whose turn it is not sleeps.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from loopback import ROOT, Server

from jaxserve import LLM, SamplingParams
from jaxserve.bench.environment import describe, write_result
from jaxserve.bench.timing import FLAG_OVER, spread_of
from jaxserve.model.resolve import resolve_model

WARM_UP_TOKENS = 8
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


@contextmanager
def serving(*command: str) -> Iterator[str]:
    """The URL of a server that is ready."""
    server = Server(*command, "--disable-log-requests")
    try:
        yield server.url
    finally:
        server.end()


def spread(values: Sequence[float]) -> dict[str, Any]:
    most = spread_of(values)
    return {"spread": most, "flagged": most > FLAG_OVER}


def measure_instant(folder: str, num_clients: int) -> dict[str, Any]:
    with serving(str(ROOT / "tests/server/fake_server.py"), folder) as url:
        uvloop.run(stream(url, num_clients, 400, 1))
        passes = [uvloop.run(stream(url, num_clients, 400, 8)) for _ in range(3)]
    return {"passes": passes} | spread([p["tokens_per_s"] for p in passes])


def measure_real(model: str, num_clients: int, num_tokens: int, num_pairs: int) -> dict[str, Any]:
    with serving("-m", "jaxserve", "serve", model) as url, LLM(model) as llm:

        def over_http(num_tokens: int) -> float:
            return uvloop.run(stream(url, num_clients, num_tokens, 1))["tokens_per_s"]

        def in_library(num_tokens: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            begin = time.perf_counter()
            llm.generate([PROMPT] * num_clients, params, use_tqdm=False)
            return round(num_clients * num_tokens / (time.perf_counter() - begin), 1)

        sides = {"server": over_http, "library": in_library}
        pairs = []
        for i in range(num_pairs):
            for measure in sides.values():
                measure(WARM_UP_TOKENS)
            names = list(sides) if i % 2 else list(sides)[::-1]
            pair = {name: sides[name](num_tokens) for name in names}
            pairs.append(pair | {"ratio": round(pair["server"] / pair["library"], 3)})
    ratios = [pair["ratio"] for pair in pairs]
    return {"pairs": pairs, "ratio_median": statistics.median(ratios)} | spread(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-clients", type=int, default=32)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("bench/results/http_streaming.json"))
    args = parser.parse_args()
    folder = str(resolve_model(args.model))
    result = describe(threads=os.cpu_count() or 1) | {
        "benchmark": "http_streaming",
        "model": args.model,
        "num_clients": args.num_clients,
        "num_tokens": args.num_tokens,
        "instant": measure_instant(folder, args.num_clients),
        "real": measure_real(args.model, args.num_clients, args.num_tokens, args.num_pairs),
    }
    write_result(args.output, result)


if __name__ == "__main__":
    main()

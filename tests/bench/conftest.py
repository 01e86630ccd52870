"""A server in this process that answers as a test says, and the command run against it."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from aiohttp import web

MODEL = "fake"
ROOT = Path(__file__).parents[2]


def completion_event(text="w", finish_reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


class SseServer:
    """Streams `max_tokens` events, `gap_s` apart. A test may change `events`, which makes all
    events of a request, and `status`; it reads `bodies` and `headers`."""

    def __init__(self) -> None:
        self.status = 200
        self.gap_s = 0.0
        self.done = True
        self.events: Callable[[dict], list[dict]] = self.completion
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.open = self.most_open = 0

    @staticmethod
    def completion(body: dict) -> list[dict]:
        num_tokens = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
        events = [completion_event() for _ in range(num_tokens - 1)]
        return [*events, completion_event(finish_reason="length"), {"choices": [], "usage": usage}]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            error = {"error": {"message": "the server says no", "type": "x"}}
            return web.json_response(error, status=self.status)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events(body):
            await asyncio.sleep(self.gap_s)
            await response.write(
                b": still here\r\n\r\ndata: %s\r\n\r\n" % json.dumps(event).encode()
            )
        if self.done:
            await response.write(b"data: [DONE]\n\n")
        self.open -= 1
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})

    def run(self, started: threading.Event) -> None:
        asyncio.run(self._run(started))

    async def _run(self, started: threading.Event) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)


@pytest.fixture
def server():
    made, started = SseServer(), threading.Event()
    thread = threading.Thread(target=made.run, args=(started,))
    thread.start()
    assert started.wait(10)
    yield made
    made.stop()
    thread.join()


@pytest.fixture
def bench_serve(cli, server, tmp_path, monkeypatch):
    """`jaxserve bench serve` against the server; returns exit code, the JSON result and stderr."""

    async def ceiling(concurrency):
        return 1000.0 * concurrency

    # It needs a process of its own; one test measures it.
    monkeypatch.setattr("jaxserve.bench.serving.command.measure_ceiling", ceiling)
    # The server is in this process too, and counts as the client's load.
    monkeypatch.setattr("jaxserve.bench.serving.command.BUSY", 2.0)

    def run(*argv: object):
        path = tmp_path / "result.json"
        code, _, err = cli("bench", "serve", "--base-url", server.url, "--disable-tqdm",
                           "--result-file", path, *argv)  # fmt: skip
        return code, json.loads(path.read_text()) if path.exists() else None, err

    return run


@pytest.fixture
def script(monkeypatch):
    """Imports a module of bench/ or tools/, whose folder is on the path while a script runs."""

    def load(folder: str, name: str):
        monkeypatch.syspath_prepend(ROOT / folder)
        return import_module(name)

    before = set(sys.modules)
    yield load
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(
            (str(ROOT / "bench"), str(ROOT / "tools"))
        ):
            del sys.modules[name]

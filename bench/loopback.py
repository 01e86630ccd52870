"""A server in a process of its own, and plain HTTP over the loopback for whoever misbehaves."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
START_S = 300
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Server:
    """Runs until `end`; `command` are the interpreter's arguments, `environment` goes beside this
    process's."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        )
        self.log: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(START_S) or self.process.poll() is not None:
            self.process.kill()
            raise RuntimeError(f"the server did not start:\n{''.join(self.log)}")
        self.url = re.search(r"listening on (http://\S+)", "".join(self.log))[1]
        self.address = ("127.0.0.1", int(self.url.rpartition(":")[2]))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if " ready: " in line:
                self._ready.set()
        self._ready.set()

    def engine_pid(self) -> int:
        """The child that runs the engine, by its command line."""
        for pid in self.children():
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise RuntimeError("there is no engine process")

    def children(self) -> list[int]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The value of the one sample of that name and labels."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        (value,) = (
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"jaxserve:{name}" and labels.items() <= sample.labels.items()
        )
        return value

    def open_sequences(self) -> dict[str, float]:
        """What must be 0 when nobody asks for anything."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        open_requests = json.loads(self.get("/load")[1])["server_load"]
        return {"open_requests": open_requests, **{name: self.metric(name) for name in names}}

    def end(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def memory_bytes(pid: int) -> int:
    """What the process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def num_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Exchange:
    """One request over a connection of its own. `body` is JSON unless it is bytes."""

    def __init__(
        self, address: tuple[str, int], path: str, body: Any = None, method: str = "POST"
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.request = head.encode() + data
        self.sent_s = 0.0
        self._address = address

    async def __aenter__(self) -> "Exchange":
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.transport.abort()

    async def send(self, num_bytes: int | None = None) -> None:
        """All of the request, or its beginning."""
        self._writer.write(self.request[:num_bytes])
        await self._writer.drain()
        self.sent_s = time.monotonic()

    async def read_some(self) -> bytes:
        return await self._reader.read(4096)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body, read to the end."""
        status = int((await self._reader.readline()).split()[1])
        chunked = False
        while (line := await self._reader.readline()) != b"\r\n":
            chunked |= line.lower() == b"transfer-encoding: chunked\r\n"
        body = await self._reader.read()
        return status, _joined(body) if chunked else body


def _joined(chunked: bytes) -> bytes:
    parts = []
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        chunked = rest[length + 2 :] if length else b""
    return b"".join(parts)


async def ask(
    address: tuple[str, int], path: str, body: Any = None, method: str = "POST"
) -> tuple[int, bytes]:
    """Status and body of one request."""
    async with Exchange(address, path, body, method) as exchange:
        await exchange.send()
        return await exchange.answer()


def events(body: bytes) -> list[dict[str, Any]]:
    """Server-sent events without the last, which must be [DONE]."""
    lines = [line for line in body.decode().split("\n\n") if line]
    if not lines or lines.pop() != "data: [DONE]":
        raise ValueError("the stream has no end")
    return [json.loads(line.removeprefix("data: ")) for line in lines]

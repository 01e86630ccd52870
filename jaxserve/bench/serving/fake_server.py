"""A server that answers at once: what the client itself can do is measured against it.

`python -m jaxserve.bench.serving.fake_server` prints its port, and runs until it is killed.
"""

import asyncio
import json
import re

_EVENT = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 0,
    "model": "fake",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(payload: bytes) -> bytes:
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class FakeServer(asyncio.Protocol):
    """Streams `max_tokens` events to whatever is posted, one write each, turn by turn with the
    other connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._received = b""
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if separator and len(body) >= int(length[1]):
            self._received = b""
            self._task = asyncio.ensure_future(self._answer(json.loads(body)["max_tokens"]))

    async def _answer(self, num_tokens: int) -> None:
        event = _chunk(json.dumps(_EVENT).encode())
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}}
        self._transport.write(_HEAD)
        for _ in range(num_tokens):
            await self._may_write.wait()
            self._transport.write(event)
            await asyncio.sleep(0)
        self._transport.write(_chunk(json.dumps(usage).encode()) + _chunk(b"[DONE]") + b"0\r\n\r\n")


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(FakeServer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())

"""Request bodies: bounded in length and in structure, and parsed off the event loop if long."""

import asyncio
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request

from jaxserve.server.protocol.errors import ApiError

MAX_VALUES = 1 << 16
"""Strings (keys too), lists and objects in one body. Parsing and checking them holds the
interpreter's lock, in a thread too: many more would stop the event loop for seconds."""
_PARSE_IN_THREAD_BYTES = 1 << 16


class BoundedRequest(Request):
    """ApiError 413 or 400 where the body is longer or more than the server takes."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = self.app.state.max_request_bytes
            length = self.headers.get("content-length", "0")
            is_short = length.isdecimal() and int(length) <= limit
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                if is_short and size <= limit:
                    chunks.append(chunk)
                elif size > 2 * limit:
                    break
                else:
                    # Thrown away: a client that is still sending would not hear an answer, but be
                    # told that the connection is gone.
                    chunks.clear()
            if not is_short or size > limit:
                raise _too_large(limit)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) < _PARSE_IN_THREAD_BYTES:
                return msgspec.json.decode(body)
            return await asyncio.to_thread(_parse_long, body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error


def _parse_long(body: bytes) -> Any:
    num_values = count_values(body)
    if num_values > MAX_VALUES:
        raise ApiError(
            400,
            f"the body must hold at most {MAX_VALUES} strings, lists and objects, keys included, "
            f"got {num_values}",
        )
    return msgspec.json.decode(body)


def count_values(body: bytes) -> int:
    """How many strings, lists and objects the JSON holds, without parsing it."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    characters = np.frombuffer(unescaped, np.uint8)
    is_quote = characters == ord('"')
    is_outside = np.cumsum(is_quote, dtype=np.uint8) & 1 == 0
    opens = (characters == ord("[")) | (characters == ord("{"))
    return int(np.count_nonzero(is_quote)) // 2 + int(np.count_nonzero(opens & is_outside))


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body must have at most {limit} bytes", headers={"Connection": "close"}
    )

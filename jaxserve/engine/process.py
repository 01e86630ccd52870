"""The engine in a process of its own, for asyncio callers: what becomes of it leaves them alive.

This side needs no JAX. It speaks with `jaxserve/engine/child.py` over a socket pair.
"""

import asyncio
import logging
import multiprocessing
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.engine import child
from jaxserve.engine.messages import (
    Abort,
    Add,
    Deltas,
    EngineInfo,
    Failed,
    FrameReader,
    FromEngine,
    PrefixCacheReset,
    Queued,
    Ready,
    Refused,
    ResetPrefixCache,
    Stats,
    Stop,
    frame,
)
from jaxserve.engine.streams import EngineDeadError, QueueFullError, RequestStream
from jaxserve.sampling_params import SamplingParams

_JOIN_S = 10.0
_REFUSALS = {"invalid": ValueError, "queue_full": QueueFullError, "internal": RuntimeError}

logger = logging.getLogger(__name__)


class EngineStartError(RuntimeError):
    """The engine could not start; the message says why in one line."""


class EngineProcess(asyncio.Protocol):
    """Starts an engine's process and is its only client. Belongs to the event loop of `start`.

    `factory` (which must be picklable) makes the engine, in the new process. If requests are open
    and no step ends for `stall_timeout_s`, the engine counts as failed and is killed.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        max_num_queued_reqs: int | None = None,
        stall_timeout_s: float = 60.0,
    ) -> None:
        self._factory = factory
        self._max_num_queued_reqs = max_num_queued_reqs
        self._stall_timeout_s = stall_timeout_s
        self._reader = FrameReader(FromEngine)
        self._streams: dict[str, RequestStream] = {}
        self._num_unfinished: dict[str, int] = {}
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._process: Any = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._progress_s = 0.0
        self._num_steps = -1
        self.stats: Stats | None = None
        """The newest; None before the engine is ready."""

    async def start(self) -> EngineInfo:
        """Returns when the engine is ready. EngineStartError if it cannot be."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._ended: asyncio.Future[EngineDeadError] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=child.main,
            args=(theirs, self._factory, self._max_num_queued_reqs),
            name="jaxserve-engine",
            daemon=True,
        )
        with theirs:
            self._process.start()
        await self._loop.create_connection(lambda: self, sock=ours)
        return await asyncio.shield(self._ready)

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine serves no more; None while it does."""
        return self._ended.result() if self._ended.done() else None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Requests sent and not finished."""
        return len(self._streams)

    async def wait_ended(self) -> EngineDeadError:
        """Returns why the engine serves no more, once it does not."""
        return await asyncio.shield(self._ended)

    def submit(
        self,
        stream: RequestStream,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
    ) -> None:
        """Send a request, whose outputs come in `stream`. EngineDeadError if the engine is gone."""
        self._check_running()
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        if not self._streams:
            self._begin_watch()
        stream.expect(params.n)
        self._streams[request_id] = stream
        self._num_unfinished[request_id] = params.n
        self._send(Add(request_id, list(prompt_token_ids), params, priority))

    def abort(self, request_id: str) -> None:
        """End a request soon; its stream, if anybody reads it still, says "abort"."""
        if request_id in self._streams and not self._ended.done():
            self._send(Abort(request_id))

    def abort_all(self) -> None:
        for request_id in list(self._streams):
            self.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        self._check_running()
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._resets.append(answer)
        self._send(ResetPrefixCache())
        return await answer

    async def close(self) -> None:
        """End all requests and the process, by force if need be. Closing twice is fine."""
        if self._process is None:
            return
        if self._transport is not None and not self._ended.done():
            self._send(Stop())
        self._end(EngineDeadError("the engine was closed"))
        await asyncio.to_thread(self._process.join, _JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        if self._transport is not None:
            self._transport.close()

    def _check_running(self) -> None:
        if self.error is not None:
            raise self.error

    def _send(self, message: Any) -> None:
        self._transport.write(frame(message))

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if not self._ended.done():
                self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(EngineDeadError("the engine's process has died"))

    def _take(self, message: Any) -> None:
        if not isinstance(message, Stats) or message.stats.num_steps != self._num_steps:
            self._progress_s = time.monotonic()
        match message:
            case Deltas():
                self._take_deltas(message)
            case Stats():
                self._num_steps = message.stats.num_steps
                self.stats = message
            case Queued():
                self._streams[message.request_id].queued()
            case Refused():
                kind = _REFUSALS[message.kind]
                self._streams[message.request_id].fail(kind(message.message))
                self._forget(message.request_id)
            case PrefixCacheReset():
                answer = self._resets.popleft()
                if not answer.done():
                    answer.set_result(message.done)
            case Ready():
                self._ready.set_result(message.info)
            case Failed():
                self._end(EngineDeadError(message.message))

    def _take_deltas(self, message: Deltas) -> None:
        for delta in message.deltas:
            self._streams[delta.request_id].push(delta)
            if delta.finish_reason is not None:
                self._num_unfinished[delta.request_id] -= 1
                if not self._num_unfinished[delta.request_id]:
                    self._forget(delta.request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id], self._num_unfinished[request_id]

    def _end(self, error: EngineDeadError) -> None:
        """The first reason counts."""
        if self._ended.done():
            return
        self._ended.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(str(error)))
            self._ready.exception()  # `start` may have been cancelled
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        self._num_unfinished.clear()
        for answer in self._resets:
            if not answer.done():
                answer.set_exception(error)
        self._resets.clear()

    # A step that does not end.

    def _begin_watch(self) -> None:
        self._progress_s = time.monotonic()
        if self._watch is None:
            self._watch = self._loop.call_later(self._stall_timeout_s, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self._streams:
            return
        left = self._progress_s + self._stall_timeout_s - time.monotonic()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
            return
        logger.error("no step has ended for %g s: killing the engine", self._stall_timeout_s)
        self._end(EngineDeadError(f"no step has ended for {self._stall_timeout_s:g} s"))
        self._process.kill()

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
from jaxserve.engine.client import EngineClient, EngineLostError, EngineStartError, OpenRequest
from jaxserve.engine.messages import (
    EngineInfo,
    Failed,
    FrameReader,
    FromEngine,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    Stats,
    Stop,
    frame,
)
from jaxserve.engine.streams import EngineDeadError

_JOIN_S = 10.0

logger = logging.getLogger(__name__)


class EngineProcess(EngineClient, asyncio.Protocol):
    """Starts an engine's process and is its only client. Belongs to the event loop of `start`.

    `factory` (which must be picklable) makes the engine, in the new process; `gpus` are those that
    it may use, by number among the visible ones (None: all). If requests are open and no step ends
    for `stall_timeout_s`, the engine counts as failed and is killed.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        gpus: Sequence[int] | None = None,
        max_num_queued_reqs: int | None = None,
        stall_timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        self._factory = factory
        self._gpus = gpus
        self._max_num_queued_reqs = max_num_queued_reqs
        self._stall_timeout_s = stall_timeout_s
        self._reader = FrameReader(FromEngine)
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._process: Any = None
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._progress_s = 0.0
        self._num_steps = -1

    async def start(self) -> EngineInfo:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=child.main,
            args=(theirs, self._factory, self._gpus, self._max_num_queued_reqs),
            name="jaxserve-engine",
            daemon=True,
        )
        with theirs:
            self._process.start()
        await self._loop.create_connection(lambda: self, sock=ours)
        return await asyncio.shield(self._ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: OpenRequest) -> None:
        if not self._open:
            self._begin_watch()
        super().submit(request)

    async def reset_prefix_cache(self) -> bool:
        if self.error is not None:
            raise self.error
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._resets.append(answer)
        self._send(ResetPrefixCache())
        return await answer

    async def close(self) -> None:
        if self._process is None:
            return
        if self._transport is not None and self.error is None:
            self._send(Stop())
        self._lose(EngineDeadError("the engine was closed"))
        await asyncio.to_thread(self._process.join, _JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)
        if self._transport is not None:
            self._transport.close()

    def _send(self, message: Any) -> None:
        self._transport.write(frame(message))

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if self.error is None:
                self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(EngineLostError("the engine's process has died"))

    def _take(self, message: Any) -> None:
        if not isinstance(message, Stats) or message.stats.num_steps != self._num_steps:
            self._progress_s = time.monotonic()
        match message:
            case PrefixCacheReset():
                answer = self._resets.popleft()
                if not answer.done():
                    answer.set_result(message.done)
            case Ready():
                self._ready.set_result(message.info)
            case Failed():
                self._lose(EngineDeadError(message.message))
            case _:
                if isinstance(message, Stats):
                    self._num_steps = message.stats.num_steps
                super()._take(message)

    def _lose(self, error: EngineDeadError) -> None:
        super()._lose(error)
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(str(error)))
            self._ready.exception()  # `start` may have been cancelled
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
        if not self._open:
            return
        left = self._progress_s + self._stall_timeout_s - time.monotonic()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
            return
        logger.error("no step has ended for %g s: killing the engine", self._stall_timeout_s)
        self._lose(EngineDeadError(f"no step has ended for {self._stall_timeout_s:g} s"))
        self._process.kill()

"""The engine on a thread of its own, for asyncio callers.

Requests cross to the thread by the loop's queue; deltas cross back by one `call_soon_threadsafe` a
step and event loop.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.request_state import Submission
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.streams import RequestStream
from jaxserve.outputs import OutputDelta


class AsyncEngine:
    """Owns an Engine and the thread that steps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = EngineLoop(engine, self._deliver)
        self._streams: dict[str, RequestStream] = {}
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._loop.is_running

    def submit(self, submission: Submission) -> RequestStream:
        """Queue a prepared request. EngineDeadError if the engine is gone."""
        stream = RequestStream()
        stream.expect(len(submission.states))
        self._loop.add(submission, partial(self._answer, submission.output.request_id, stream))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request soon; nothing happens if it, or the engine, is gone."""
        self._loop.abort(request_id)

    def leave(self, request_id: str, stream: RequestStream) -> None:
        """Abort the request that feeds `stream`, and no other of the same id."""

        def abort() -> None:
            if self._streams.get(request_id) is stream:
                self._deliver(self.engine.abort(request_id))

        if self._loop.is_running:
            self._loop.call(abort, lambda error: None)

    async def stats(self) -> EngineStats:
        """The engine's figures, read between two steps."""
        return await self._call(self.engine.stats)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return await self._call(self.engine.reset_prefix_cache)

    def close(self) -> None:
        """End all requests, stop the thread, free the device memory. Closing twice is fine."""
        self._loop.stop()
        self._thread.join()

    async def _call[T](self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._loop.call(
            lambda: _fulfil(future, function), lambda error: _fulfil(future, _raiser(error))
        )
        return await asyncio.wrap_future(future)

    # On the engine's thread.

    def _run(self) -> None:
        error = self._loop.run()
        for stream in self._streams.values():
            _post(stream.loop, stream.fail, error)
        self._streams.clear()
        self.engine.close()

    def _answer(self, request_id: str, stream: RequestStream, error: Exception | None) -> None:
        if error is None:
            self._streams[request_id] = stream
            _post(stream.loop, stream.queued)
        else:
            _post(stream.loop, stream.fail, error)

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, OutputDelta]]]
        by_loop = defaultdict(list)
        for delta in deltas:
            stream = self._streams[delta.request_id]
            by_loop[stream.loop].append((stream, delta))
        for loop, pairs in by_loop.items():
            if not _post(loop, _push_all, pairs):
                # Nobody is left to read these: their event loop ended without leaving the streams.
                for _, delta in pairs:
                    self.abort(delta.request_id)
        for delta in deltas:
            if delta.finish_reason is not None and not self.engine.is_open(delta.request_id):
                self._streams.pop(delta.request_id, None)


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> bool:
    """Call `function` on the loop's thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _push_all(pairs: list[tuple[RequestStream, OutputDelta]]) -> None:
    for stream, delta in pairs:
        stream.push(delta)


def _fulfil[T](future: Future[T], function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


def _raiser(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail

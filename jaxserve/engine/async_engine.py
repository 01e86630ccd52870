"""The engine on a thread of its own, for asyncio callers.

Requests cross to the thread by a queue; deltas cross back by one `call_soon_threadsafe` a step and
event loop. A request's stream holds one RequestOutput that grows, so a slow reader costs no memory.
"""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxserve.engine.engine import Engine, EngineStats
from jaxserve.engine.request_state import Submission
from jaxserve.outputs import OutputDelta, RequestOutput


class EngineDeadError(RuntimeError):
    """The engine thread has failed or was closed; its requests cannot go on."""


class RequestStream:
    """One request's output as it grows. Belongs to the event loop that made it."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self.loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.error: Exception | None = None

    def apply(self, delta: OutputDelta) -> None:
        self.output.apply(delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yields the same, grown RequestOutput after each change, until it is finished.

        Raises what ended the stream early: ValueError if the request was refused, or
        EngineDeadError.
        """
        while not self.output.finished:
            await self._changed.wait()
            self._changed.clear()
            if self.error is not None:
                raise self.error
            yield self.output


class _Command(NamedTuple):
    run: Callable[[], None]
    """On the engine's thread, between two steps."""
    fail: Callable[[Exception], object]
    """Instead, if the engine is gone by then."""


class AsyncEngine:
    """Owns an Engine and the thread that steps it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._ended: EngineDeadError | None = None
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._ended is None

    def submit(self, submission: Submission) -> RequestStream:
        """Queue a prepared request. EngineDeadError if the engine is gone."""
        stream = RequestStream(submission.output)
        self._send(
            _Command(
                lambda: self._add(submission, stream),
                lambda error: _post(stream.loop, stream.fail, error),
            )
        )
        return stream

    def abort(self, request_id: str) -> None:
        """End a request soon; nothing happens if it, or the engine, is gone."""
        if self._ended is None:
            self._commands.put(
                _Command(lambda: self._deliver(self.engine.abort(request_id)), lambda error: None)
            )

    async def stats(self) -> EngineStats:
        """The engine's figures, read between two steps."""
        return await self._call(self.engine.stats)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""
        return await self._call(self.engine.reset_prefix_cache)

    def close(self) -> None:
        """End all requests, stop the thread, free the device memory. Closing twice is fine."""
        self._commands.put(None)
        self._thread.join()

    def _send(self, command: _Command) -> None:
        with self._ending:
            if self._ended is not None:
                raise self._ended
            self._commands.put(command)

    async def _call[T](self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._send(
            _Command(
                lambda: _fulfil(future, function), lambda error: _fulfil(future, _raiser(error))
            )
        )
        return await asyncio.wrap_future(future)

    # On the engine's thread.

    def _run(self) -> None:
        error = EngineDeadError("the engine was closed")
        try:
            while self._obey():
                self._deliver(self.engine.step())
        except Exception as failure:
            error = EngineDeadError(f"the engine failed: {failure}")
            error.__cause__ = failure
        with self._ending:
            self._ended = error
        for stream in self._streams.values():
            _post(stream.loop, stream.fail, error)
        self._streams.clear()
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.fail(error)
        self.engine.close()

    def _obey(self) -> bool:
        """Do what was asked; waits while there is nothing to step. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()

    def _add(self, submission: Submission, stream: RequestStream) -> None:
        try:
            self.engine.add(submission)
        except ValueError as error:
            _post(stream.loop, stream.fail, error)
        else:
            self._streams[submission.output.request_id] = stream

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, OutputDelta]]]
        by_loop = defaultdict(list)
        for delta in deltas:
            stream = self._streams[delta.request_id]
            by_loop[stream.loop].append((stream, delta))
        for loop, pairs in by_loop.items():
            if not _post(loop, _apply_all, pairs):
                # Nobody is left to read these: their event loop ended without leaving the streams.
                for stream, _ in pairs:
                    self.abort(stream.output.request_id)
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


def _apply_all(pairs: list[tuple[RequestStream, OutputDelta]]) -> None:
    for stream, delta in pairs:
        stream.apply(delta)


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

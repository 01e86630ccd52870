"""How outputs reach an event loop, be the engine in a thread or in another process."""

import asyncio
from collections.abc import AsyncIterator

from jaxserve.outputs import OutputDelta


class EngineDeadError(RuntimeError):
    """The engine has failed or was closed; its requests cannot go on."""


class QueueFullError(RuntimeError):
    """As many requests wait as are allowed to; try again later."""


class RequestStream:
    """What the engine adds to one request's outputs, or to several's, as it comes.

    Belongs to the event loop that made it. Deltas that nobody has read yet are kept, so a slow
    reader gets more at a time.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.error: Exception | None = None
        """What ended the stream early."""
        self.ranks: dict[str, int] = {}
        """Which of several engines has each request."""
        self._deltas: list[OutputDelta] = []
        self._changed = asyncio.Event()
        self._num_unqueued = 0
        self._num_open = 0

    @property
    def finished(self) -> bool:
        """True once the last delta of every sequence is here, read or not."""
        return self._num_open == 0

    async def wait_queued(self) -> None:
        """Return when the engine has taken all the requests; raises as reading the stream does."""
        while self._num_unqueued and self.error is None:
            await self._changed.wait()
            self._changed.clear()
        if self._deltas:
            self._changed.set()
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        """Yields what has come since the last time, until all sequences are finished.

        Then raises what ended the stream early: ValueError or QueueFullError if a request was
        refused, ValueError if one of its sequences ended with "error", or EngineDeadError.
        """
        while not self.finished or self._deltas:
            await self._changed.wait()
            self._changed.clear()
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                yield deltas
            if self.error is not None and not self._deltas:
                raise self.error

    # For the engine's side of the event loop.

    def expect(self, num_sequences: int) -> None:
        """One more request of this stream is on its way to the engine."""
        self._num_unqueued += 1
        self._num_open += num_sequences

    def queued(self) -> None:
        """The engine has taken one of the requests."""
        self._num_unqueued -= 1
        if not self._num_unqueued:
            self._changed.set()

    def push(self, delta: OutputDelta) -> None:
        if delta.finish_reason == "error":
            self.fail(ValueError(delta.stop_reason))
            return
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
        self._changed.set()

    def fail(self, error: Exception) -> None:
        if self.error is None and not self.finished:
            self.error = error
            self._changed.set()

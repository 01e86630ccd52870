"""The loop that steps an engine, and between two steps does what other threads ask of it."""

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.engine.streams import EngineDeadError, QueueFullError
from jaxserve.outputs import OutputDelta

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.engine.request_state import Submission


class _Command(NamedTuple):
    run: Callable[[], object]
    """On the loop's thread, between two steps."""
    fail: Callable[[EngineDeadError], object]
    """Instead, if the engine is gone by then."""


class EngineLoop:
    """Whoever calls `run` lends its thread; everything else may be called from any thread.

    `deliver` gets what each step and each abort has produced, on the loop's thread.
    `max_num_queued_reqs` bounds the requests that wait, beside those that free slots will take.
    """

    def __init__(
        self,
        engine: "Engine",
        deliver: Callable[[list[OutputDelta]], None],
        max_num_queued_reqs: int | None = None,
    ) -> None:
        self.engine = engine
        self._deliver = deliver
        self._max_num_queued_reqs = max_num_queued_reqs
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._ended: EngineDeadError | None = None
        self._ending = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._ended is None

    def add(self, submission: "Submission", answer: Callable[[Exception | None], object]) -> None:
        """Queue a prepared request. `answer`, on the loop's thread, gets None once it is queued,
        or why it is not: ValueError, QueueFullError or EngineDeadError.

        EngineDeadError, at once, if the loop has ended.
        """
        self.call(lambda: self._add(submission, answer), answer)

    def abort(self, request_id: str) -> None:
        """End a request soon; nothing happens if it, or the loop, has ended."""
        if self._ended is None:
            self._commands.put(
                _Command(lambda: self._deliver(self.engine.abort(request_id)), lambda error: None)
            )

    def call(self, run: Callable[[], object], fail: Callable[[EngineDeadError], object]) -> None:
        """Call `run` on the loop's thread, or `fail` if the loop ends before that.

        EngineDeadError, at once, if it has ended already.
        """
        with self._ending:
            if self._ended is not None:
                raise self._ended
            self._commands.put(_Command(run, fail))

    def stop(self) -> None:
        """Make `run` return after the current step."""
        self._commands.put(None)

    def run(self) -> EngineDeadError:
        """Step until `stop`, or until the engine fails; returns why requests cannot go on."""
        error = EngineDeadError("the engine was closed")
        try:
            while self._obey():
                self._deliver(self.engine.step())
        except Exception as failure:
            error = EngineDeadError(f"the engine failed: {failure}")
            error.__cause__ = failure
        with self._ending:
            self._ended = error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.fail(error)
        return error

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

    def _add(self, submission: "Submission", answer: Callable[[Exception | None], object]) -> None:
        try:
            self._check_room()
            self.engine.add(submission)
        except (ValueError, QueueFullError) as error:
            answer(error)
        else:
            answer(None)

    def _check_room(self) -> None:
        limit = self._max_num_queued_reqs
        if limit is None:
            return
        num_free = self.engine.scheduler_config.max_num_seqs - self.engine.num_running
        if self.engine.num_waiting - num_free >= limit:
            raise QueueFullError(
                f"{self.engine.num_running} requests run and {self.engine.num_waiting} wait, "
                f"which is all that max_num_queued_reqs={limit} allows"
            )

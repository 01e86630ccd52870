"""An engine elsewhere, as the server sees it: its open requests, its load, and if it serves."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.messages import Abort, Add, Deltas, EngineInfo, Queued, Refused, Stats
from jaxserve.engine.streams import EngineDeadError, QueueFullError, RequestStream

SEQUENCE_LOAD = 256
"""What a sequence weighs until it ends, in tokens of prompts that are still to be computed."""

_REFUSALS = {"invalid": ValueError, "queue_full": QueueFullError, "internal": RuntimeError}


class EngineStartError(RuntimeError):
    """The engine could not start; the message says why in one line."""


class EngineLostError(EngineDeadError):
    """The engine's process has died, and not by a fault in one of its steps."""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not finished."""

    add: Add
    stream: RequestStream
    num_unfinished: int
    """Its sequences that have not finished."""
    num_new_tokens: int
    """Tokens of the prompt that the engine has to compute; 0 once it has."""
    is_queued: bool = False
    may_move: bool = True
    """False once something has come of it, nobody waits for it, or it has moved already."""

    @property
    def load(self) -> int:
        return self.num_new_tokens + SEQUENCE_LOAD * self.num_unfinished


class EngineClient(ABC):
    """Belongs to one event loop. Subclasses know where the engine is and how to speak with it."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self.error: EngineDeadError | None = None
        """Why the engine does not serve; None while it does."""
        self.stats: Stats | None = None
        """The newest; None before the engine is ready."""
        self.load = 0
        """Of all open requests, in tokens."""
        self.on_lost: Callable[[EngineDeadError, list[OpenRequest]], None] = _fail
        """Called when the engine is lost, with why, and the requests that were open."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Returns when the engine is ready. EngineStartError if it cannot be."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks."""

    @abstractmethod
    async def close(self) -> None:
        """End all requests and what runs the engine. Closing twice is fine."""

    @abstractmethod
    def _send(self, message: Add | Abort) -> None:
        """On its way to the engine, whose answers `_take` gets."""

    @property
    def num_open(self) -> int:
        """Requests sent and not finished."""
        return len(self._open)

    def submit(self, request: OpenRequest) -> None:
        """Send a request, whose outputs come in its stream. EngineDeadError if the engine is
        gone."""
        if self.error is not None:
            raise self.error
        request_id = request.add.request_id
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is in use")
        self._open[request_id] = request
        self.load += request.load
        self._send(request.add)

    def abort(self, request_id: str) -> None:
        """End a request soon, if it is here; its stream, if anybody reads it still, says
        "abort"."""
        if (request := self._open.get(request_id)) is not None:
            request.may_move = False
            self._send(Abort(request_id))

    def abort_all(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)

    def _take(self, message: Any) -> None:
        match message:
            case Deltas():
                self._take_deltas(message)
            case Stats():
                self.stats = message
            case Queued():
                request = self._open[message.request_id]
                if not request.is_queued:
                    request.is_queued = True
                    request.stream.queued()
            case Refused():
                error = _REFUSALS[message.kind](message.message)
                self._forget(message.request_id).stream.fail(error)

    def _take_deltas(self, message: Deltas) -> None:
        for delta in message.deltas:
            request = self._open[delta.request_id]
            request.stream.push(delta)
            if request.num_new_tokens:
                self.load -= request.num_new_tokens
                request.num_new_tokens = 0
                request.may_move = False
            if delta.finish_reason is not None:
                self.load -= SEQUENCE_LOAD
                request.num_unfinished -= 1
                if not request.num_unfinished:
                    self._forget(delta.request_id)

    def _forget(self, request_id: str) -> OpenRequest:
        request = self._open.pop(request_id)
        self.load -= request.load
        return request

    def _lose(self, error: EngineDeadError) -> None:
        """The engine serves no more; the first reason counts."""
        if self.error is not None:
            return
        self.error = error
        requests = list(self._open.values())
        self._open.clear()
        self.load = 0
        self.on_lost(error, requests)


def _fail(error: EngineDeadError, requests: list[OpenRequest]) -> None:
    for request in requests:
        request.stream.fail(error)

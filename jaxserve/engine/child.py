"""The engine's process: the engine loop, a thread that hears what the server's process says, and
one that prepares requests whose grammars must be compiled, which may take its time.

It ends when told to, when its engine fails, and when the other end of its socket is gone, however
the server's process has ended.
"""

import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.messages import (
    Abort,
    Add,
    Deltas,
    EngineInfo,
    Failed,
    FrameReader,
    PrefixCacheReset,
    Queued,
    Ready,
    Refused,
    ResetPrefixCache,
    Stats,
    Stop,
    ToEngine,
    frame,
)
from jaxserve.engine.streams import EngineDeadError, QueueFullError
from jaxserve.outputs import OutputDelta

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine.engine import Engine

STATS_INTERVAL_S = 0.25
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that reads requests may keep the interpreter from the loop, whose every wait
for the device ends with taking it back. Python's own 5 ms are several steps of a small model."""
MAX_NUM_PREPARING = 1024
"""Requests whose grammars wait to be compiled; more are refused as the queue's are."""
_RECEIVE_BYTES = 1 << 16
_END_S = 5.0
"""How long the loop may take to end its step when the server's process is gone."""

logger = logging.getLogger(__name__)


def make_engine(config: "EngineConfig") -> "Engine":
    """What the process runs. Imports JAX, which the server's process does without."""
    from jaxserve.engine.engine import Engine

    return Engine(config)


def main(
    connection: socket.socket,
    factory: Callable[[], "Engine"],
    gpus: Sequence[int] | None,
    max_num_queued_reqs: int | None,
) -> None:
    """Run the engine that `factory` makes for whoever is at the other end of `connection`, on the
    given GPUs (None: whatever JAX sees)."""
    # Ctrl-C in a terminal reaches this process too, but the server says when it is time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if gpus is not None:
        _see_only(gpus)
    _Child(connection, max_num_queued_reqs).run(factory)


def _see_only(gpus: Sequence[int]) -> None:
    """Hide the other GPUs from this process, which has not imported JAX yet.

    JAX reserves memory on every GPU that it sees, and its own setting for this
    (jax_cuda_visible_devices) fails to compile for any but the first.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(i) for i in gpus] if visible is None else visible.split(",")[gpus[0] : gpus[-1] + 1]
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


class _Child:
    def __init__(self, connection: socket.socket, max_num_queued_reqs: int | None) -> None:
        self._connection = connection
        self._max_num_queued_reqs = max_num_queued_reqs
        self._sending = threading.Lock()
        self._loop: EngineLoop | None = None
        self._preparing: dict[str, bool] = {}
        """By id: whether it was aborted meanwhile."""
        self._preparing_lock = threading.Lock()
        self._preparer = ThreadPoolExecutor(1, "jaxserve-preparer")
        self._stats_sent_s = 0.0
        self._compilations = {"startup": 0, "serving": 0}

    def run(self, factory: Callable[[], "Engine"]) -> None:
        reader = threading.Thread(target=self._read, name="jaxserve-reader", daemon=True)
        reader.start()
        try:
            self._count_compilations()
            engine = factory()
        except Exception as error:
            message = " ".join(str(error).split())
            if not isinstance(error, ValueError | OSError):
                logger.exception("the engine could not start")
                message = f"{type(error).__name__}: {message}"
            self._send(Failed(message))
            return
        self._loop = EngineLoop(engine, self._deliver, self._max_num_queued_reqs)
        self._send(Stats(engine.stats(), self._compilations))
        self._send(Ready(_info(engine)))
        error = self._loop.run()
        if error.__cause__ is not None:
            logger.error("the engine failed", exc_info=error.__cause__)
        self._send(Failed(str(error)))
        self._preparer.shutdown(wait=False, cancel_futures=True)
        engine.close()

    def _count_compilations(self) -> None:
        import jax

        def count(event: str, seconds: float, **kwargs: object) -> None:
            if event == "/jax/core/compile/backend_compile_duration":
                self._compilations["startup" if self._loop is None else "serving"] += 1

        jax.monitoring.register_event_duration_secs_listener(count)

    def _send(self, message: object) -> None:
        with self._sending:
            try:
                self._connection.sendall(frame(message))
            except OSError:
                # Nobody is left to hear it; the reading thread ends this process.
                logger.debug("the server's process is gone")

    # On the loop's thread.

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        if deltas:
            self._send(Deltas(deltas))
        engine = self._loop.engine
        now = time.monotonic()
        if now - self._stats_sent_s >= STATS_INTERVAL_S or not engine.has_unfinished:
            self._stats_sent_s = now
            self._send(Stats(engine.stats(), self._compilations))

    def _answer(self, request_id: str, error: Exception | None) -> None:
        """Tell what became of an Add; if the engine is gone, Failed tells it of all requests."""
        if error is None:
            self._send(Queued(request_id))
        elif isinstance(error, QueueFullError):
            self._send(Refused(request_id, str(error), "queue_full"))
        elif isinstance(error, ValueError):
            self._send(Refused(request_id, str(error), "invalid"))
        elif not isinstance(error, EngineDeadError):
            logger.error("a request could not be prepared", exc_info=error)
            self._send(Refused(request_id, f"{type(error).__name__}: {error}", "internal"))

    def _reset_prefix_cache(self) -> None:
        self._send(PrefixCacheReset(self._loop.engine.reset_prefix_cache()))

    # On the reading thread.

    def _read(self) -> None:
        reader = FrameReader(ToEngine)
        try:
            while data := self._connection.recv(_RECEIVE_BYTES):
                for message in reader.feed(data):
                    self._obey(message)
        except Exception:
            logger.exception("the engine's process cannot read what it is asked")
        self._end()

    def _obey(self, message: ToEngine) -> None:
        loop = self._loop
        match message:
            case Add() if loop.engine.must_compile(message.params):
                self._add_later(loop, message)
            case Add():
                self._add(loop, message)
            case Abort():
                self._abort(loop, message.request_id)
            case ResetPrefixCache():
                loop.call(self._reset_prefix_cache, lambda error: None)
            case Stop():
                self._end()

    def _add_later(self, loop: EngineLoop, message: Add) -> None:
        with self._preparing_lock:
            num_preparing = len(self._preparing)
            if num_preparing < MAX_NUM_PREPARING:
                self._preparing[message.request_id] = False
        if num_preparing < MAX_NUM_PREPARING:
            self._preparer.submit(self._add_prepared, loop, message)
        else:
            text = f"{num_preparing} requests wait for their grammars to be compiled"
            self._answer(message.request_id, QueueFullError(text))

    def _abort(self, loop: EngineLoop, request_id: str) -> None:
        with self._preparing_lock:
            if request_id in self._preparing:
                self._preparing[request_id] = True
                return
        loop.abort(request_id)

    # On the preparing thread.

    def _add_prepared(self, loop: EngineLoop, message: Add) -> None:
        with self._preparing_lock:
            aborted = self._preparing[message.request_id]
        if aborted:
            self._answer(message.request_id, ValueError("the request was aborted"))
        else:
            self._add(loop, message)
        with self._preparing_lock:
            aborted_meanwhile = self._preparing.pop(message.request_id) and not aborted
        if aborted_meanwhile:
            loop.abort(message.request_id)

    # On the reading or the preparing thread.

    def _add(self, loop: EngineLoop, message: Add) -> None:
        answer = functools.partial(self._answer, message.request_id)
        try:
            submission = loop.engine.prepare(
                message.prompt_token_ids, message.params, message.request_id, message.priority
            )
            loop.add(submission, answer)
        except Exception as error:  # one request's trouble is not the others'
            answer(error)

    # On the reading thread.

    def _end(self) -> None:
        """Let the loop end, and the process in any case."""
        if self._loop is not None:
            self._loop.stop()
            time.sleep(_END_S)
        os._exit(1)


def _info(engine: "Engine") -> EngineInfo:
    return EngineInfo(
        platform=engine.platform,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler_config.max_num_seqs,
        max_logprobs=engine.config.max_logprobs,
        vocab_size=engine.model_config.vocab_size,
        num_blocks=engine.scheduler_config.num_blocks,
        block_size=engine.scheduler_config.block_size,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        enable_prefix_caching=engine.scheduler_config.enable_prefix_caching,
        scheduling_policy=engine.scheduler_config.policy,
        startup_s=engine.startup_s,
    )

"""A server's life: listen, load, serve, drain, end."""

import asyncio
import functools
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from jaxserve.config import EngineConfig
from jaxserve.engine.child import make_engine
from jaxserve.engine.group import EngineGroup
from jaxserve.engine.process import EngineProcess
from jaxserve.model.resolve import resolve_model
from jaxserve.server.app import Status, make_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.extras import import_extra, make_tracer
from jaxserve.server.heads import BoundedHeads
from jaxserve.server.logs import set_up_logging
from jaxserve.server.service import start_service

_ABORT_S = 5
"""How long aborted requests may take to tell their clients."""
_KEEP_ALIVE_S = 30

logger = logging.getLogger("jaxserve")


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    engine_factory: Callable[[EngineConfig], Any] = make_engine,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0, or 1 if the engine has failed and
    the server should end with it.

    ValueError, OSError or RuntimeError, in one line, if it cannot start.
    """
    api_keys = _api_keys(config)
    template = None if config.chat_template is None else Path(config.chat_template).read_text()
    set_up_logging(config.log_format)
    if config.ray:
        on_ray = import_extra("jaxserve.server.ray_serve", "--ray", "ray")
        return on_ray.serve(engine_config, config, engine_factory, api_keys, template)
    with _listen(config.host, config.port) as listener:
        server = _Server(engine_config, config, engine_factory, api_keys, template)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(server.run(listener))


class _Server:
    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        engine_factory: Callable[[EngineConfig], Any],
        api_keys: list[str],
        chat_template: str | None,
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._engine_factory = engine_factory
        self._chat_template = chat_template
        self._tracer = make_tracer(config.otlp_endpoint)
        self._status = Status()
        self._engine: EngineGroup | None = None
        self._stop = asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._http = _HttpServer(
            uvicorn.Config(
                make_app(config, api_keys, self._status),
                http=BoundedHeads,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + _ABORT_S,
            )
        )

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear, number)
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        http = asyncio.create_task(self._http.serve(sockets=[listener]))
        life = asyncio.create_task(self._live())
        try:
            await asyncio.wait((http, life), return_when=asyncio.FIRST_COMPLETED)
            self._http.should_exit = True
            await http
            return await life
        finally:
            life.cancel()
            if self._engine is not None:
                await self._engine.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    def _hear(self, number: int) -> None:
        if self._stop.is_set():
            self._stop_at_once.set()
        else:
            logger.info("%s: shutting down", signal.Signals(number).name)
        self._stop.set()

    async def _live(self) -> int:
        """From the start to the moment when nothing runs any more; returns the exit code."""
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._start())
        await asyncio.wait((stop, start), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            return 0
        await start
        failed = asyncio.create_task(self._engine.wait_failure())
        ends = (stop, failed) if self._config.exit_on_engine_failure else (stop,)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        has_failed = not stop.done()
        await self._drain()
        return 1 if has_failed else 0

    async def _start(self) -> None:
        begin = time.monotonic()
        logger.info("loading %s", self._engine_config.model)
        folder = await _in_daemon_thread(resolve_model, self._engine_config.model)
        config = replace(self._engine_config, model=str(folder))
        factory = functools.partial(self._engine_factory, config)
        self._engine = EngineGroup(
            [self._engine_process(factory, rank) for rank in range(self._config.data_parallel_size)]
        )
        names = self._config.served_model_name or (self._engine_config.model,)
        self._status.service = service = await start_service(
            self._engine, folder, names, self._chat_template, self._config, self._tracer
        )
        logger.info(service.ready_line(time.monotonic() - begin))

    def _engine_process(self, factory: Callable[[], Any], rank: int) -> EngineProcess:
        size = self._engine_config.tensor_parallel_size
        gpus = range(rank * size, (rank + 1) * size)
        return EngineProcess(
            factory,
            gpus=gpus if self._config.data_parallel_size > 1 else None,
            max_num_queued_reqs=self._config.max_num_queued_reqs,
            stall_timeout_s=self._config.engine_stall_timeout,
        )

    async def _drain(self) -> None:
        """Let open requests finish, up to the time allowed; then end them."""
        self._status.is_draining = True
        self._http.should_exit = True
        engine = self._engine
        deadline = time.monotonic() + self._config.shutdown_timeout
        while engine.num_open and not self._stop_at_once.is_set():
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.05)
        if engine.num_open:
            logger.warning("ending %d open requests", engine.num_open)
            engine.abort_all()


class _HttpServer(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again when it is done."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


async def _in_daemon_thread[T](function: Callable[..., T], *args: Any) -> T:
    """As asyncio.to_thread, but the process does not wait for the end of a call that was left: a
    download may take for ever."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


def _api_keys(config: ServerConfig) -> list[str]:
    keys = list(config.api_key)
    if config.api_key_file is not None:
        lines = Path(config.api_key_file).read_text().split()
        if not lines:
            raise ValueError(f"api_key_file {config.api_key_file} must hold a key, and is empty")
        keys += lines
    return keys

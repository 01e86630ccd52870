"""Engines on the machines of a Ray cluster: `jaxserve serve --ray`.

Each engine is a Ray Serve deployment of one replica, which runs the same engine process as a server
on one machine does. The HTTP routes are another deployment, which holds one client for each engine.
Ray Serve places them, listens on every machine, and starts again what has died.
"""

import asyncio
import contextvars
import functools
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, NoReturn

import ray
from fastapi import FastAPI
from ray import serve as ray_serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineClient, EngineLostError, EngineStartError, OpenRequest
from jaxserve.engine.group import EngineGroup
from jaxserve.engine.messages import Abort, Add, Deltas, EngineInfo, Queued, Refused, Stats
from jaxserve.engine.process import EngineProcess
from jaxserve.engine.streams import EngineDeadError, QueueFullError, RequestStream
from jaxserve.model.resolve import resolve_model
from jaxserve.server.app import Status, make_app
from jaxserve.server.config import ServerConfig
from jaxserve.server.extras import make_tracer
from jaxserve.server.logs import set_up_logging
from jaxserve.server.service import start_service

APP_NAME = "jaxserve"
_MAX_ONGOING_REQUESTS = 1_000_000
"""Of a deployment: what has to wait does so in the engines' queues."""
_STATS_INTERVAL_S = 0.5
_STATS_TIMEOUT_S = 5.0
_HEALTH_CHECK_INTERVAL_S = 1.0
_TELL_S = 5.0
"""How long requests that were ended may take to tell their clients."""

logger = logging.getLogger("jaxserve")


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    engine_factory: Callable[[EngineConfig], Any],
    api_keys: list[str],
    chat_template: str | None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. EngineStartError if it cannot start.

    Joins the Ray cluster that Ray finds (by RAY_ADDRESS, or on this machine), or starts one here.
    """
    _on_signals(_interrupt)
    try:
        ray.init(logging_level=logging.WARNING)
        # Ray has put its own there, which abort the process 3 s after a signal.
        _on_signals(_interrupt)
        ray_serve.start(http_options={"host": config.host, "port": config.port})
        _run(_application(engine_config, config, engine_factory, api_keys, chat_template))
        logger.info("listening on http://%s:%d", config.host, config.port)
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _on_signals(signal.SIG_IGN)
        logger.info("shutting down")
        _end()


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _application(
    engine_config: EngineConfig,
    config: ServerConfig,
    engine_factory: Callable[[EngineConfig], Any],
    api_keys: list[str],
    chat_template: str | None,
) -> ray_serve.Application:
    on_gpus = ray.cluster_resources().get("GPU", 0) > 0
    engine = ray_serve.deployment(EngineReplica).options(
        ray_actor_options={"num_gpus": engine_config.tensor_parallel_size if on_gpus else 0},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=1,
        health_check_period_s=_HEALTH_CHECK_INTERVAL_S,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
    )
    engines = [
        engine.options(name=f"engine-{rank}").bind(engine_config, config, engine_factory)
        for rank in range(config.data_parallel_size)
    ]
    routes = ray_serve.deployment(ray_serve.ingress()(Routes)).options(
        name="routes",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        max_constructor_retry_count=1,
        # Longer than the engines', so that it can tell clients what became of their requests.
        graceful_shutdown_timeout_s=config.shutdown_timeout + _TELL_S,
    )
    return routes.bind(engine_config, config, api_keys, chat_template, engines)


def _run(application: ray_serve.Application) -> None:
    try:
        handle = ray_serve.run(application, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        deployments = ray_serve.status().applications[APP_NAME].deployments
        logger.error("%s", "\n".join(d.message for d in deployments.values() if d.message))
        raise EngineStartError("Ray Serve could not start the engines; see above") from error
    logger.info(handle.ready_line.remote().result())


def _end() -> None:
    """Drain and end the application, and Ray Serve if it runs no other."""
    if ray.is_initialized():
        ray_serve.delete(APP_NAME)
        if not ray_serve.status().applications:
            ray_serve.shutdown()
        ray.shutdown()


class EngineReplica:
    """An engine process on a machine of the cluster."""

    async def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        engine_factory: Callable[[EngineConfig], Any],
    ) -> None:
        set_up_logging(config.log_format)
        folder = await asyncio.to_thread(resolve_model, engine_config.model)
        self._engine = EngineProcess(
            functools.partial(engine_factory, replace(engine_config, model=str(folder))),
            max_num_queued_reqs=config.max_num_queued_reqs,
            stall_timeout_s=config.engine_stall_timeout,
        )
        self._info = await self._engine.start()

    def check_health(self) -> None:
        """Ray Serve replaces the replica if this raises."""
        if self._engine.error is not None:
            raise self._engine.error

    async def info(self) -> EngineInfo:
        return self._info

    async def stats(self) -> Stats:
        self.check_health()
        return self._engine.stats

    async def reset_prefix_cache(self) -> bool:
        return await self._engine.reset_prefix_cache()

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def abort_all(self) -> None:
        self._engine.abort_all()

    async def generate(
        self, add: Add
    ) -> AsyncIterator[Queued | Refused | Deltas | EngineDeadError]:
        """What becomes of a request; an EngineDeadError comes last."""
        stream = RequestStream()
        stream.expect(add.params.n)
        request = OpenRequest(add, stream, add.params.n, len(add.prompt_token_ids))
        try:
            self._engine.submit(request)
            await stream.wait_queued()
            yield Queued(add.request_id)
            async for deltas in stream:
                yield Deltas(deltas)
        except EngineDeadError as error:
            yield error
        except QueueFullError as error:
            yield Refused(add.request_id, str(error), "queue_full")
        except ValueError as error:
            yield Refused(add.request_id, str(error), "invalid")
        finally:
            if not stream.finished:
                self._engine.abort(add.request_id)


class RayEngine(EngineClient):
    """An engine's replica, as the routes see it. After a loss it serves again as soon as Ray Serve
    has started it again."""

    def __init__(self, handle: DeploymentHandle) -> None:
        super().__init__()
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        info = await self._handle.info.remote()
        # What routes that have died had asked for goes on, and nobody reads it.
        await self._handle.abort_all.remote()
        self.stats = await self._handle.stats.remote()
        self._start_task(self._watch())
        return info

    async def reset_prefix_cache(self) -> bool:
        try:
            return await self._handle.reset_prefix_cache.remote()
        except (RayError, RayServeException) as error:
            raise self._lost(error) from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _send(self, message: Add | Abort) -> None:
        self._start_task(self._run(message) if isinstance(message, Add) else self._abort(message))

    def _start_task(self, work: Any) -> None:
        # Out of the HTTP request's context: with that request, Ray Serve would cancel this call
        # too, and nobody would tell the engine.
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, add: Add) -> None:
        answers = self._handle.options(stream=True).generate.remote(add)
        try:
            async for message in answers:
                if add.request_id not in self._open:  # the engine was lost meanwhile
                    answers.cancel()
                    return
                if isinstance(message, EngineDeadError):
                    self._lose(message)
                    return
                self._take(message)
        except (RayError, RayServeException) as error:
            self._lose_with(add.request_id, error)

    async def _abort(self, message: Abort) -> None:
        try:
            await self._handle.abort.remote(message.request_id)
        except (RayError, RayServeException) as error:
            self._lose_with(message.request_id, error)

    def _lose_with(self, request_id: str, error: Exception) -> None:
        """The engine that has the request does not answer. If the request is here no more, neither
        is that engine: the error is late, and says nothing of the one that was started since."""
        if request_id in self._open:
            self._lose(self._lost(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_STATS_INTERVAL_S)
            try:
                self.stats = await asyncio.wait_for(self._ask_stats(), _STATS_TIMEOUT_S)
            except (RayError, RayServeException, TimeoutError) as error:
                self._lose(self._lost(error))
            else:
                if self.error is not None:
                    logger.info("an engine's replica serves again")
                self.error = None

    async def _ask_stats(self) -> Stats:
        return await self._handle.stats.remote()

    def _lost(self, error: Exception) -> EngineDeadError:
        if isinstance(error, RayTaskError) and isinstance(error.cause, EngineDeadError):
            return error.cause  # the replica lives, and told it
        logger.debug("an engine's replica does not answer", exc_info=error)
        return EngineLostError("the engine's replica has died, or does not answer")


class Routes:
    """The HTTP server's application, with the engines elsewhere."""

    async def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        api_keys: list[str],
        chat_template: str | None,
        engines: list[DeploymentHandle],
    ) -> None:
        set_up_logging(config.log_format)
        begin = time.monotonic()
        self._config = config
        self._api_keys = api_keys
        self._status = Status()
        self._tracer = make_tracer(config.otlp_endpoint)
        folder = await asyncio.to_thread(resolve_model, engine_config.model)
        self._status.service = service = await start_service(
            EngineGroup([RayEngine(handle) for handle in engines]),
            folder,
            config.served_model_name or (engine_config.model,),
            chat_template,
            config,
            self._tracer,
        )
        self._ready_line = service.ready_line(time.monotonic() - begin)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve calls for the application."""
        return make_app(self._config, self._api_keys, self._status)

    async def __del__(self) -> None:
        """What Ray Serve awaits when the replica ends."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def ready_line(self) -> str:
        return self._ready_line

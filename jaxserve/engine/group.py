"""Several engines with the same model that serve as one."""

import asyncio
import functools
import logging
from collections.abc import Sequence

from jaxserve.engine.client import EngineClient, EngineLostError, EngineStartError, OpenRequest
from jaxserve.engine.messages import Add, EngineInfo
from jaxserve.engine.router import Router
from jaxserve.engine.streams import EngineDeadError, RequestStream
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class EngineGroup:
    """An engine's rank is its place in `engines`.

    When one is lost, the others go on. Its requests end with the error; but those of which nothing
    has come yet begin again elsewhere, once, if its process died. If it failed by itself they do
    not: one of them may be the reason, and would take the next engine down too.
    """

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.engines = engines
        self._router: Router | None = None
        self._failed = asyncio.Event()
        self._closing = False
        for rank, engine in enumerate(engines):
            engine.on_lost = functools.partial(self._take_loss, rank)

    async def start(self) -> list[EngineInfo]:
        """Returns when all are ready. EngineStartError if one cannot be, or not on
        what the others run on."""
        infos = await asyncio.gather(*(engine.start() for engine in self.engines))
        others = [rank for rank, info in enumerate(infos) if info.platform != infos[0].platform]
        if others:
            # JAX falls back to the CPU where no GPU is left.
            raise EngineStartError(
                f"engine 0 runs on {infos[0].platform}, engine {others[0]} on "
                f"{infos[others[0]].platform}: there are too few GPUs for {len(infos)} engines"
            )
        num_blocks = [info.num_blocks if info.enable_prefix_caching else 0 for info in infos]
        self._router = Router(infos[0].block_size, num_blocks)
        return infos

    @property
    def failure(self) -> EngineDeadError | None:
        """Why an engine serves no more; None while all do."""
        return next((e.error for e in self.engines if e.error is not None), None)

    @property
    def error(self) -> EngineDeadError | None:
        """Why nothing can be served; None while an engine serves."""
        return None if any(e.error is None for e in self.engines) else self.failure

    @property
    def num_open(self) -> int:
        """Requests sent and not finished."""
        return sum(engine.num_open for engine in self.engines)

    async def wait_failure(self) -> None:
        """Returns when an engine serves no more."""
        await self._failed.wait()

    def submit(
        self,
        stream: RequestStream,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
    ) -> None:
        """Send a request, whose outputs come in `stream`. EngineDeadError if all engines are
        gone."""
        if self.error is not None:
            raise self.error
        add = Add(request_id, list(prompt_token_ids), params, priority)
        request = OpenRequest(add, stream, num_unfinished=params.n, num_new_tokens=0)
        stream.expect(params.n)
        self._send(request)

    def abort(self, request_id: str) -> None:
        """End a request soon; its stream, if anybody reads it still, says "abort"."""
        for engine in self._serving().values():
            engine.abort(request_id)

    def abort_all(self) -> None:
        for engine in self._serving().values():
            engine.abort_all()

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes everywhere; False if an engine's requests hold blocks."""
        if self.error is not None:
            raise self.error
        serving = self._serving()
        done = await asyncio.gather(*(e.reset_prefix_cache() for e in serving.values()))
        for rank, is_reset in zip(serving, done, strict=True):
            if is_reset:
                self._router.forget(rank)
        return all(done)

    async def close(self) -> None:
        """End all requests and all engines. Closing twice is fine."""
        self._closing = True
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _serving(self) -> dict[int, EngineClient]:
        return {rank: e for rank, e in enumerate(self.engines) if e.error is None}

    def _send(self, request: OpenRequest) -> None:
        loads = {rank: engine.load for rank, engine in self._serving().items()}
        rank, request.num_new_tokens = self._router.route(request.add.prompt_token_ids, loads)
        request.stream.ranks[request.add.request_id] = rank
        self.engines[rank].submit(request)

    def _take_loss(
        self, rank: int, error: EngineDeadError, requests: Sequence[OpenRequest]
    ) -> None:
        if self._router is not None and not self._closing:
            name = "the engine" if len(self.engines) == 1 else f"engine {rank}"
            logger.error("%s cannot serve requests: %s", name, error)
            self._router.forget(rank)
        self._failed.set()
        for request in requests:
            if isinstance(error, EngineLostError) and request.may_move and self.error is None:
                request.may_move = False
                self._send(request)
            else:
                request.stream.fail(error)

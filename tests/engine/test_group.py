"""Several engines as one: loads, and what becomes of requests when an engine is lost."""

import asyncio

import pytest

from jaxserve import EngineDeadError, SamplingParams
from jaxserve.engine.client import (
    SEQUENCE_LOAD,
    EngineClient,
    EngineLostError,
    EngineStartError,
)
from jaxserve.engine.group import EngineGroup
from jaxserve.engine.messages import (
    Abort,
    Add,
    Deltas,
    EngineInfo,
    Queued,
    Refused,
)
from jaxserve.engine.streams import QueueFullError, RequestStream
from jaxserve.outputs import OutputDelta

LOST = EngineLostError("the engine's process has died")
FAILED = EngineDeadError("the engine failed: the device is lost")


class Remote(EngineClient):
    """What it is sent is kept; the test says what the engine answers."""

    def __init__(self, platform="cpu"):
        super().__init__()
        self.platform = platform
        self.sent = []
        self.resets = 0
        self.say = self._take
        self.lose = self._lose

    async def start(self):
        return EngineInfo(self.platform, 128, 8, 20, 256, 1000, 16, 16000, True, "fcfs", {})

    async def reset_prefix_cache(self):
        self.resets += 1
        return not self.num_open

    async def close(self):
        self.lose(EngineDeadError("the engine was closed"))

    def _send(self, message):
        self.sent.append(message)

    def ids(self):
        return [m.request_id for m in self.sent if isinstance(m, Add)]

    def output(self, request_id, finish_reason=None, index=0):
        self.say(Deltas([OutputDelta(request_id, index, "x", (1,), finish_reason=finish_reason)]))


async def start(count):
    group = EngineGroup([Remote() for _ in range(count)])
    await group.start()
    return group


def submit(group, request_id, prompt=(1, 2, 3), n=1):
    stream = RequestStream()
    group.submit(stream, request_id, list(prompt), SamplingParams(n=n))
    return stream


async def read(stream):
    return [delta async for deltas in stream for delta in deltas]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def test_load_is_what_is_still_to_do():
    async def main():
        group = await start(1)
        (engine,) = group.engines
        stream = submit(group, "a", prompt=range(40), n=2)
        assert engine.load == 40 + 2 * SEQUENCE_LOAD
        engine.say(Queued("a"))
        engine.output("a")
        assert engine.load == 2 * SEQUENCE_LOAD
        engine.output("a", "stop", index=1)
        assert (engine.load, engine.num_open) == (SEQUENCE_LOAD, 1)
        engine.output("a", "length")
        assert (engine.load, engine.num_open) == (0, 0)
        assert len(await read(stream)) == 3
        refused = submit(group, "b")
        engine.say(Refused("b", "no room", "queue_full"))
        with pytest.raises(QueueFullError):
            await refused.wait_queued()
        assert (engine.load, group.num_open) == (0, 0)

    run(main())


def test_requests_are_spread_and_aborted_where_they_are():
    async def main():
        group = await start(2)
        streams = [submit(group, str(i)) for i in range(4)]
        assert [engine.ids() for engine in group.engines] == [["0", "2"], ["1", "3"]]
        assert [stream.ranks for stream in streams[:2]] == [{"0": 0}, {"1": 1}]
        assert group.num_open == 4
        group.abort("1")
        assert group.engines[0].sent[-1].request_id == "2"
        assert group.engines[1].sent[-1] == Abort("1")
        group.abort("nobody's")
        group.abort_all()
        aborted = [m for e in group.engines for m in e.sent if isinstance(m, Abort)]
        assert len(aborted) == 5

    run(main())


def test_a_lost_engine_takes_only_what_has_begun():
    async def main():
        group = await start(2)
        first, other, waiting, gone = (submit(group, i) for i in ("0", "1", "2", "3"))
        more = submit(group, "4")
        lost, left = group.engines
        assert lost.ids() == ["0", "2", "4"]
        for engine in group.engines:
            for request_id in engine.ids():
                engine.say(Queued(request_id))
        lost.output("0")
        group.abort("4")  # its client has gone: nobody waits for it
        lost.lose(LOST)
        assert lost.error is group.failure is LOST
        assert group.error is None
        with pytest.raises(EngineLostError):
            await read(first)
        assert more.error is LOST
        assert left.ids() == ["1", "3", "2"]
        assert waiting.ranks == {"2": 1}
        left.say(Queued("2"))
        await waiting.wait_queued()
        for request_id, stream in (("1", other), ("2", waiting), ("3", gone)):
            left.output(request_id, "stop")
            assert len(await read(stream)) == 1
        assert left.load == lost.load == group.num_open == 0

        later = submit(group, "5")
        assert left.ids()[-1] == "5"
        assert await group.reset_prefix_cache() is False
        assert (lost.resets, left.resets) == (0, 1)
        left.lose(LOST)
        assert later.error is LOST
        with pytest.raises(EngineLostError):
            submit(group, "6")

    run(main())


def test_a_request_moves_once():
    async def main():
        group = await start(3)
        stream = submit(group, "0")
        group.engines[0].lose(LOST)
        (rank,) = stream.ranks.values()
        assert rank != 0
        group.engines[rank].lose(LOST)
        assert stream.error is LOST
        assert group.error is None

    run(main())


def test_a_fault_is_not_carried_on():
    async def main():
        group = await start(2)
        stream = submit(group, "0")
        group.engines[0].lose(FAILED)
        assert stream.error is FAILED
        assert group.engines[1].ids() == []
        await group.wait_failure()

    run(main())


def test_a_lost_cache_is_forgotten():
    async def main():
        group = await start(2)
        stream = submit(group, "0", range(64))
        group.engines[0].say(Queued("0"))
        group.engines[0].output("0", "stop")
        await read(stream)
        group.engines[0].lose(LOST)
        # As an engine that was started again comes back: it is the other's turn.
        group.engines[0].error = None
        assert submit(group, "1", range(64)).ranks == {"1": 1}

    run(main())


def test_closing_is_no_failure(caplog):
    async def main():
        group = await start(2)
        stream = submit(group, "0")
        await group.close()
        with pytest.raises(EngineDeadError, match="was closed"):
            await read(stream)

    run(main())
    assert not caplog.records


def test_engines_do_not_fall_back_to_the_cpu():
    async def main():
        group = EngineGroup([Remote("gpu"), Remote("gpu"), Remote("cpu")])
        with pytest.raises(EngineStartError, match="engine 2 on cpu: there are too few GPUs for 3"):
            await group.start()

    run(main())

"""AsyncLLM: streams, aborts, and an engine that fails or is closed."""

import asyncio

import pytest

from jaxserve import LLM, AsyncLLM, EngineDeadError, SamplingParams
from jaxserve.engine.streams import RequestStream
from jaxserve.outputs import OutputDelta

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def async_llm(tiny_folder, tiny_fields):
    llm = AsyncLLM(tiny_folder, **tiny_fields)
    yield llm
    llm.close()
    llm.close()


@pytest.fixture(scope="module")
def solo(make_llm, prompts):
    llm: LLM = make_llm()
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


async def complete(llm, prompt, params=GREEDY, **kwargs):
    async for output in llm.generate(prompt, params, **kwargs):
        last = output
    return last


async def becomes_idle(llm):
    while True:
        stats = await llm.stats()
        if stats.num_running == stats.num_waiting == 0:
            assert stats.kv_usage == 0
            return
        await asyncio.sleep(0.01)


def test_concurrent_streams_as_alone(async_llm, prompts, solo):
    async def main():
        outputs = await asyncio.gather(*(complete(async_llm, p) for p in prompts))
        assert [o.outputs[0].token_ids for o in outputs] == solo
        await becomes_idle(async_llm)

    run(main())


def test_a_stream_grows(async_llm, prompts, solo):
    async def main():
        lens = []
        async for output in async_llm.generate(prompts[0], GREEDY):
            lens.append(len(output.outputs[0].token_ids))
            assert output.outputs[0].token_ids == solo[0][: lens[-1]]
        assert lens == sorted(lens)
        assert len(lens) > 2
        assert lens[-1] == 24

    run(main())


def test_leaving_the_loop_aborts(async_llm, prompts):
    async def main():
        stream = async_llm.generate(prompts[0], SamplingParams(max_tokens=100, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()
        await becomes_idle(async_llm)

    run(main())


def test_a_cancelled_task_aborts(async_llm, prompts):
    async def main():
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        tasks = [asyncio.create_task(complete(async_llm, p, params)) for p in prompts[:20]]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await becomes_idle(async_llm)

    run(main())


def test_abort_by_id_finishes_the_stream(async_llm, prompts):
    async def main():
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        reasons = []
        async for output in async_llm.generate(prompts[0], params, request_id="mine"):
            reasons.append(output.outputs[0].finish_reason)
            await async_llm.abort("mine")
        assert reasons[-1] == "abort"
        await async_llm.abort("never heard of")
        await becomes_idle(async_llm)

    run(main())


def test_an_event_loop_that_ends_leaves_nothing_behind(async_llm, prompts):
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    async def abandon():
        streams = [async_llm.generate(p, params) for p in prompts[:4]]
        for stream in streams:
            await anext(stream)

    run(abandon())
    run(becomes_idle(async_llm))


def test_refusals_reach_the_caller(async_llm, prompts, solo):
    async def main():
        with pytest.raises(ValueError, match="the prompt is empty"):
            await complete(async_llm, [])
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        first = async_llm.generate(prompts[0], params, request_id="same")
        await anext(first)
        with pytest.raises(ValueError, match="request id 'same' is in use"):
            await complete(async_llm, prompts[1], request_id="same")
        output = [output async for output in first][-1]
        assert output.outputs[0].finish_reason == "length"
        assert (await complete(async_llm, prompts[1])).outputs[0].token_ids == solo[1]

    run(main())


def test_a_failing_step_ends_every_stream(tiny_folder, tiny_fields, prompts, monkeypatch):
    llm = AsyncLLM(str(tiny_folder), **tiny_fields)

    def broken():
        raise RuntimeError("device lost")

    async def main():
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        streams = [llm.generate(p, params) for p in prompts[:4]]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(llm.engine, "step", broken)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="device lost"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError, match="device lost"):
            await complete(llm, prompts[0])
        with pytest.raises(EngineDeadError):
            await llm.stats()
        assert not llm.is_running

    run(main())
    llm.close()


def test_close_ends_open_streams(tiny_folder, tiny_fields, prompts):
    llm = AsyncLLM(str(tiny_folder), **tiny_fields)

    async def main():
        stream = llm.generate(prompts[0], SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDeadError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="closed"):
            await complete(llm, prompts[0])

    run(main())


def test_a_stream_one_of_whose_sequences_fails():
    """What came before is read first, be it there already or not."""

    async def main():
        stream, texts = RequestStream(), []
        stream.expect(2)
        stream.push(OutputDelta("a", 0, text="x"))

        async def read():
            async for deltas in stream:
                texts.extend(delta.text for delta in deltas)
                if texts == ["x"]:
                    stream.push(OutputDelta("a", 1, text="y"))
                    failed = OutputDelta("a", 0, finish_reason="error", stop_reason="the reason")
                    stream.push(failed)

        with pytest.raises(ValueError, match="the reason"):
            await read()
        assert texts == ["x", "y"]
        assert not stream.finished

    run(main())

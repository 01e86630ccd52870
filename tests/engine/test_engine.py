"""The engine through LLM: the batch never changes an answer, and nothing is lost."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxserve import LLM, RequestErrors, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def solo(make_llm, prompts):
    """Each prompt alone, without a prefix cache."""
    llm = make_llm(enable_prefix_caching=False)
    return [llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for ids in prompts]


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


def test_fault_5_together_as_alone(llm, prompts, solo):
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == solo
    assert is_idle(llm)


def test_fault_6_warm_prefix_cache_as_cold(make_llm, prompts, solo):
    llm = make_llm()
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == solo
    hits = llm.stats().prefix_cache.num_hit_tokens
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == solo
    assert llm.stats().prefix_cache.num_hit_tokens > hits
    assert llm.reset_prefix_cache()
    assert tokens(llm.generate(prompts[:4], GREEDY, use_tqdm=False)) == solo[:4]


def test_fault_6_equal_blocks_after_different_prefixes(make_llm):
    """The second block of one prompt is another's too, but what it was computed after is not."""
    first, other, second = ([10 * i + j for j in range(8)] for i in (2, 11, 20))
    asked = [*other, *second, 5]
    cold = make_llm(enable_prefix_caching=False)
    (expected,) = tokens(cold.generate(asked, GREEDY, use_tqdm=False))
    warm = make_llm()
    assert warm.reset_prefix_cache()
    for ids in ([*first, *second, 5], [*other, 5]):
        warm.generate(ids, GREEDY, use_tqdm=False)
    assert tokens(warm.generate(asked, GREEDY, use_tqdm=False)) == [expected]


def test_fault_11_shuffled_in_a_pool_that_preempts(make_llm, block_bytes, prompts, solo):
    llm = make_llm(kv_cache_memory_bytes=24 * block_bytes)
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    outputs = llm.generate([prompts[i] for i in order], GREEDY, use_tqdm=False)
    assert tokens(outputs) == [solo[i] for i in order]
    assert llm.stats().num_preemptions > 0
    assert is_idle(llm)


def test_fault_10_hundred_requests_in_ten_blocks(make_llm, block_bytes, prompts, solo):
    llm = make_llm(max_model_len=72, kv_cache_memory_bytes=10 * block_bytes)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    many = [prompts[i % 40] for i in range(100)]
    outputs = llm.generate(many, params, use_tqdm=False)
    assert tokens(outputs) == [solo[i % 40][:10] for i in range(100)]
    assert is_idle(llm)


def test_tensor_parallel_as_one_device(make_llm, prompts, solo):
    llm = make_llm(tensor_parallel_size=2)
    assert tokens(llm.generate(prompts[:10], GREEDY, use_tqdm=False)) == solo[:10]


def test_seeded_sampling_does_not_depend_on_the_batch(llm, prompts):
    def params(seed):
        return SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=seed, max_tokens=12)

    alone = [
        tokens(llm.generate(p, params(i), use_tqdm=False))[0] for i, p in enumerate(prompts[:6])
    ]
    mixed = llm.generate(
        prompts[20:30] + prompts[:6],
        [SamplingParams(max_tokens=30)] * 10 + [params(i) for i in range(6)],
        use_tqdm=False,
    )
    assert tokens(mixed)[10:] == alone
    assert len(set(map(tuple, alone))) == 6


def test_n_answers_differ_and_keep_their_places(llm, prompts):
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate(prompts[0], params, use_tqdm=False)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3
    again = SamplingParams(seed=8, max_tokens=8, ignore_eos=True)
    (second,) = llm.generate(prompts[0], again, use_tqdm=False)
    assert second.outputs[0].token_ids == output.outputs[1].token_ids


def test_penalties_survive_preemption(make_llm, block_bytes, prompts):
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        ignore_eos=True,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={5: 1.0},
    )
    chosen = prompts[:16]
    calm = make_llm().generate(chosen, params, use_tqdm=False)
    tight = make_llm(kv_cache_memory_bytes=24 * block_bytes)
    before = tight.stats().num_preemptions
    assert tokens(tight.generate(chosen, params, use_tqdm=False)) == tokens(calm)
    assert tight.stats().num_preemptions > before


def test_stop_token_ends_and_min_tokens_holds_it_back(llm, prompts, solo):
    stop = solo[3][4]
    first = solo[3].index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate(prompts[3], params, use_tqdm=False)
    assert output.outputs[0].token_ids == solo[3][: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    held = SamplingParams(
        temperature=0, max_tokens=24, min_tokens=24, ignore_eos=True, stop_token_ids=[stop]
    )
    (output,) = llm.generate(prompts[3], held, use_tqdm=False)
    assert stop not in output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "the prompt is empty"),
        ([1, 256], "prompt token id 256 is outside the vocabulary (0 to 255)"),
        ([1, -1], "prompt token id -1 is outside the vocabulary (0 to 255)"),
        ([3] * 128, "the prompt has 128 tokens, but max_model_len=128"),
        ([3] * 4000, "the prompt has 4000 tokens"),
        ("text", "this engine has no tokenizer"),
        ([1, 2.5], "prompt token ids must be integers, got 2.5"),
        ({"text": "x"}, "needs 'prompt' or 'prompt_token_ids'"),
    ],
)
def test_a_bad_prompt_among_good_ones(llm, prompts, solo, prompt, says):
    good = prompts[:3]
    with pytest.raises(RequestErrors) as raised:
        llm.generate([good[0], prompt, good[1], good[2]], GREEDY, use_tqdm=False)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(raised.value.errors) == [1]
    outputs = raised.value.outputs
    assert outputs[1] is None
    assert tokens([outputs[0], outputs[2], outputs[3]]) == solo[:3]
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_tokens": 10**29, "max_tokens": 10**30}, "max_tokens must be None or an integer"),
        ({"temperature": 10**400}, "temperature must be a number from 0 to 100"),
        ({"stop_token_ids": [256]}, "stop_token_ids must name token ids from 0 to 255, got 256"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias must name token ids .* got 2147483648"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids must name token ids .* got 999"),
        ({"logprobs": 21}, "logprobs must be at most max_logprobs=20, got 21"),
        ({"prompt_logprobs": 50}, "prompt_logprobs must be at most max_logprobs=20"),
        ({"stop": "x"}, "stop needs a tokenizer"),
    ],
)
def test_parameters_beyond_this_model(llm, fields, says):
    with pytest.raises(ValueError, match=says):
        llm.generate([3, 4], SamplingParams(**fields), use_tqdm=False)
    assert is_idle(llm)


def test_longest_prompt_gives_one_token(llm):
    (output,) = llm.generate([3] * 127, SamplingParams(max_tokens=50), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_abort_at_any_step(llm, prompts, solo):
    engine = llm.engine
    for moment in range(0, 30, 3):
        submissions = [engine.prepare(p, GREEDY) for p in prompts[:10]]
        for submission in submissions:
            engine.add(submission)
        outputs = {s.output.request_id: s.output for s in submissions}
        victims = [s.output.request_id for s in submissions[::2]]
        steps = 0
        while engine.has_unfinished:
            if steps == moment:
                for victim in victims:
                    for delta in engine.abort(victim):
                        outputs[victim].apply(delta)
                    assert engine.abort(victim) == []
            for delta in engine.step():
                outputs[delta.request_id].apply(delta)
            steps += 1
        for i, submission in enumerate(submissions):
            completion = submission.output.outputs[0]
            assert completion.token_ids == solo[i][: len(completion.token_ids)]
            if i % 2:
                assert completion.token_ids == solo[i]
            elif completion.finish_reason == "abort":
                assert len(completion.token_ids) <= 24
        assert any(s.output.outputs[0].finish_reason == "abort" for s in submissions)
        assert is_idle(llm)


def test_an_interrupted_call_leaves_the_engine_usable(llm, prompts, solo, monkeypatch):
    step = llm.engine.step
    calls = iter(range(100))

    def interrupted():
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[:8], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert tokens(llm.generate(prompts[:2], GREEDY, use_tqdm=False)) == solo[:2]
    assert is_idle(llm)


@pytest.mark.parametrize("moment", ["build", "received", "launched"])
def test_a_step_that_was_cut_off_leaves_the_engine_usable(llm, prompts, solo, monkeypatch, moment):
    """Whatever the device got of the step, later calls answer as ever. Arrays that it took part of
    are all given back, before there are new ones."""
    builder, parts = llm.engine._builder, llm.engine._parts
    calls, left = iter(range(100)), []

    def interrupted(call):
        def run(*args):
            result = None if moment == "build" else call(*args)
            if next(calls) == 5:
                left.extend(jax.tree.leaves((parts.state, *parts.inputs.values())))
                raise KeyboardInterrupt
            return call(*args) if result is None else result

        return run

    if moment == "build":
        monkeypatch.setattr(builder, "build", interrupted(builder.build))
    else:
        name = {"received": "receive", "launched": "steps"}[moment]
        by_bucket = getattr(parts.programs, name)
        cut = {name: {bucket: interrupted(program) for bucket, program in by_bucket.items()}}
        monkeypatch.setattr(parts, "programs", dataclasses.replace(parts.programs, **cut))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[:8], GREEDY, use_tqdm=False)
    assert all(array.is_deleted() for array in left) == (moment != "build")
    monkeypatch.undo()
    assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == solo
    assert is_idle(llm)


def test_several_steps_in_one_dispatch_as_one_by_one(make_llm, prompts, solo, monkeypatch):
    llm = make_llm(num_scheduler_steps=3, max_num_seqs=4, max_num_batched_tokens=4)
    parts, dispatches = llm.engine._parts, []

    def counted(program):
        return lambda *args: dispatches.append(1) or program(*args)

    several = {bucket: counted(program) for bucket, program in parts.programs.decode_steps.items()}
    programs = dataclasses.replace(parts.programs, decode_steps=several)
    monkeypatch.setattr(parts, "programs", programs)

    short = [ids[:8] for ids in prompts[:6]]
    one_by_one = make_llm(max_num_seqs=4, max_num_batched_tokens=4)
    for fields in (
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 1.0, "min_tokens": 4},
    ):
        # Lengths that end in the first, the second and the last step of a dispatch.
        params = [SamplingParams(max_tokens=11 + i, **fields) for i in range(len(short))]
        expected = tokens(one_by_one.generate(short, params, use_tqdm=False))
        dispatches.clear()
        assert tokens(llm.generate(short, params, use_tqdm=False)) == expected
        assert len(dispatches) >= 3
    assert is_idle(llm)

    stop = solo[0][4]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate(prompts[:1], params, use_tqdm=False)
    assert output.outputs[0].token_ids == solo[0][: solo[0].index(stop) + 1]
    assert is_idle(llm)

    dispatches.clear()
    llm.generate(short, SamplingParams(temperature=0, max_tokens=8, logprobs=1), use_tqdm=False)
    assert not dispatches  # only single steps can be scored


def test_ids_that_look_like_sequences_do_not_collide(llm, prompts, solo):
    engine = llm.engine
    params = SamplingParams(n=2, temperature=0, max_tokens=24, ignore_eos=True)
    submissions = [
        engine.prepare(prompts[0], GREEDY, request_id="x#1"),
        engine.prepare(prompts[1], params, request_id="x"),
    ]
    for submission in submissions:
        engine.add(submission)
    outputs = {s.output.request_id: s.output for s in submissions}
    while engine.has_unfinished:
        for delta in engine.step():
            outputs[delta.request_id].apply(delta)
    assert outputs["x#1"].outputs[0].token_ids == solo[0]
    assert [o.token_ids for o in outputs["x"].outputs] == [solo[1]] * 2


def test_an_id_may_be_used_again_after_an_abort(llm, prompts):
    """The old request's step in flight tells the new one nothing."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    prompt, other = [p for p in prompts if 8 < len(p) <= 16][:2]
    (expected,) = llm.generate(prompt, params, use_tqdm=False)
    engine.add(engine.prepare(other, params, request_id="a"))
    engine.step()
    engine.abort("a")
    submission = engine.prepare(prompt, params, request_id="a")
    engine.add(submission)
    while engine.has_unfinished:
        for delta in engine.step():
            submission.output.apply(delta)
    assert submission.output.prompt_logprobs == expected.prompt_logprobs
    assert submission.output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_cached_tokens_are_reported(llm, prompts):
    prompt = next(p for p in prompts if len(p) > 30)
    llm.generate(prompt, GREEDY, use_tqdm=False)
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == (len(prompt) - 1) // 8 * 8


def test_numpy_prompts(llm, prompts, solo):
    arrays = [np.array(prompt) for prompt in prompts[:2]]
    assert tokens(llm.generate(arrays, GREEDY, use_tqdm=False)) == solo[:2]
    assert tokens(llm.generate(arrays[0], GREEDY, use_tqdm=False)) == solo[:1]


def test_parameters_of_the_wrong_type_among_good_ones(llm, prompts, solo):
    with pytest.raises(RequestErrors, match="must be SamplingParams") as raised:
        llm.generate(prompts[:2], [GREEDY, {"temperature": 0}], use_tqdm=False)
    assert tokens(raised.value.outputs[:1]) == solo[:1]


def test_a_closed_engine_says_so(tiny_folder, capsys):
    fields = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_batched_tokens": 1}
    llm = LLM(str(tiny_folder), kv_cache_memory_bytes=4 << 20, max_model_len=64, **fields)
    llm.close()
    capsys.readouterr()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate([3])
    assert capsys.readouterr() == ("", "")


def test_two_engines_and_close(tiny_folder, prompts):
    fields = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_batched_tokens": 8,
        "kv_cache_memory_bytes": 1 << 20,
        "compilation_cache_dir": "",
    }
    before = len(jax.live_arrays())
    with LLM(str(tiny_folder), **fields) as one, LLM(str(tiny_folder), seed=1, **fields) as two:
        assert len(jax.live_arrays()) > before
        a = tokens(one.generate(prompts[0], GREEDY, use_tqdm=False))
        b = tokens(two.generate(prompts[0], GREEDY, use_tqdm=False))
        assert a != b
        assert tokens(one.generate(prompts[0], GREEDY, use_tqdm=False)) == a
    one.close()
    assert len(jax.live_arrays()) == before


def test_progress_shows_tokens_per_second(llm, prompts, capsys):
    llm.generate(prompts[:2], GREEDY)
    assert "tokens/s" in capsys.readouterr().err

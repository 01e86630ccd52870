"""Engines in this process: workloads, timing, the records, and `jaxserve bench` with a real one."""

import itertools
import json
import math
import re
from types import SimpleNamespace

import pytest

from jaxserve.bench import offline
from jaxserve.bench.device_events import DeviceEvent, ProfileError, step_kernels
from jaxserve.bench.floors import (
    decode_floor_ms,
    kv_bytes_per_token,
    num_layer_params,
    num_output_params,
    workload_floor_s,
)
from jaxserve.bench.offline import run_decode, run_workload
from jaxserve.bench.profile import read_profile
from jaxserve.bench.records import KEYS
from jaxserve.bench.shapes import SHAPES
from jaxserve.bench.timing import measure
from jaxserve.bench.workloads import (
    TokenRequest,
    lengths_of,
    load_requests,
    make_requests,
    save_requests,
)
from jaxserve.engine.stats import StepStats
from jaxserve.model.config import ModelConfig

SMALL_ENGINE = (
    "--shape", "tiny", "--dtype", "float32", "--max-num-batched-tokens", 2, "--max-num-seqs", 2,
    "--kv-cache-memory-bytes", 1 << 20, "--block-size", 8,
)  # fmt: skip


def as_events(kernels):
    """One after another."""
    return [DeviceEvent(name, index, ns) for index, (name, ns) in enumerate(kernels)]


class FakeEngine:
    """Takes 1 s a request, 10 ms a prompt token and, for each output token, 1 ms and 0.1 ms a row;
    the host is to blame for 0.25 ms of that, and for a time that differs before the first."""

    max_num_seqs = 4
    max_num_batched_tokens = 8

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = {"decode": [0.0, 0], "prefill": [0.0, 0]}
        self.calls = []
        self.num_profiles = 0
        self.speed = 1.0

    def generate(self, requests):
        self.calls.append([(len(r.prompt_token_ids), r.output_len) for r in requests])
        prompts = sum(len(r.prompt_token_ids) for r in requests)
        steps = max(r.output_len for r in requests)
        step_s = 0.001 + 0.0001 * len(requests)
        self.now += (len(requests) + 0.01 * prompts + steps * step_s) / self.speed
        for kind, seconds, num_steps in (
            ("decode", steps * 0.00025, steps),
            ("prefill", 1 / len(self.calls), 1),
        ):
            self.waited[kind][0] += seconds
            self.waited[kind][1] += num_steps
        return [r.output_len for r in requests]

    def profile(self, requests):
        """A step takes as many prompt tokens as it may, and a token for each whose prompt is done,
        whose attention takes 2.5 us a row; prompts take another time whenever they run."""
        self.num_profiles += 1
        prompt_ends = itertools.accumulate(len(r.prompt_token_ids) for r in requests)
        begins = [math.ceil(n / (self.max_num_batched_tokens or n)) for n in prompt_ends]
        ends = [n + r.output_len for n, r in zip(begins, requests, strict=True)]
        events = [("first", 9e6)]
        for step in range(max(ends)):
            rows = sum(n <= step < end for n, end in zip(begins, ends, strict=True))
            matmul = 20e3 if step >= max(begins) else 1e6 * self.num_profiles
            events += [("matmul", matmul - 1e3), ("matmul", matmul + 1e3)] * 5
            events += [("attend", 2.5e3 * rows), ("add", 2e3)] * 10
            events += [("MemcpyD2H", 80e3), ("Memset", 100e3)]
        return as_events([*events, ("last", 9e6)])

    def waits(self, kind):
        return tuple(self.waited[kind])


@pytest.fixture
def engine(monkeypatch):
    made = FakeEngine()
    monkeypatch.setattr(offline, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_named_lengths():
    assert lengths_of("512x64", 3) == [(512, 64)] * 3
    assert len(lengths_of("8x8")) == 512
    assert lengths_of("prefill-1024") == [(1024, 1)] * 128
    sharegpt = lengths_of("sharegpt")
    assert (len(sharegpt), sum(i for i, _ in sharegpt), sum(o for _, o in sharegpt)) == (
        1000,
        245_999,
        322_000,
    )
    for name in ("lmsys-trace", "sharegpt-trace", "splitwise-trace"):
        assert len(lengths_of(name, 2000)) == 2000


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("input_len,output_len\n5,x\n", "is no file of lengths"),
        ("a,b\n5,6\n", "is no file of lengths"),
        ("input_len,output_len\n", "has 0 requests, 1 are needed"),
        ("input_len,output_len\n5,0\n", "every length must be at least 1"),
    ],
)
def test_damaged_length_files(tmp_path, text, error):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=error):
        lengths_of(str(path))


def test_requests_are_the_same_for_every_engine(tmp_path):
    requests = make_requests([(5, 2), (3, 7)], 100, seed=4)
    assert requests == make_requests([(5, 2), (3, 7)], 100, seed=4)
    assert requests != make_requests([(5, 2), (3, 7)], 100, seed=5)
    assert [len(r.prompt_token_ids) for r in requests] == [5, 3]
    save_requests(tmp_path / "requests.jsonl", requests)
    assert load_requests(tmp_path / "requests.jsonl") == requests


def test_passes_that_differ_are_flagged():
    for values, spread, flagged in (
        ([10.0, 11.0], 0.1, False),
        ([11.6, 10.0], 0.16, True),
        ([-1.0, 10.0], 999.0, True),
    ):
        passes, warmed = iter(values), []
        row = measure(lambda p=passes: next(p), lambda w=warmed: w.append(1), 0.0)
        assert (row.passes, row.spread, row.flagged) == (values, spread, flagged)
        assert row.value == sum(values) / 2
        assert warmed


def test_decode_steps_are_told_from_prefill(engine):
    result = run_decode(engine, [1, 4], 16, 512, vocab_size=50, seed=0, warm_up_s=0, profile=True)
    assert result["decode_step_ms"] == {"1": 1.1, "4": 1.4}
    assert result["host_gap_ms"] == {"1": 0.25, "4": 0.25}
    stats = {"kernels": 30, "copies": 2}
    assert result["profiles"]["1"] == stats | {"busy_ms": 0.425, "busy_share": 0.386}
    # Of steps that all requests are in.
    assert result["profiles"]["4"] == stats | {"busy_ms": 0.5, "busy_share": 0.357}
    assert (result["kernels_per_step"], result["spread"], result["flagged"]) == (30, 0, False)
    # Warm-up and the two passes, each of 64 and 512 tokens.
    assert engine.calls[:5] == [[(16, n)] for n in (64, 64, 512, 64, 512)]


@pytest.mark.parametrize(
    ("output_len", "budget", "lengths"),
    [(512, None, [344, 360]), (512, 8, [340, 356]), (64, 8, [44, 60]), (40, None, [31, 39])],
)
def test_steps_are_profiled_where_contexts_are_the_mean(engine, output_len, budget, lengths):
    """And for whole dispatches, of 8 steps each."""
    engine.max_num_batched_tokens = budget
    profiled = []
    profile = engine.profile

    def spy(requests):
        profiled.append(requests[0].output_len)
        return profile(requests)

    engine.profile = spy
    result = run_decode(engine, [4], 16, output_len, 50, seed=0, warm_up_s=0, profile=True)
    assert profiled == lengths
    assert result["profiles"]["4"]["kernels"] == 30


def test_too_short_for_a_profile(engine):
    with pytest.raises(ValueError, match="output_len of a profile must be at least 32, got 31"):
        run_decode(engine, [1], 16, 31, 50, seed=0, warm_up_s=0, profile=True)
    assert not engine.calls


def test_profiles_that_cannot_be_right_spoil_no_figure(engine, capsys):
    profile = engine.profile

    def other_prompts(requests):
        extra = [("prompt", 1e3)] * (100 * engine.num_profiles * (len(requests) == 1))
        return as_events(extra) + profile(requests)

    engine.profile = other_prompts
    result = run_decode(engine, [1, 4], 16, 512, 50, seed=0, warm_up_s=0, profile=True)
    assert result["decode_step_ms"] == {"1": 1.1, "4": 1.4}
    assert (list(result["profiles"]), result["kernels_per_step"]) == (["4"], None)
    assert re.search(
        r"no profile of 1 requests: .* are not 16 steps apart", capsys.readouterr().err
    )


def test_decode_steps_need_all_prompts_done(engine):
    # 4 prompts of 16 tokens, 8 a step.
    with pytest.raises(ValueError, match=r"4 prompts of 16 tokens take 8 steps.* after 7 tokens"):
        run_decode(engine, [1, 4], 16, 31, vocab_size=50, seed=0, warm_up_s=0)
    assert not engine.calls
    run_decode(engine, [1, 4], 16, 32, vocab_size=50, seed=0, warm_up_s=0)
    engine.max_num_batched_tokens = None
    run_decode(engine, [1, 4], 16, 31, vocab_size=50, seed=0, warm_up_s=0)


def test_an_engine_that_tells_no_waits(engine):
    engine.waits = lambda kind: None
    assert run_decode(engine, [1], 8, 64, 50, 0, 0)["host_gap_ms"] == {}


def test_rates_of_a_workload(engine):
    result = run_workload(engine, make_requests([(100, 100)] * 8, 50, 0), 0)
    seconds = 8 + 8 + 0.18
    assert result["output_tokens_per_s"] == round(800 / seconds, 1)
    assert result["total_tokens_per_s"] == round(1600 / seconds, 1)
    assert (result["num_requests"], result["flagged"]) == (8, False)
    # A round of warm-up is cut short.
    assert engine.calls[0] == [(100, 64)] * 8
    engine.calls.clear()
    run_workload(engine, make_requests([(10, 10)] * 200, 50, 0), 0)
    assert [len(calls) for calls in engine.calls] == [128, 200, 200]
    result = run_workload(engine, make_requests([(100, 1)] * 2, 50, 0), 0)
    assert result["prefill_tokens_per_s"] == round(200 / (2 + 2 + 0.0012), 1)
    assert "output_tokens_per_s" not in result


def test_an_engine_that_slows_down_is_flagged(engine):
    generate = engine.generate

    def slower(requests):
        engine.speed *= 0.8
        return generate(requests)

    engine.generate = slower
    assert run_workload(engine, make_requests([(10, 10)] * 4, 50, 0), 0)["flagged"]
    assert run_decode(engine, [1], 8, 64, 50, 0, 0)["flagged"]


def test_short_outputs_are_no_result(engine):
    engine.generate = lambda requests: [r.output_len - (i == 1) for i, r in enumerate(requests)]
    with pytest.raises(RuntimeError, match="request 1 got 4 tokens where 5 were asked for"):
        run_workload(engine, [TokenRequest([1], 5)] * 3, 0)


def test_each_kernel_counts_once():
    from jax.profiler import ProfileData

    def line(name, *events):
        shown = "".join(
            f"events {{ metadata_id: {m} offset_ps: {start} duration_ps: {ps} }} "
            for m, start, ps in events
        )
        return f'lines {{ name: "{name}" {shown} }}'

    names = {1: "gemm_fusion", 2: "MemcpyD2H", 3: "module", 4: "cuGraphLaunch"}
    metadata = "".join(
        f'event_metadata {{ key: {k} value {{ id: {k} name: "{n}" }} }} ' for k, n in names.items()
    )
    lines = [
        line("Stream #13(Compute)", (1, 4_000_000, 2_000_000), (1, 1_000_000, 3_000_000)),
        line("Stream #14(MemcpyD2H)", (2, 7_000_000, 1_000_000)),
        line("XLA Modules", (3, 0, 9_000_000)),
    ]
    host = line("python", (1, 0, 1_000_000), (4, 0, 1_000_000), (4, 0, 1_000_000))
    other = f'planes {{ name: "/host:CPU" {host} {metadata} }}'
    text = f'planes {{ name: "/device:GPU:0" {" ".join(lines)} {metadata} }} {other}'
    profile = ProfileData.from_text_proto(text)
    events = read_profile(profile)
    # In the order of their starts, whatever stream they ran on.
    assert [(event.name, event.duration_ns) for event in events] == [
        ("gemm_fusion", 3000), ("gemm_fusion", 2000), ("MemcpyD2H", 1000)
    ]  # fmt: skip


def test_kernels_of_a_step_are_timed_where_they_run():
    prompt, ramp = [("matmul", 9e6), ("norm", 9e6)], [("matmul", 5e6), ("norm", 5e6)] * 6
    step = [("matmul", 2e3), ("norm", 1e3), ("matmul", 4e3)]
    few = as_events([*prompt, *step * 3, *ramp])
    many = as_events([("matmul", 7e6), ("norm", 7e6), *step * 7, *ramp])
    # Not what comes before the steps, nor what comes after them.
    step_has = {"matmul": (2.0, pytest.approx(0.006)), "norm": (1.0, 0.001)}
    assert step_kernels(few, many, 4, after=4) == step_has
    # Nor what every run ends with.
    ends = [as_events([*step * n, ("last", 5e6)]) for n in (3, 7)]
    assert step_kernels(*ends, 4, after=0).keys() == step_has.keys()
    with pytest.raises(ProfileError, match="29 and 17 events are not 4 steps apart"):
        step_kernels(many[:29], few[:17], 4, after=4)


@pytest.mark.parametrize(
    "few",
    [
        ["prompt"] * 9 + ["step"] * 40,  # no step more
        ["prompt"] * 9 + ["step"] * 41,
        ["prompt"] * 20 + ["step"] * 20,  # other prompts
        ["step"],
    ],
)
def test_profiles_that_are_not_some_steps_apart(few):
    made = (
        as_events([(name, 1e3) for name in names])
        for names in (few, ["prompt"] * 9 + ["step"] * 40)
    )
    with pytest.raises(
        ProfileError, match=r"events are not 4 steps apart: \d+ events are of other work"
    ):
        step_kernels(*made, 4, after=4)


def test_floors():
    qwen, llama = SHAPES["qwen2.5-0.5b"], SHAPES["llama-3.1-8b"]
    assert num_layer_params(qwen) + num_output_params(qwen) == pytest.approx(494e6, rel=1e-3)
    # All of it, with the embedding that is not tied, is what the model's name says.
    assert num_layer_params(llama) + 2 * num_output_params(llama) == pytest.approx(8.03e9, rel=1e-3)
    assert kv_bytes_per_token(qwen) == 24 * 2 * 2 * 64 * 2
    weights_ms = 494e6 * 2 / 4e12 * 1e3
    assert decode_floor_ms(qwen, 1, 0, 4e12, 8e14) == pytest.approx(weights_ms, rel=1e-3)
    cache_ms = 256 * 800 * kv_bytes_per_token(qwen) / 4e12 * 1e3
    assert decode_floor_ms(qwen, 256, 800, 4e12, 8e14) == pytest.approx(
        weights_ms + cache_ms, rel=1e-3
    )
    # Decode alone: 63 steps of one row are bound by memory; prefill by arithmetic.
    assert workload_floor_s(qwen, [(1, 64)], 8, 4e12, 8e14) == pytest.approx(
        64 * weights_ms / 1000, rel=1e-2
    )
    flops = 2 * num_layer_params(llama) * 1024 * 128
    assert workload_floor_s(llama, [(1024, 1)] * 128, 512, 4e12, 8e14) == pytest.approx(
        flops / 8e14, rel=0.05
    )


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_are_served(name):
    ModelConfig.from_hf(SHAPES[name])


def test_throughput_of_a_real_engine(cli, tmp_path):
    path, requests = tmp_path / "result.json", tmp_path / "requests.jsonl"
    code, out, _ = cli(
        "bench", "throughput", *SMALL_ENGINE, "--compilation-cache-dir", "", "--workload", "3x8",
        "--num-prompts", 3, "--warm-up-s", 0, "--output-json", path, "--requests-file", requests,
        "--session", "s1",
    )  # fmt: skip
    assert code == 0
    assert re.fullmatch(r"tiny, 3x8: .* output tokens/s, .* tokens/s in all, .*\n", out)
    record = json.loads(path.read_text())
    assert set(KEYS) <= set(record)
    assert (record["engine"], record["model"], record["dtype"]) == ("jaxserve", "tiny", "float32")
    assert (record["workload"], record["session"]) == ("3x8", "s1")
    assert (record["num_requests"], record["max_num_seqs"]) == (3, 2)
    assert record["gpu_count"] == 0 or record["gpu"]
    assert record["total_tokens_per_s"] == pytest.approx(record["output_tokens_per_s"] * 11 / 8,
                                                         rel=0.01)  # fmt: skip
    assert record["settings"]["enable_prefix_caching"] is False
    assert [r.output_len for r in load_requests(requests)] == [8, 8, 8]


@pytest.mark.parametrize("flags", [(), ("--sampled", "--profile")])
def test_latency_greedy_and_sampled(cli, monkeypatch, flags):
    asked = []

    class FakeLLM:
        """Answers at once."""

        def __init__(self, **fields):
            config = SimpleNamespace(tensor_parallel_size=1)
            scheduler = SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=2, num_blocks=9)
            model = SimpleNamespace(vocab_size=50)
            self.engine = SimpleNamespace(
                dtype="float32",
                platform="cpu",
                config=config,
                startup_s={},
                steps_in_dispatch={1: 8, 2: 1},
                scheduler_config=scheduler,
                model_config=model,
            )

        def generate(self, prompts, params, use_tqdm):
            asked.extend(params)
            answers = [SimpleNamespace(token_ids=[1] * one.max_tokens) for one in params]
            return [SimpleNamespace(outputs=[answer]) for answer in answers]

        def stats(self):
            return SimpleNamespace(steps=StepStats())

        def close(self):
            pass

    monkeypatch.setattr("jaxserve.LLM", FakeLLM, raising=False)
    code, out, _ = cli("bench", "latency", "--shape", "tiny", "--batch-sizes", 2, "--input-len", 3,
                       "--output-len", 32, "--warm-up-s", 0, *flags)  # fmt: skip
    assert code == 0
    record = json.loads(out)
    assert record["sampled"] is bool(flags)
    assert record["profiles"] == {}  # of a GPU alone
    assert record["settings"]["steps_in_dispatch"] == {"1": 8, "2": 1}
    assert {one.ignore_eos for one in asked} == {True}
    for one in asked:
        cut = (one.temperature, one.top_p, one.top_k)
        penalties = (one.presence_penalty, one.frequency_penalty, one.repetition_penalty)
        assert cut == ((1.0, 0.9, 50) if flags else (0, 1.0, 0))
        assert penalties == ((0.1, 0.1, 1.1) if flags else (0, 0, 1))


def test_cold_and_warm_starts(cli, monkeypatch):
    monkeypatch.setattr("jaxserve.bench.startup._NUM_STARTS", 1)
    code, out, _ = cli("bench", "startup", *SMALL_ENGINE[:4], "--max-num-batched-tokens", 1,
                       "--max-model-len", 16, "--kv-cache-memory-bytes", 1 << 20)  # fmt: skip
    assert code == 0
    record = json.loads(out)
    (cold,), (warm,) = record["starts"]["cold"], record["starts"]["warm"]
    assert (record["ready_s"], record["ready_warm_s"]) == pytest.approx(
        (cold["ready_s"], warm["ready_s"]), abs=0.01
    )
    for start in (cold, warm):
        assert {"import", "resolve", "weights", "compile", "warm_up"} <= set(start["phases_s"])
        assert sum(start["phases_s"].values()) == pytest.approx(start["ready_s"], abs=0.01)
    assert set(KEYS) <= set(record)


def test_a_start_that_fails_says_why(cli):
    code, out, err = cli("bench", "startup", "--model", "/no/such/model")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"jaxserve: error: the engine did not start: .*/no/such/model.*\n", err)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("latency",), "one of the arguments --model --shape is required"),
        (("latency", "--shape", "huge"), "invalid choice: 'huge'"),
        (("latency", "--shape", "tiny", "--batch-sizes", 0), "must be at least 1, got 0"),
        (("latency", "--shape", "tiny", "--output-len", 4), "--output-len must be at least 8"),
        (
            ("latency", "--shape", "tiny", "--output-len", 31, "--profile"),
            "--output-len must be at least 32 with --profile, got 31",
        ),
        (
            ("latency", "--shape", "tiny", "--batch-sizes", 1, 8, "--max-num-seqs", 2),
            "--max-num-seqs must be at least 8 for these requests, got 2",
        ),
        (
            (
                "latency",
                "--shape",
                "tiny",
                "--input-len",
                9,
                "--output-len",
                64,
                "--max-model-len",
                64,
            ),
            "--max-model-len must be at least 73 for these requests, got 64",
        ),
        (
            ("latency", "--shape", "tiny", "--output-json", "no/such/folder/x.json"),
            "no folder no/such",
        ),
        (("throughput", "--shape", "tiny", "--workload", "big"), "no workload 'big'"),
        (("throughput", "--shape", "tiny", "--block-size", 9), "block_size must be 8, 16"),
        (("startup", "--shape", "tiny", "--compilation-cache-dir", "a"), "of its own"),
        (("fly",), "invalid choice: 'fly'"),
    ],
)
def test_usage_errors(cli, argv, error):
    code, out, err = cli("bench", *argv)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jaxserve: error: .*\n", err)
    assert error in err

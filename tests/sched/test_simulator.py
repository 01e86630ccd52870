from dataclasses import replace
from pathlib import Path

import pytest

from scheduler import (
    CostModel,
    Percentiles,
    SchedulerConfig,
    SchedulerOutput,
    TraceRequest,
    read_trace,
    simulate,
)
from scheduler.output import ScheduledRequest

LENGTHS = Path(__file__).parents[2] / "jaxserve" / "bench" / "lengths"
CONFIG = SchedulerConfig(
    num_blocks=2048, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=8192
)


def row(start: int, num_tokens: int) -> ScheduledRequest:
    return ScheduledRequest("r", 0, start, num_tokens, None, (), True, 0, False)


def test_the_cost_of_a_step() -> None:
    cost = CostModel(step_s=1000.0, token_s=100.0, context_token_s=1.0, attention_s=0.01)
    output = SchedulerOutput(0, (row(9, 1), row(2, 3)), 1, 4, ())
    # Contexts of 10 and 5; the tokens attend to 10, and to 3 + 4 + 5 positions.
    assert cost.step_time_s(output) == pytest.approx(1000 + 4 * 100 + 15 + 0.22)


def test_percentiles_are_nearest_rank() -> None:
    assert Percentiles.of(range(200, 0, -1)) == Percentiles(p50=100, p90=180, p99=198, max=200)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0, 3.0)


def test_one_request_by_hand() -> None:
    cost = CostModel(step_s=1.0, token_s=0.0, context_token_s=0.0, attention_s=0.0)
    trace = [TraceRequest(arrival_s=5.0, input_len=1000, output_len=3)]
    result = simulate(trace, CONFIG, cost)
    # Two chunks of 512 and 488 tokens, then two decode steps.
    assert (result.num_steps, result.duration_s) == (4, 9.0)
    assert (result.ttft_s.max, result.tpot_s.max, result.e2e_s.max) == (2.0, 1.0, 4.0)
    assert result.output_tokens_per_s == pytest.approx(3 / 9)
    assert result.total_tokens_per_s == pytest.approx(1003 / 9)
    assert result.peak_kv_usage == pytest.approx(63 / 2047)
    assert result.mean_budget_fill == pytest.approx(1002 / 512 / 4)


def test_the_same_trace_gives_the_same_result() -> None:
    trace = read_trace(LENGTHS / "lengths_sharegpt.csv", 60)
    config = replace(CONFIG, num_blocks=400)
    assert simulate(trace, config, CostModel()) == simulate(trace, config, CostModel())


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("name", ["lmsys", "sharegpt"])
def test_a_backlog_fills_the_budget_and_starves_nobody(name: str, num_steps_ahead: int) -> None:
    trace = read_trace(LENGTHS / f"lengths_{name}.csv", 200)
    trace = [replace(entry, output_len=min(entry.output_len, 8)) for entry in trace]
    num_tokens = sum(entry.input_len + entry.output_len - 1 for entry in trace)
    config = replace(CONFIG, max_num_batched_tokens=128)
    result = simulate(trace, config, CostModel(), num_steps_ahead=num_steps_ahead)
    # Every step is full but the last ones, which generate what the last prompts ask for.
    assert result.num_steps < num_tokens / 128 + 8
    assert result.num_preemptions == 0
    first_tokens = [timing.first_token_s for timing in result.requests]
    for index, first_token_s in enumerate(first_tokens):
        # Nobody waits for more than a few that came later.
        overtaken = sum(later < first_token_s for later in first_tokens[index + 1 :])
        assert overtaken < 32


def test_a_small_pool_preempts_and_still_serves_everybody() -> None:
    trace = read_trace(LENGTHS / "lengths_sharegpt.csv", 100)
    config = replace(CONFIG, num_blocks=260, max_model_len=4096)
    result = simulate(trace, config, CostModel())
    assert result.num_preemptions > 0
    assert result.peak_kv_usage == 1.0
    assert result.mean_kv_usage > 0.7
    assert len(result.requests) == 100
    assert result.e2e_s.max <= result.duration_s


def test_arrival_times_are_kept() -> None:
    trace = read_trace(LENGTHS / "lengths_splitwise.csv", 50)
    result = simulate(trace, CONFIG, CostModel())
    assert all(timing.ttft_s > 0 for timing in result.requests)
    assert result.duration_s > trace[-1].arrival_s > 0
    assert result.ttft_s.p99 < 1.0


def test_fault_16_a_long_prompt_does_not_block_short_ones() -> None:
    """One prompt of 32k tokens, and every 50 ms a short one that comes after it."""
    config = replace(CONFIG, num_blocks=4096, max_num_batched_tokens=2048, max_model_len=40_000)
    short = [TraceRequest(0.05 * index, 128, 16) for index in range(1, 20)]
    alone = simulate(short, config, CostModel())
    beside = simulate([TraceRequest(0.0, 32_768, 16), *short], config, CostModel())
    long, *others = beside.requests
    assert long.ttft_s > 1.0
    # A short request waits for the step that runs, the one launched ahead, and its own.
    longest_step_s = 2048 * CostModel().token_s + 0.08
    assert max(timing.ttft_s for timing in others) < 3 * longest_step_s
    assert max(timing.ttft_s for timing in others) < long.ttft_s / 3
    only_long = simulate([TraceRequest(0.0, 32_768, 16)], config, CostModel())
    assert long.ttft_s < 1.3 * only_long.ttft_s.max
    assert alone.ttft_s.max < longest_step_s


def test_a_shared_prefix_comes_from_the_cache() -> None:
    trace = [TraceRequest(float(index), 200, 4) for index in range(10)]
    distinct = simulate(trace, CONFIG, CostModel())
    shared = simulate(trace, CONFIG, CostModel(), shared_prefix_len=160)
    assert distinct.num_cached_tokens == 0
    assert shared.num_cached_tokens == 9 * 160
    assert shared.ttft_s.p50 < distinct.ttft_s.p50

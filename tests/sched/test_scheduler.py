import subprocess
import sys
from dataclasses import replace

import pytest

from scheduler import FinishReason, Request, Scheduler, SchedulerConfig, SchedulerOutput, TokenEvent

CONFIG = SchedulerConfig(
    num_blocks=101, block_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=256
)


def make(name: str, num_prompt: int, max_tokens: int = 8, **options) -> Request:
    """A request whose prompt is like no other's."""
    first = ord(name[0]) * 1000
    return Request(name, list(range(first, first + num_prompt)), max_tokens, **options)


def scheduler_with(*requests: Request, **limits) -> Scheduler:
    scheduler = Scheduler(replace(CONFIG, **limits))
    for request in requests:
        scheduler.add(request)
    return scheduler


def plan(output: SchedulerOutput | None) -> list[tuple[str, int, int]]:
    assert output is not None
    return [(row.request_id, row.start, row.num_tokens) for row in output.scheduled]


def update(scheduler: Scheduler, output: SchedulerOutput, token_id: int = 7) -> list[TokenEvent]:
    return scheduler.update(output, [(token_id,)] * len(output.scheduled))


def test_several_decode_steps_at_once() -> None:
    """As far as max_tokens, with blocks for all; one step where somebody prefills."""
    scheduler = scheduler_with(make("a", 4, max_tokens=4), make("b", 3, max_tokens=9))
    first = scheduler.schedule(num_steps=4)
    assert (first.num_steps, [row.num_steps for row in first.scheduled]) == (1, [1, 1])
    second = scheduler.schedule(num_steps=4)
    assert (second.num_steps, second.num_tokens) == (4, 2)
    assert [(row.start, row.num_steps, row.output_index) for row in second.scheduled] == [
        (4, 3, 1),
        (3, 4, 1),
    ]
    assert [len(row.new_block_ids) for row in second.scheduled] == [1, 1]
    update(scheduler, first)
    events = scheduler.update(second, [(10, 11, 12, 13), (20, 21, 22, 23)])
    assert events == [
        TokenEvent("a", (10, 11, 12), FinishReason.LENGTH),
        TokenEvent("b", (20, 21, 22, 23), None),
    ]
    scheduler.check()
    scheduler.add(make("c", 5))
    assert scheduler.schedule(num_steps=4).num_steps == 1


def test_a_stop_token_ends_several_steps_early() -> None:
    scheduler = scheduler_with(make("a", 4, max_tokens=9, stop_token_ids=frozenset({5})))
    step(scheduler)
    output = scheduler.schedule(num_steps=4)
    events = scheduler.update(output, [(1, 5, 6, 5)])
    assert events == [TokenEvent("a", (1, 5), FinishReason.STOP, 5)]
    assert not scheduler.has_unfinished
    assert scheduler.kv_usage == 0


def test_several_steps_preempt_nobody() -> None:
    scheduler = scheduler_with(
        make("a", 4, max_tokens=8), make("b", 4, max_tokens=8), num_blocks=5, max_model_len=12
    )
    step(scheduler)
    output = scheduler.schedule(num_steps=8)
    assert (output.num_steps, output.preempted) == (1, ())


def step(scheduler: Scheduler, token_id: int = 7) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    update(scheduler, output, token_id)
    scheduler.check()
    return output


def test_import_needs_no_array_library() -> None:
    code = "import sys, scheduler; print({'jax', 'jaxlib', 'numpy', 'scipy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make("a", 0), "request 'a' has an empty prompt"),
        (make("a", 1, max_tokens=0), "max_tokens 0; it must be at least 1"),
        (make("a", 249, max_tokens=8), "249 prompt tokens .* must not exceed max_model_len 256"),
        (make("a", 34, max_tokens=8), "needs 11 KV blocks .* but there are 10"),
        (make("taken", 1), "request 'taken' is already here"),
        (make("a", 1, arrival_index=0), "request 'a' was added before"),
    ],
)
def test_a_request_that_cannot_run_is_refused(request_: Request, message: str) -> None:
    scheduler = scheduler_with(make("taken", 33, max_tokens=8), num_blocks=11)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request_)
    assert scheduler.num_waiting == 1


def test_limits_can_be_reached_exactly() -> None:
    request = make("a", 33, max_tokens=8)  # 40 tokens are written, in 10 blocks
    scheduler = scheduler_with(request, num_blocks=11, max_model_len=41)
    while scheduler.has_unfinished:
        step(scheduler)
    assert len(request.output_token_ids) == 8
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "fault",
    [{"block_size": 0}, {"max_num_seqs": 0}, {"num_blocks": 1}, {"policy": "shortest"}],
)
def test_impossible_configurations_are_refused(fault: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(fault))):
        replace(CONFIG, **fault)


def test_decode_first_then_chunks_then_admissions_fill_the_budget() -> None:
    scheduler = scheduler_with(make("a", 4), make("b", 30), make("c", 10))
    assert plan(scheduler.schedule()) == [("a", 0, 4), ("b", 0, 9), ("c", 0, 3)]
    output = scheduler.schedule()
    assert plan(output) == [("a", 4, 1), ("b", 9, 12), ("c", 3, 3)]
    assert (output.num_decode, output.num_tokens) == (1, 16)
    scheduler.add(make("d", 3))
    output = scheduler.schedule()
    assert plan(output) == [("a", 5, 1), ("b", 21, 9), ("c", 6, 4), ("d", 0, 2)]
    assert [row.samples for row in output.scheduled] == [True, True, True, False]
    output = scheduler.schedule()
    assert plan(output) == [("a", 6, 1), ("b", 30, 1), ("c", 10, 1), ("d", 2, 1)]
    assert output.num_decode == 3
    assert output.scheduled[3].token_ids == [100_002]  # one token, and still a prompt's


def test_what_others_leave_of_the_budget_goes_back_to_the_long_prompt() -> None:
    scheduler = scheduler_with(make("a", 30), make("b", 2))
    assert plan(scheduler.schedule()) == [("a", 0, 14), ("b", 0, 2)]


def test_rows_carry_the_blocks_that_they_reach() -> None:
    scheduler = scheduler_with(make("a", 18), max_num_batched_tokens=10)
    outputs = [scheduler.schedule() for _ in range(5)]
    assert [list(output.scheduled[0].new_block_ids) for output in outputs] == [
        [1, 2, 3],
        [4, 5],
        [],
        [],
        [6],
    ]
    assert [output.scheduled[0].admitted for output in outputs] == [True] + 4 * [False]


def test_slots_are_the_lowest_free_ones() -> None:
    scheduler = scheduler_with(make("a", 1), make("b", 1), make("c", 1))
    assert [row.slot for row in step(scheduler).scheduled] == [0, 1, 2]
    scheduler.abort("a")
    scheduler.abort("b")
    scheduler.add(make("d", 1))
    assert {row.request_id: row.slot for row in step(scheduler).scheduled} == {"c": 2, "d": 0}


def test_max_num_seqs_bounds_the_running_requests() -> None:
    scheduler = scheduler_with(*(make(name, 1) for name in "abc"), max_num_seqs=2)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_steps_in_flight_stop_at_max_tokens() -> None:
    request = make("a", 2, max_tokens=3)
    scheduler = scheduler_with(request)
    outputs = [scheduler.schedule() for _ in range(3)]
    assert [output.scheduled[0].output_index for output in outputs] == [0, 1, 2]
    assert scheduler.schedule() is None
    events = [event for output in outputs for event in update(scheduler, output)]
    assert [event.finish_reason for event in events] == [None, None, FinishReason.LENGTH]
    assert not scheduler.has_unfinished


def test_a_stop_token_is_noticed_late_and_the_wasted_token_dropped() -> None:
    request = make("a", 2, stop_token_ids=frozenset({5}), min_tokens=1)
    scheduler = scheduler_with(request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert update(scheduler, first, 5) == [TokenEvent("a", (5,), None)]  # not before min_tokens
    assert update(scheduler, second, 5) == [TokenEvent("a", (5,), FinishReason.STOP, 5)]
    assert scheduler.kv_usage == 0
    assert update(scheduler, third, 6) == []
    assert request.output_token_ids == [5, 5]


def test_a_stop_token_as_the_last_token_is_a_stop() -> None:
    scheduler = scheduler_with(make("a", 2, max_tokens=1, stop_token_ids=frozenset({5})))
    assert update(scheduler, scheduler.schedule(), 5)[0].finish_reason is FinishReason.STOP


def test_steps_are_updated_in_their_order_and_whole() -> None:
    scheduler = scheduler_with(make("a", 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="step 1 is not the oldest step in flight"):
        update(scheduler, second)
    with pytest.raises(ValueError, match=r"step 0 has 1 rows in 1 steps, got .* for 0 rows"):
        scheduler.update(first, [])
    update(scheduler, first)
    with pytest.raises(ValueError, match="step 0 is not"):
        update(scheduler, first)


def test_tokens_in_flight_do_not_reach_a_new_request_of_the_same_name() -> None:
    scheduler = scheduler_with(make("a", 2))
    output = scheduler.schedule()
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    scheduler.add(successor := make("a", 2))
    assert update(scheduler, output) == []
    assert successor.output_token_ids == []
    assert len(update(scheduler, scheduler.schedule())) == 1


def test_finish_ends_a_request_early() -> None:
    scheduler = scheduler_with(request := make("a", 2))
    step(scheduler)
    assert scheduler.finish("a", FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.schedule() is None
    assert scheduler.kv_usage == 0


def two_that_outgrow_the_pool(**options) -> tuple[Scheduler, Request, Request]:
    """Both have 4 of 6 blocks' tokens left to generate when the pool is full."""
    first, second = make("a", 4, max_tokens=20), make("b", 4, max_tokens=16, **options)
    return scheduler_with(first, second, num_blocks=7), first, second


def test_the_last_arrived_is_preempted_and_computed_anew() -> None:
    scheduler, first, second = two_that_outgrow_the_pool()
    while not (output := step(scheduler, token_id=3)).preempted:
        pass
    assert output.preempted == ("b",)
    assert plan(output) == [("a", 12, 1)]
    assert (second.slot, second.block_ids, second.num_preemptions) == (-1, [], 1)
    scheduler.add(make("c", 1))
    known = second.prompt_token_ids + second.output_token_ids
    while not (output := step(scheduler, token_id=3)).scheduled[-1].admitted:
        pass
    assert first.finish_reason is FinishReason.LENGTH
    rows = {row.request_id: row for row in output.scheduled}
    assert list(rows) == ["b", "c"]
    assert known[rows["b"].start :] == rows["b"].token_ids
    assert rows["b"].samples
    assert rows["b"].output_index == len(known) - 4
    while scheduler.has_unfinished:
        step(scheduler, token_id=3)
    assert len(second.output_token_ids) == 16
    assert scheduler.num_preemptions == 1
    assert second.num_cached_tokens == 0


def test_a_preempted_request_keeps_its_tokens_in_flight_and_waits_for_them() -> None:
    scheduler, _, second = two_that_outgrow_the_pool()
    in_flight = [scheduler.schedule()]
    while not in_flight[-1].preempted:
        if len(in_flight) == 3:
            update(scheduler, in_flight.pop(0))
        in_flight.append(scheduler.schedule())
    num_known = len(second.output_token_ids)
    assert second.num_in_flight_tokens > 0
    scheduler.abort("a")
    assert scheduler.schedule() is None  # there is room now, but not all tokens are known
    for output in in_flight:
        update(scheduler, output)
    assert len(second.output_token_ids) > num_known
    output = step(scheduler)
    assert output.scheduled[0].admitted
    assert output.scheduled[0].output_index + 1 == len(second.output_token_ids)


def test_a_preempted_request_can_end_without_running_again() -> None:
    scheduler, _, second = two_that_outgrow_the_pool(stop_token_ids=frozenset({5}))
    output = scheduler.schedule()
    while not (following := scheduler.schedule()).preempted:
        update(scheduler, output)
        output = following
    events = scheduler.update(output, [(7,), (5,)])
    assert events[1] == TokenEvent("b", (5,), FinishReason.STOP, 5)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert second.slot == -1
    scheduler.check()


def test_abort_between_preemption_and_readmission() -> None:
    scheduler, _, _ = two_that_outgrow_the_pool()
    while not step(scheduler).preempted:
        pass
    assert scheduler.abort("b")
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.kv_usage == 0


def test_the_last_request_skips_a_step_rather_than_losing_its_blocks() -> None:
    scheduler = scheduler_with(make("a", 4, max_tokens=5), make("b", 3, max_tokens=9), num_blocks=5)
    outputs = [scheduler.schedule() for _ in range(6)]
    assert [len(output.scheduled) for output in outputs] == [2, 2, 2, 2, 2, 1]
    assert scheduler.schedule() is None  # each holds 2 of 4 blocks, and a's tokens are in flight
    for output in outputs:
        update(scheduler, output)
    assert plan(scheduler.schedule()) == [("b", 8, 1)]
    assert scheduler.num_preemptions == 0


def test_under_the_priority_policy_the_least_urgent_is_preempted() -> None:
    urgent = make("b", 4, max_tokens=16, priority=-1)
    scheduler = scheduler_with(
        make("a", 4, max_tokens=16, priority=2), urgent, num_blocks=7, policy="priority"
    )
    assert plan(step(scheduler)) == [("b", 0, 4), ("a", 0, 4)]
    while not (output := step(scheduler)).preempted:
        pass
    assert output.preempted == ("a",)


def test_an_admission_leaves_a_block_for_each_running_request() -> None:
    scheduler = scheduler_with(make("a", 4, 5), make("b", 12, 1), num_blocks=5)
    assert plan(step(scheduler)) == [("a", 0, 4)]
    scheduler = scheduler_with(make("a", 4, 5), make("b", 12, 1), num_blocks=6)
    assert plan(step(scheduler)) == [("a", 0, 4), ("b", 0, 12)]


def test_equal_prompts_share_blocks_once_their_step_is_launched() -> None:
    first, second, third = (Request(name, list(range(9)), 4) for name in "abc")
    scheduler = scheduler_with(first, second, max_num_batched_tokens=32)
    assert plan(scheduler.schedule()) == [("a", 0, 9), ("b", 0, 9)]
    scheduler.add(third)
    output = scheduler.schedule()
    assert plan(output) == [("a", 9, 1), ("b", 9, 1), ("c", 8, 1)]
    assert output.scheduled[2].new_block_ids[:2] == first.block_ids[:2]
    assert third.num_cached_tokens == 8
    stats = scheduler.prefix_stats
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (27, 8)


def test_the_prefix_cache_outlives_requests_until_it_is_reset() -> None:
    scheduler = scheduler_with(Request("a", list(range(9)), 1))
    assert scheduler.schedule() is not None
    assert not scheduler.reset_prefix_cache()
    scheduler.abort("a")
    scheduler.add(Request("b", list(range(9)), 1))
    assert plan(scheduler.schedule()) == [("b", 8, 1)]
    scheduler.abort("b")
    assert scheduler.reset_prefix_cache()
    scheduler.add(Request("c", list(range(9)), 1))
    assert plan(scheduler.schedule()) == [("c", 0, 9)]


def test_a_budget_below_the_running_requests_serves_the_first() -> None:
    requests = [make(name, 1, max_tokens=4) for name in "abcd"]
    scheduler = scheduler_with(*requests, max_num_batched_tokens=2)
    while scheduler.has_unfinished:
        assert step(scheduler).num_tokens <= 2
    assert all(len(request.output_token_ids) == 4 for request in requests)

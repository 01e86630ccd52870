"""The scheduler against a device that remembers which token every KV position was computed from.

The fake model's state after a token is a digest of the whole prefix, and its next token follows
from that. The device keeps that digest at (block, offset), as a KV cache would. A step therefore
fails at once if a block table leads anywhere but to the very prefix of its request, whatever went
wrong: sharing, eviction, reference counts, order of steps.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler import (
    FinishReason,
    Request,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    block_manager,
)
from scheduler.block_manager import BlockManager
from scheduler.block_pool import BlockPool
from scheduler.prefix_cache import PrefixCache

VOCAB = 4
SHARED_PREFIX = [0, 1, 2, 3, 3, 1, 0, 2, 1]
MAX_IN_FLIGHT = 3


def model_state(previous: bytes, token_id: int) -> bytes:
    return blake2b(previous + bytes([token_id]), digest_size=8).digest()


@dataclass(eq=False)
class Solo:
    """What a request must produce: its run alone, with nothing shared and nothing preempted."""

    request: Request
    token_ids: list[int] = field(init=False)
    kv: list[bytes] = field(init=False)
    expected: list[int] = field(init=False)
    reason: FinishReason = FinishReason.LENGTH
    received: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        self.token_ids, self.kv = list(request.prompt_token_ids), []
        num_prompt = len(self.token_ids)
        for position in range(num_prompt + request.max_tokens):
            self.kv.append(model_state(self.kv[-1] if self.kv else b"", self.token_ids[position]))
            if position >= num_prompt - 1:
                self.token_ids.append(self.kv[-1][0] % VOCAB)
        self.expected = self.token_ids[num_prompt : num_prompt + request.max_tokens]
        for index, token_id in enumerate(self.expected):
            if index >= request.min_tokens and token_id in request.stop_token_ids:
                self.expected, self.reason = self.expected[: index + 1], FinishReason.STOP
                break


class Device:
    """Runs steps in the order of their launch; its state is what an accelerator would hold."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.blocks = [[b""] * config.block_size for _ in range(config.num_blocks)]
        self.tables: list[list[int]] = [[] for _ in range(config.max_num_seqs)]
        self.last_token: list[int | None] = [None] * config.max_num_seqs

    def read(self, row: ScheduledRequest, num_tokens: int) -> list[bytes]:
        table = self.tables[row.slot]
        return [state for block in table for state in self.blocks[block]][:num_tokens]

    def run(self, output: SchedulerOutput, solos: list[Solo]) -> list[tuple[int, ...]]:
        for row, solo in zip(output.scheduled, solos, strict=True):
            if row.admitted:
                self.tables[row.slot] = []
            self.tables[row.slot] += row.new_block_ids
            assert all(0 < block < len(self.blocks) for block in row.new_block_ids)
            assert self.read(row, row.start) == solo.kv[: row.start]
        rows = list(zip(output.scheduled, solos, strict=True))
        steps = [self.run_step(step, rows) for step in range(output.num_steps)]
        return list(zip(*steps, strict=True))

    def run_step(self, step: int, rows: list[tuple[ScheduledRequest, Solo]]) -> list[int]:
        active = [(row, solo) for row, solo in rows if step < row.num_steps]
        for row, solo in active:
            start, end = row.start + step, row.start + step + row.num_tokens
            token_ids = [self.last_token[row.slot]] if row.token_ids is None else row.token_ids
            assert list(token_ids) == solo.token_ids[start:end]
            for position in range(start, end):
                index, offset = divmod(position, self.block_size)
                self.blocks[self.tables[row.slot][index]][offset] = solo.kv[position]
        for row, solo in active:
            context = self.read(row, row.start + step + row.num_tokens)
            assert context == solo.kv[: row.start + step + row.num_tokens]
            self.last_token[row.slot] = context[-1][0] % VOCAB if row.samples else None
        return [
            self.last_token[row.slot] if row.samples and step < row.num_steps else -1
            for row, _ in rows
        ]


REQUESTS = st.tuples(
    st.integers(0, 9).map(str),  # name
    st.integers(0, len(SHARED_PREFIX)),
    st.sampled_from([[], [0], [0, 3], [1, 2, 3], [2, 1, 0, 1]]),  # the prompt's own end
    st.integers(1, 16),  # max_tokens
    st.sampled_from([(), (), (1,), (0, 2)]).map(frozenset),
    st.integers(0, 3),  # min_tokens
    st.integers(0, 2),  # priority
    st.sampled_from([True, True, True, False]),  # use_prefix_cache
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 1, 2, 3, 4]),
        pool_tokens=st.integers(12, 30),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 14),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(self, block_size, pool_tokens, **limits) -> None:
        num_blocks = 1 + pool_tokens // block_size
        self.config = SchedulerConfig(num_blocks, block_size, max_model_len=28, **limits)
        self.scheduler = Scheduler(self.config)
        self.device = Device(self.config)
        self.solos: dict[str, Solo] = {}
        self.in_flight: deque[tuple[SchedulerOutput, list[Solo], list[tuple[int, ...]]]] = deque()

    @rule(drawn=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, drawn) -> None:
        for name, num_shared, tail, *limits in drawn:
            prompt = SHARED_PREFIX[:num_shared] + tail
            request = Request(name, prompt, *limits)
            num_written = len(prompt) + request.max_tokens - 1
            fits = num_written <= (self.config.num_blocks - 1) * self.config.block_size
            fits = fits and num_written < self.config.max_model_len
            if prompt and fits and name not in self.solos:
                self.scheduler.add(request)
                self.solos[name] = Solo(request)
            else:
                with pytest.raises(ValueError, match=f"request '{name}'"):
                    self.scheduler.add(request)

    @precondition(lambda self: self.solos)
    @rule(index=st.integers(0, 9), reason=st.sampled_from([FinishReason.STOP, None]))
    def leave(self, index, reason) -> None:
        name = list(self.solos)[index % len(self.solos)]
        assert self.scheduler.finish(name, reason) if reason else self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        assert self.solos.pop(name).request.finish_reason is (reason or FinishReason.ABORT)
        self.scheduler.check()

    @precondition(lambda self: self.solos and len(self.in_flight) < MAX_IN_FLIGHT)
    @rule(num_steps=st.sampled_from([1, 1, 2, 4]))
    def schedule(self, num_steps=1) -> None:
        findable = self.findable_blocks()
        output = self.scheduler.schedule(num_steps)
        self.scheduler.check()
        assert self.scheduler.num_running <= self.config.max_num_seqs
        self.check_budget(output, findable)
        if output is None:
            assert self.in_flight or not self.solos, "nothing runs, and nothing will"
            return
        self.check_rows(output)
        solos = [self.solos[row.request_id] for row in output.scheduled]
        self.in_flight.append((output, solos, self.device.run(output, solos)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self) -> None:
        output, solos, sampled = self.in_flight.popleft()
        present = [
            solo.request.request_id
            for row, solo in zip(output.scheduled, solos, strict=True)
            if row.samples and solo in self.solos.values()
        ]
        events = self.scheduler.update(output, sampled)
        self.scheduler.check()
        assert [event.request_id for event in events] == present
        for event in events:
            solo = self.solos[event.request_id]
            solo.received += event.token_ids
            assert solo.received == solo.expected[: len(solo.received)]
            assert solo.received == solo.request.output_token_ids
            is_last = len(solo.received) == len(solo.expected)
            assert event.finish_reason is (solo.reason if is_last else None)
            is_stop = event.finish_reason is FinishReason.STOP
            assert event.stop_token_id == (event.token_ids[-1] if is_stop else None)
            if is_last:
                del self.solos[event.request_id]

    @precondition(lambda self: self.solos)
    @rule(
        num_rounds=st.integers(1, 12),
        num_ahead=st.integers(0, MAX_IN_FLIGHT - 1),
        num_steps=st.sampled_from([1, 1, 3]),
    )
    def run(self, num_rounds, num_ahead, num_steps=1) -> None:
        for _ in range(num_rounds if self.solos else 0):
            num_before = len(self.in_flight)
            if num_before < MAX_IN_FLIGHT:
                self.schedule(num_steps)
            if len(self.in_flight) == num_before > 0:  # nothing runs before the next update
                self.update()
            while len(self.in_flight) > num_ahead:
                self.update()

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache() == (self.scheduler.num_running == 0)
        self.scheduler.check()

    def teardown(self) -> None:
        """Whatever is left finishes, and leaves nothing behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(300):
            if not self.scheduler.has_unfinished:
                break
            self.run(1, 1)
        while self.in_flight:
            self.update()
        assert not self.solos, "a request starves"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.kv_usage == 0
        self.scheduler.check()

    def order(self, request: Request) -> tuple[int, int]:
        is_fcfs = self.config.policy == "fcfs"
        return (0 if is_fcfs else request.priority, request.arrival_index)

    def check_rows(self, output: SchedulerOutput) -> None:
        rows = output.scheduled
        assert 0 < output.num_tokens <= self.config.max_num_batched_tokens
        assert output.num_tokens == sum(row.num_tokens for row in rows)
        assert [row.token_ids is None for row in rows] == [
            index < output.num_decode for index in range(len(rows))
        ]
        assert len({row.slot for row in rows}) == len({row.request_id for row in rows}) == len(rows)
        assert not {row.request_id for row in rows} & set(output.preempted)
        for row in rows:
            request = self.solos[row.request_id].request
            assert row.slot == request.slot
            assert row.num_tokens == (1 if row.token_ids is None else len(row.token_ids))
            newest = len(request.prompt_token_ids) + row.output_index - 1
            assert row.samples == (row.start + row.num_tokens - 1 == newest)
            assert row.output_index < request.max_tokens
        if output.preempted:
            assert not any(row.admitted for row in rows)
            winners = [self.solos[row.request_id].request for row in rows[: output.num_decode]]
            losers = [self.solos[name].request for name in output.preempted]
            assert max(map(self.order, winners)) < min(map(self.order, losers))

    def findable_blocks(self) -> dict[bytes, int]:
        cached = self.scheduler._blocks.pool.cached_blocks
        return {self.device.blocks[block][-1]: block for block in cached}

    def check_budget(self, output: SchedulerOutput | None, findable: dict[bytes, int]) -> None:
        """A step that is not full leaves nothing undone that could have run."""
        if output is not None and output.num_tokens == self.config.max_num_batched_tokens:
            return
        rows = () if output is None else output.scheduled
        preempted = () if output is None else output.preempted
        scheduled = {row.request_id for row in rows}
        requests = [solo.request for solo in self.solos.values()]
        running = [request for request in requests if request.slot >= 0]
        waiting = sorted((r for r in requests if r.slot < 0), key=self.order)
        pool = self.scheduler._blocks.pool
        for request in running:
            assert not request.is_prefilling
            num_sampled = len(request.output_token_ids) + request.num_in_flight_tokens
            if request.request_id not in scheduled and num_sampled < request.max_tokens:
                assert pool.num_free == 0
                assert request is max(running, key=self.order)
        if not waiting or preempted or len(running) == self.config.max_num_seqs:
            return
        first = waiting[0]
        num_shared = 0
        if first.use_prefix_cache:
            overwritten = {block for row in rows for block in row.new_block_ids}
            kv = self.solos[first.request_id].kv[: first.num_tokens - 1]
            for state in kv[self.config.block_size - 1 :: self.config.block_size]:
                block = findable.get(state)
                if block not in pool.cached_blocks or block in overwritten:
                    break
                num_shared += pool.ref_count(block) > 0
        num_needed = -(-first.num_tokens // self.config.block_size) - num_shared
        assert first.num_in_flight_tokens > 0 or num_needed + len(running) > pool.num_free


def run_machine(phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Without Phase.shrink a failure is left as it was found. The examples are the same each time,
    as long as the same modules are loaded: Hypothesis tries the constants in them."""
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=2000,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_every_request_gets_the_tokens_of_its_solo_run() -> None:
    run_machine()


def keep_one_reference(manager: BlockManager, request: Request) -> None:
    request.block_ids.pop(0)
    FREE(manager, request)


def free_twice(manager: BlockManager, request: Request) -> None:
    for block in request.block_ids:
        manager.pool.release(block)
    FREE(manager, request)


def release_twice_unnoticed(pool: BlockPool, block: int) -> None:
    RELEASE(pool, block)
    if pool._ref_counts[block] == 0 and block not in pool._cached:
        pool._free.append(block)


def release_before_the_last_holder(pool: BlockPool, block: int) -> None:
    pool._ref_counts[block] = 1
    RELEASE(pool, block)


def allocate_next_block(pool: BlockPool) -> int:
    return ALLOCATE(pool) % pool.num_total + 1


def evict_in_use(pool: BlockPool) -> int:
    in_use = [block for block in pool._cached if pool.ref_count(block)]
    if in_use and not pool._free:
        pool._cached.remove(in_use[0])
        pool._on_evict(in_use[0])
        return in_use[0]
    return ALLOCATE(pool)


def round_blocks_down(manager: BlockManager, num_tokens: int) -> int:
    return max(1, num_tokens // manager.block_size)


def digest_without_parent(parent: bytes, token_ids: list[int]) -> bytes:
    return DIGEST(b"", token_ids)


def register_the_next_block(cache: PrefixCache, digest: bytes, block: int) -> bool:
    return REGISTER(cache, digest, block + 1)


def share_one_block_more(cache: PrefixCache, digests: list[bytes], max_blocks: int) -> list[int]:
    return LOOKUP(cache, digests, max_blocks + 1)


def commit_what_is_allocated(manager: BlockManager, request: Request) -> None:
    num_computed = request.num_computed_tokens
    request.num_computed_tokens = len(request.block_ids) * manager.block_size
    COMMIT(manager, request)
    request.num_computed_tokens = num_computed


COMMIT, FREE, DIGEST = BlockManager.commit, BlockManager.free, block_manager.block_digest
ALLOCATE, RELEASE = BlockPool.allocate, BlockPool.release
LOOKUP, REGISTER = PrefixCache.lookup, PrefixCache.register

FAULTS: list[tuple[object, str, Callable]] = [
    (BlockManager, "free", keep_one_reference),
    (BlockManager, "free", free_twice),
    (BlockManager, "num_blocks_for", round_blocks_down),
    (BlockManager, "commit", commit_what_is_allocated),
    (BlockPool, "release", release_twice_unnoticed),
    (BlockPool, "release", release_before_the_last_holder),
    (BlockPool, "allocate", allocate_next_block),
    (BlockPool, "allocate", evict_in_use),
    (PrefixCache, "register", register_the_next_block),
    (PrefixCache, "lookup", share_one_block_more),
    (block_manager, "block_digest", digest_without_parent),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=[f[2].__name__ for f in FAULTS])
@pytest.mark.parametrize("is_checked", [True, False], ids=["", "by_the_device_alone"])
def test_a_planted_fault_is_found(monkeypatch, owner, name, fault, is_checked) -> None:
    monkeypatch.setattr(owner, name, fault)
    if not is_checked:
        monkeypatch.setattr(Scheduler, "check", lambda scheduler: None)
    with pytest.raises((AssertionError, RuntimeError, LookupError)):
        run_machine(phases=(Phase.generate,))

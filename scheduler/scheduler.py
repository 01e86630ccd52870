"""Decides which tokens of which requests run in each step."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.output import ScheduledRequest, SchedulerOutput, TokenEvent
from scheduler.policy import WaitingQueue, order_key
from scheduler.prefix_cache import PrefixCacheStats
from scheduler.request import FinishReason, Request


@dataclass(slots=True)
class _Chunk:
    request: Request
    num_tokens: int
    admitted: bool


class Scheduler:
    """Continuous batching over a paged KV cache, as plain bookkeeping.

    `schedule` plans a step and `update` reports its tokens. Between the two the step is in flight,
    and more steps may be scheduled, provided that they are launched in this order on a device
    that runs them in this order. The decisions depend on nothing but the calls made.

    Each step takes one token of every request that is decoding, then chunks of the prompts that
    are partly computed, then requests from the waiting queue, until `max_num_batched_tokens` are
    reached. When a decoding request finds no free block, the last request in the policy's order
    is preempted: it loses its blocks, waits first in line, and is computed anew from its known
    tokens. A request never preempts one that comes before it, so the first always progresses.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._blocks = BlockManager(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self._key = order_key(config.policy)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._key)
        self._running: list[Request] = []  # in the policy's order
        self._free_slots = list(range(config.max_num_seqs))  # a heap: the lowest is taken first
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def kv_usage(self) -> float:
        """The fraction of the KV blocks that running requests hold, 0 to 1."""
        return self._blocks.pool.num_used / self._blocks.pool.num_total

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    @property
    def prefix_stats(self) -> PrefixCacheStats:
        return self._blocks.stats

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes (the weights changed). False if a request holds blocks."""
        return self._blocks.reset_cache()

    def add(self, request: Request) -> None:
        """Puts a request in the waiting queue.

        Raises:
            ValueError: it can never run here, or its id belongs to an unfinished request.
        """
        name, config = request.request_id, self.config
        num_prompt = len(request.prompt_token_ids)
        if name in self._requests:
            raise ValueError(f"request {name!r} is already here; ids must be unique")
        if request.arrival_index >= 0:
            raise ValueError(f"request {name!r} was added before; make a new Request")
        if num_prompt == 0:
            raise ValueError(f"request {name!r} has an empty prompt")
        if request.max_tokens < 1:
            raise ValueError(
                f"request {name!r} has max_tokens {request.max_tokens}; it must be at least 1"
            )
        if num_prompt + request.max_tokens > config.max_model_len:
            raise ValueError(
                f"request {name!r} has {num_prompt} prompt tokens and max_tokens "
                f"{request.max_tokens}; together they must not exceed max_model_len "
                f"{config.max_model_len}"
            )
        # The last token is sampled, but never written to the cache.
        num_blocks = self._blocks.num_blocks_for(num_prompt + request.max_tokens - 1)
        if num_blocks > self._blocks.pool.num_total:
            raise ValueError(
                f"request {name!r} needs {num_blocks} KV blocks for {num_prompt} prompt tokens and "
                f"max_tokens {request.max_tokens}, but there are {self._blocks.pool.num_total}"
            )
        request.arrival_index = self._num_added
        self._num_added += 1
        self._requests[name] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """Drops a request at once, whatever its state. False if it is not (any longer) here."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """Ends a request early, for example because its text contains a stop string.

        Its blocks are free for the next step; tokens still in flight are ignored when they
        arrive. False if the request is not (any longer) here.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove(request, reason)
        return True

    def schedule(self, num_steps: int = 1) -> SchedulerOutput | None:
        """Plans the next step; None if nothing can run (before a step in flight is updated).

        Where all rows decode and nobody can be admitted, `num_steps` steps are planned at once,
        if there are blocks for all their tokens without preempting anybody.
        """
        requests, preempted = self._decoding_requests()
        num_decode = len(requests)
        chunks = self._plan_chunks(self.config.max_num_batched_tokens - num_decode, preempted)
        if not requests and not chunks:
            return None
        if chunks or preempted or num_steps == 1 or not self._have_room(requests, num_steps):
            num_steps = 1
        rows = self._decode_rows(requests, num_steps)
        for chunk in chunks:
            rows.append(self._prefill_row(chunk))
            requests.append(chunk.request)
        output = SchedulerOutput(
            step_id=self._num_steps,
            scheduled=tuple(rows),
            num_decode=num_decode,
            num_tokens=num_decode + sum(chunk.num_tokens for chunk in chunks),
            preempted=tuple(preempted),
            num_steps=num_steps,
        )
        self._num_steps += 1
        self._in_flight.append((output, requests))
        return output

    def update(
        self, output: SchedulerOutput, token_ids: Sequence[tuple[int, ...]]
    ) -> list[TokenEvent]:
        """Takes in the tokens that the oldest step in flight sampled.

        Args:
            output: what `schedule` returned for that step.
            token_ids: for each of `output.scheduled`, one a step; ignored where `samples` is
                False, for requests that have left since, and past a row's own `num_steps`.

        Raises:
            ValueError: `output` is not the oldest step in flight, or `token_ids` does not fit it.
        """
        if not self._in_flight or self._in_flight[0][0].step_id != output.step_id:
            raise ValueError(f"step {output.step_id} is not the oldest step in flight")
        rows, num_steps = output.scheduled, output.num_steps
        lengths = set(map(len, token_ids))
        if len(token_ids) != len(rows) or lengths != {num_steps}:
            raise ValueError(
                f"step {output.step_id} has {len(rows)} rows in {num_steps} steps, got token ids "
                f"for {len(token_ids)} rows in {sorted(lengths)} steps"
            )
        events = []
        _, requests = self._in_flight.popleft()
        for row, request, sampled in zip(rows, requests, token_ids, strict=True):
            if row.samples and request.finish_reason is None:
                taken = sampled if row.num_steps == num_steps else sampled[: row.num_steps]
                events.append(self._take(request, row.output_index, taken))
        return events

    def _take(self, request: Request, output_index: int, taken: tuple[int, ...]) -> TokenEvent:
        """The next sampled tokens, from `output_index` on; the request may leave with one."""
        reason = stop_token_id = None
        if not request.stop_token_ids.isdisjoint(taken):
            for i, token_id in enumerate(taken):
                if token_id in request.stop_token_ids and output_index + i >= request.min_tokens:
                    reason, stop_token_id, taken = FinishReason.STOP, token_id, taken[: i + 1]
                    break
        if reason is None and output_index + len(taken) == request.max_tokens:
            reason = FinishReason.LENGTH
        request.output_token_ids += taken
        if request.slot >= 0:
            self._blocks.commit(request)
        if reason is not None:
            self._remove(request, reason)
        return TokenEvent(request.request_id, taken, reason, stop_token_id)

    def check(self) -> None:
        """AssertionError unless the bookkeeping is consistent. For tests: it looks at all of it."""
        assert len(self._requests) == self.num_running + self.num_waiting
        assert self._running == sorted(self._running, key=self._key)
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs))
        self._blocks.check(self._running)

    def _decoding_requests(self) -> tuple[list[Request], list[str]]:
        """Those that decode, each with a block for its next token, and the ids of those preempted
        for these blocks.

        Blocks are taken in the policy's order and victims from its end, so that a victim is none
        of them. A request that is last itself keeps its blocks and skips the step.
        """
        requests: list[Request] = []
        preempted: list[str] = []
        block_size = self.config.block_size
        for request in self._running:  # victims leave its end, behind the current one
            if request.is_prefilling or request.num_sampled_tokens == request.max_tokens:
                continue
            if len(requests) == self.config.max_num_batched_tokens:
                break
            if request.num_computed_tokens == len(request.block_ids) * block_size:
                if not self._make_room(request, preempted):
                    break
                self._blocks.grow(request)
            requests.append(request)
        return requests, preempted

    def _have_room(self, requests: list[Request], num_steps: int) -> bool:
        """Whether these can decode for `num_steps` steps with the blocks that are free, and one of
        them for more than one."""
        if all(r.num_sampled_tokens + 1 == r.max_tokens for r in requests):
            return False
        num_blocks_for = self._blocks.num_blocks_for
        num_missing = sum(
            num_blocks_for(r.num_computed_tokens + num_steps) - len(r.block_ids) for r in requests
        )
        return num_missing <= self._blocks.pool.num_free

    def _decode_rows(self, requests: list[Request], num_steps: int) -> list[ScheduledRequest]:
        """Each request's next `num_steps` tokens, or as many as its max_tokens allows."""
        rows = []
        block_size = self.config.block_size
        for request in requests:
            start, output_index = request.num_computed_tokens, request.num_sampled_tokens
            num_left = request.max_tokens - output_index
            length = num_steps if num_steps < num_left else num_left
            end = start + length
            request.num_computed_tokens = end
            request.num_sampled_tokens = output_index + length
            block_ids = request.block_ids
            while len(block_ids) * block_size < end:
                self._blocks.grow(request)
            num_before = -(-start // block_size)
            rows.append(
                ScheduledRequest(
                    request_id=request.request_id,
                    slot=request.slot,
                    start=start,
                    num_tokens=1,
                    token_ids=None,
                    new_block_ids=block_ids[num_before:] if len(block_ids) > num_before else (),
                    samples=True,
                    output_index=output_index,
                    admitted=False,
                    num_steps=length,
                )
            )
        return rows

    def _make_room(self, request: Request, preempted: list[str]) -> bool:
        """Preempts from the end of the order until a block is free, or `request` is last: False."""
        while self._blocks.pool.num_free == 0:
            victim = self._running[-1]
            if victim is request:
                return False
            self._running.pop()
            self._give_back(victim)
            victim.num_preemptions += 1
            self._num_preemptions += 1
            self._waiting.push(victim)
            preempted.append(victim.request_id)
        return True

    def _plan_chunks(self, budget: int, preempted: list[str]) -> list[_Chunk]:
        """Divides the rest of the token budget among prompts, in the policy's order.

        A prompt that cannot be completed in this step leaves a quarter to those behind it, so
        that a short prompt need not wait for the end of a long one; what they don't use is the
        long one's again. Nobody is admitted in a step that preempts.
        """
        chunks: list[_Chunk] = []
        for request in self._running:
            if budget == 0:
                break
            if request.is_prefilling:
                budget -= self._append_chunk(chunks, request, budget, admitted=False)
        while budget and not preempted and self._free_slots and self._waiting:
            if not self._admit(request := self._waiting.peek()):
                break
            budget -= self._append_chunk(chunks, request, budget, admitted=True)
        for chunk in chunks:
            num_left = chunk.request.num_tokens - chunk.request.num_computed_tokens
            extra = min(budget, num_left - chunk.num_tokens)
            chunk.num_tokens += extra
            budget -= extra
        return chunks

    def _append_chunk(
        self, chunks: list[_Chunk], request: Request, budget: int, *, admitted: bool
    ) -> int:
        num_tokens = request.num_tokens - request.num_computed_tokens
        if num_tokens > budget:
            num_tokens = budget - budget // 4
        chunks.append(_Chunk(request, num_tokens, admitted))
        return num_tokens

    def _admit(self, request: Request) -> bool:
        """Moves the first waiting request to the running ones, if there is room for all of it.

        One block is left free for each running request, so that an admission causes no preemption
        before every one of them has filled a block.
        """
        if request.num_in_flight_tokens > 0 or not self._blocks.admit(request, self.num_running):
            return False
        self._waiting.pop()
        request.slot = heappop(self._free_slots)
        request.is_prefilling = True
        insort(self._running, request, key=self._key)
        return True

    def _prefill_row(self, chunk: _Chunk) -> ScheduledRequest:
        request = chunk.request
        start = request.num_computed_tokens
        end = start + chunk.num_tokens
        samples = end == request.num_tokens
        output_index = len(request.output_token_ids)
        request.num_computed_tokens = end
        request.is_prefilling = not samples
        request.num_sampled_tokens += samples
        self._blocks.commit(request)
        first_new_block = 0 if chunk.admitted else self._blocks.num_blocks_for(start)
        return ScheduledRequest(
            request_id=request.request_id,
            slot=request.slot,
            start=start,
            num_tokens=chunk.num_tokens,
            token_ids=request.token_slice(start, end),
            new_block_ids=request.block_ids[first_new_block : self._blocks.num_blocks_for(end)],
            samples=samples,
            output_index=output_index,
            admitted=chunk.admitted,
        )

    def _remove(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.request_id]
        if request.slot < 0:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self._blocks.free(request)
        heappush(self._free_slots, request.slot)
        request.slot = -1
        request.is_prefilling = False

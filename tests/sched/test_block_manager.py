from collections.abc import Sequence

import pytest

from scheduler import Request
from scheduler.block_manager import BlockManager
from scheduler.prefix_cache import block_digest


def compute(manager: BlockManager, request: Request) -> None:
    """As if steps had computed all known tokens."""
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)


def admitted(manager: BlockManager, prompt: Sequence[int], **options) -> Request:
    request = Request("r", list(prompt), max_tokens=8, **options)
    assert manager.admit(request, num_reserved=0)
    return request


def test_a_digest_names_the_whole_prefix() -> None:
    first, other = block_digest(b"", [1, 2]), block_digest(b"", [2, 1])
    assert block_digest(b"", [1, 2]) == first != other
    assert block_digest(first, [3, 4]) != block_digest(other, [3, 4])
    assert block_digest(b"", [1, 2**40]) != block_digest(b"", [1, 0])


def test_full_blocks_are_shared_and_partial_ones_are_not() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    first = admitted(manager, [1, 2, 3, 4, 5])
    assert (first.block_ids, first.num_computed_tokens) == ([1, 2, 3], 0)
    compute(manager, first)
    second = admitted(manager, [1, 2, 3, 4, 5])
    assert (second.block_ids, second.num_cached_tokens) == ([1, 2, 4], 4)
    manager.check([first, second])
    assert (manager.stats.num_query_tokens, manager.stats.num_hit_tokens) == (10, 4)


def test_the_last_token_is_always_computed() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    compute(manager, admitted(manager, [1, 2, 3, 4]))
    assert admitted(manager, [1, 2, 3, 4]).num_cached_tokens == 2
    assert admitted(manager, [1, 2, 3, 4, 9]).num_cached_tokens == 4
    assert admitted(manager, [1]).num_cached_tokens == 0


def test_blocks_not_computed_yet_are_not_shared() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    first = admitted(manager, [1, 2, 3, 4, 5])
    assert admitted(manager, [1, 2, 3]).num_cached_tokens == 0
    first.num_computed_tokens = 3
    manager.commit(first)
    assert admitted(manager, [1, 2, 3, 4, 5]).num_cached_tokens == 2


def test_tokens_that_are_written_but_not_known_are_not_shared() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    first = admitted(manager, [1])
    first.num_computed_tokens = 2  # a decode step in flight wrote the second
    manager.commit(first)
    assert len(manager.cache) == 0
    first.output_token_ids.append(7)
    manager.commit(first)
    assert admitted(manager, [1, 7, 3]).num_cached_tokens == 2


def test_a_chain_is_evicted_from_its_end() -> None:
    manager = BlockManager(num_blocks=5, block_size=2, enable_prefix_caching=True)
    first = admitted(manager, range(8))
    compute(manager, first)
    manager.free(first)
    assert manager.pool.num_free == 4
    other = admitted(manager, [90, 91])
    manager.free(other)
    again = admitted(manager, range(8))
    assert again.num_cached_tokens == 6
    manager.check([again])


def test_a_request_can_decline_the_cache_and_still_feed_it() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    compute(manager, admitted(manager, [1, 2, 3], use_prefix_cache=False))
    assert admitted(manager, [1, 2, 3], use_prefix_cache=False).num_cached_tokens == 0
    assert manager.stats.num_query_tokens == 0
    assert admitted(manager, [1, 2, 3]).num_cached_tokens == 2


def test_without_prefix_caching_nothing_is_hashed_or_shared() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=False)
    first = admitted(manager, [1, 2, 3])
    compute(manager, first)
    second = admitted(manager, [1, 2, 3])
    assert second.num_cached_tokens == 0
    assert first.block_digests == second.block_digests == []
    manager.check([first, second])


@pytest.mark.parametrize(("num_reserved", "fits"), [(0, True), (1, True), (2, False)])
def test_admission_leaves_the_reserve_free(num_reserved: int, fits: bool) -> None:
    manager = BlockManager(num_blocks=5, block_size=2, enable_prefix_caching=True)
    request = Request("r", [1, 2, 3, 4, 5], max_tokens=1)
    assert manager.admit(request, num_reserved) == fits
    assert manager.pool.num_free == (1 if fits else 4)
    manager.check([request])


def test_blocks_of_running_requests_count_as_room_and_idle_cached_ones_as_free() -> None:
    manager = BlockManager(num_blocks=5, block_size=2, enable_prefix_caching=True)
    running = admitted(manager, range(8))
    compute(manager, running)
    follower = Request("r", list(range(7)), max_tokens=1)
    assert not manager.admit(follower, 0)  # shares 3 blocks, but needs a fourth of its own
    manager.free(running)
    assert not manager.admit(follower, 1)
    assert manager.admit(follower, 0)
    assert follower.num_cached_tokens == 6
    manager.check([follower])


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counted(parent: bytes, token_ids: Sequence[int]) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return block_digest(parent, token_ids)

    monkeypatch.setattr("scheduler.block_manager.block_digest", counted)
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    request = Request("r", list(range(8)), max_tokens=4)
    assert not manager.admit(request, 9)
    for _ in range(3):
        assert manager.admit(request, 0)
        compute(manager, request)
        manager.free(request)
        request.num_preemptions += 1
    assert num_hashed == 4
    request.output_token_ids += [1, 2]
    assert manager.admit(request, 0)
    compute(manager, request)
    assert num_hashed == 5
    assert request.num_cached_tokens == 0  # of the first admission alone


def test_reset_forgets_everything_unless_a_block_is_in_use() -> None:
    manager = BlockManager(num_blocks=10, block_size=2, enable_prefix_caching=True)
    request = admitted(manager, [1, 2, 3])
    compute(manager, request)
    assert not manager.reset_cache()
    assert len(manager.cache) == 1
    manager.free(request)
    assert manager.reset_cache()
    assert len(manager.cache) == 0
    assert admitted(manager, [1, 2, 3]).num_cached_tokens == 0

import pytest

from scheduler.block_pool import BlockPool


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def pool(evicted: list[int]) -> BlockPool:
    return BlockPool(num_blocks=5, on_evict=evicted.append)


def test_every_block_but_0_is_given_out_once(pool: BlockPool) -> None:
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)
    with pytest.raises(RuntimeError, match="all 4 KV blocks are in use"):
        pool.allocate()
    pool.check()


def test_a_block_is_free_when_its_last_holder_leaves(pool: BlockPool) -> None:
    block = pool.allocate()
    pool.mark_cached(block)
    pool.share(block)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_free) == (1, 3)
    pool.release(block)
    assert (pool.ref_count(block), pool.num_free) == (0, 4)
    with pytest.raises(RuntimeError, match=f"block {block} is freed, but not in use"):
        pool.release(block)
    pool.check()


def test_cached_blocks_are_evicted_last_and_in_the_order_of_their_release(
    pool: BlockPool, evicted: list[int]
) -> None:
    blocks = [pool.allocate() for _ in range(4)]
    for block in blocks[:3]:
        pool.mark_cached(block)
    for block in (2, 1, 3, 4):
        pool.release(block)
    pool.check()
    assert pool.allocate() == 4
    assert evicted == []
    assert [pool.allocate(), pool.allocate()] == [2, 1]
    assert evicted == [2, 1]
    pool.check()


def test_sharing_a_free_cached_block_saves_it_from_eviction(
    pool: BlockPool, evicted: list[int]
) -> None:
    blocks = [pool.allocate() for _ in range(4)]
    for block in blocks:
        pool.mark_cached(block)
        pool.release(block)
    pool.share(1)
    assert [pool.allocate() for _ in range(3)] == [2, 3, 4]
    assert evicted == [2, 3, 4]
    pool.check()


def test_dropping_the_cache_frees_without_eviction(pool: BlockPool, evicted: list[int]) -> None:
    block = pool.allocate()
    pool.mark_cached(block)
    pool.release(block)
    pool.drop_cached()
    assert pool.cached_blocks == frozenset()
    assert sorted(pool.allocate() for _ in range(4)) == [1, 2, 3, 4]
    assert evicted == []
    pool.check()

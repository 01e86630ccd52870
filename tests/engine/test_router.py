"""Which engine a prompt goes to."""

import random

import pytest

from jaxserve.engine.router import Router

SIZE = 4
MANY = 10_000


def prompt(*blocks, extra=0):
    """Blocks of SIZE tokens that are told apart by a number, and some tokens more."""
    return [100 * block + i for block in blocks for i in range(SIZE)] + [7] * extra


def test_equal_engines_take_turns():
    router = Router(SIZE, [MANY] * 3)
    ranks = [router.route(prompt(i), {0: 0, 1: 0, 2: 0})[0] for i in range(7)]
    assert ranks == [0, 1, 2, 0, 1, 2, 0]
    assert [router.route([1], {0: 0, 2: 0})[0] for _ in range(4)] == [2, 0, 2, 0]


def test_the_least_loaded_takes_it():
    router = Router(SIZE, [MANY] * 3)
    assert router.route(prompt(1), {0: 5, 1: 4, 2: 6}) == (1, SIZE)
    assert router.route(prompt(2), {0: 5, 2: 6}) == (0, SIZE)


def test_a_cached_beginning_is_worth_its_tokens():
    router = Router(SIZE, [MANY] * 2)
    assert router.route(prompt(1, 2, 3, extra=1), {0: 0, 1: 9})[0] == 0
    # Two of these blocks are known on engine 0, which may be busier by so many tokens.
    longer = prompt(1, 2, 9, extra=2)
    assert router.route(longer, {0: 2 * SIZE - 1, 1: 0}) == (0, SIZE + 2)
    router = Router(SIZE, [MANY] * 2)
    router.route(prompt(1, 2, 3, extra=1), {0: 0, 1: 9})
    assert router.route(longer, {0: 2 * SIZE + 1, 1: 0}) == (1, 3 * SIZE + 2)
    # Now both know it, and the load alone decides.
    assert router.route(longer, {0: 1, 1: 0}) == (1, 2)
    assert router.route(prompt(1, 2, extra=3), {0: 0, 1: 1}) == (0, 3)


def test_a_known_prompt_has_a_new_token_still():
    router = Router(SIZE, [MANY] * 2)
    router.route(prompt(1), {0: 0, 1: 1})
    assert router.route(prompt(1), {0: 0, 1: 1}) == (0, 1)


def test_blocks_are_known_by_all_that_is_before_them():
    router = Router(SIZE, [MANY] * 2)
    router.route(prompt(1, 2), {0: 0, 1: 99})
    assert router.route(prompt(3, 2), {0: 0, 1: 99}) == (0, 2 * SIZE)


def test_what_is_remembered_is_bounded_and_forgotten():
    router = Router(SIZE, [3, 3])
    apart = {0: 0, 1: 999}
    router.route(prompt(1, 2), apart)
    router.route(prompt(3), apart)
    assert router.route(prompt(1, 2), apart) == (0, 1)
    router.route(prompt(4), apart)  # block 3, unused for longest, goes
    assert router.route(prompt(3), apart) == (0, SIZE)
    # Of a chain the end goes first.
    assert router.route(prompt(1, 2), apart) == (0, SIZE)
    router.forget(0)
    assert router.route(prompt(1, 2), apart) == (0, 2 * SIZE)


@pytest.mark.parametrize("num_blocks", [[0, 0], [MANY]])
def test_nothing_to_look_up(num_blocks):
    router = Router(SIZE, num_blocks)
    loads = dict.fromkeys(range(len(num_blocks)), 0)
    for _ in range(2):
        assert router.route(prompt(1, 2), loads)[1] == 2 * SIZE


def test_against_a_brute_force_twin():
    rng = random.Random(1)
    router = Router(SIZE, [MANY] * 3)
    known = [set() for _ in range(3)]
    for _ in range(500):
        ids = prompt(
            *(rng.randrange(2) for _ in range(rng.randrange(5))), extra=rng.randrange(1, 4)
        )
        loads = {rank: rng.randrange(12) for rank in rng.sample(range(3), rng.randint(1, 3))}
        chain = [tuple(ids[:end]) for end in range(SIZE, len(ids) + 1, SIZE)]
        costs = {}
        for rank, load in loads.items():
            hits = [prefix for prefix in chain if prefix in known[rank]]
            costs[rank] = load + max(1, len(ids) - SIZE * len(hits))
        rank, num_new = router.route(ids, loads)
        assert costs[rank] == min(costs.values())
        assert num_new == costs[rank] - loads[rank]
        known[rank].update(chain)

"""The only list of padded step shapes; warm-up compiles it and execution picks from it."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """One compiled shape: T flat tokens that belong to at most B requests."""

    num_tokens: int
    num_rows: int


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """Sizes up to the token budget, the budget itself, and `max_num_seqs`, at most as much.

    From 256 tokens on arithmetic takes its time, and there are sizes between two powers of two:
    closest together where many sequences decode while a few prompts are read.
    Every row has at least one token, so a step of T tokens has at most min(T, max_num_seqs) rows
    and one number picks the shape: there are no gaps. However many sequences decode, there is a
    bucket of as many rows as tokens for them.
    """
    powers = [1, *(1 << i for i in range(2, max_num_batched_tokens.bit_length()))]
    between = [
        power + power * i // parts
        for power in powers
        if power >= 256
        for parts in (4 if 512 <= power < 2048 else 2,)
        for i in range(1, parts)
    ]
    sizes = {*powers, *between, max_num_seqs, max_num_batched_tokens}
    fitting = sorted(size for size in sizes if size <= max_num_batched_tokens)
    return tuple(Bucket(size, min(size, max_num_seqs)) for size in fitting)


def pick_bucket(buckets: tuple[Bucket, ...], num_tokens: int) -> Bucket:
    """The smallest bucket that holds `num_tokens` tokens."""
    return buckets[bisect_left(buckets, num_tokens, key=lambda bucket: bucket.num_tokens)]

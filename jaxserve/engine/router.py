"""Which of several engines a request goes to: to the one that has least to compute before it.

An engine's part of that is its load; the request's part is what its prompt would have to compute
there. So a prompt goes where its beginning is cached, until that engine is busier than another by
more than the tokens saved.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from scheduler import block_digest

_MAX_LOOKUP_TOKENS = 4096
"""Hashing a prompt's blocks holds up the event loop, 1 ms for so many tokens."""


class Router:
    """`num_blocks`: of each engine's KV cache; that many newest blocks are remembered, as the cache
    itself may hold them all. 0: engines without a prefix cache."""

    def __init__(self, block_size: int, num_blocks: Sequence[int]) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._digests: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in num_blocks]
        self._last = -1

    def route(self, token_ids: Sequence[int], loads: Mapping[int, int]) -> tuple[int, int]:
        """The engine for a prompt, and how many of its tokens are new there, at least one.
        `loads`: of the engines that serve, in tokens. Equal engines take turns."""
        digests = self._chain(token_ids)
        new = {rank: max(1, len(token_ids) - self._num_cached(rank, digests)) for rank in loads}
        num_ranks = len(self._digests)
        rank = min(loads, key=lambda r: (loads[r] + new[r], (r - self._last - 1) % num_ranks))
        self._last = rank
        self._remember(rank, digests)
        return rank, new[rank]

    def forget(self, rank: int) -> None:
        """The engine's prefix cache is empty."""
        self._digests[rank].clear()

    def _chain(self, token_ids: Sequence[int]) -> list[bytes]:
        size = self._block_size
        digests, parent = [], b""
        if len(self._digests) == 1 or not any(self._num_blocks):
            return digests
        for start in range(0, min(len(token_ids), _MAX_LOOKUP_TOKENS) - size + 1, size):
            parent = block_digest(parent, token_ids[start : start + size])
            digests.append(parent)
        return digests

    def _num_cached(self, rank: int, digests: Sequence[bytes]) -> int:
        known = self._digests[rank]
        count = 0
        for digest in digests:
            if digest not in known:
                break
            count += 1
        return count * self._block_size

    def _remember(self, rank: int, digests: Sequence[bytes]) -> None:
        known = self._digests[rank]
        # A chain is of no use without its beginning, so that is the last to go.
        for digest in reversed(digests):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._num_blocks[rank]:
            known.popitem(last=False)

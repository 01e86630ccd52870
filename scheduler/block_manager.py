"""Block tables: which KV blocks hold the tokens of each running request."""

from collections import Counter
from collections.abc import Iterable

from scheduler.block_pool import BlockPool
from scheduler.prefix_cache import PrefixCache, PrefixCacheStats, block_digest
from scheduler.request import Request


class BlockManager:
    """Gives blocks to requests, shares the blocks of equal prefixes, and takes them back.

    A request receives the blocks of all its known tokens when it is admitted, so that a prompt
    computed chunk by chunk never waits half-way for memory; only `grow` can find the pool empty.

    A block becomes shareable (`commit`) once it is full, the ids of its tokens are known, and the
    step that writes it is launched: the device runs steps in order, so that any later step reads
    what this one wrote. For the same reason a block may be freed while a launched step uses it.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.cache = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.cache.forget)
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(self._num_query_tokens, self._num_hit_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, num_reserved: int) -> bool:
        """Gives blocks for all known tokens if `num_reserved` blocks stay free beside them.

        Sets `block_ids` and `num_computed_tokens`; the latter counts what the prefix cache
        supplied, which is never all: the last token is computed, for its logits. False, with
        nothing changed, if there is not enough room.
        """
        num_blocks = self.num_blocks_for(request.num_tokens)
        num_missing = num_blocks + num_reserved - self.pool.num_free
        reads_cache = self.enable_prefix_caching and request.use_prefix_cache
        max_shared = 0
        if reads_cache:
            self._extend_digests(request, request.num_tokens // self.block_size)
            max_shared = (request.num_tokens - 1) // self.block_size
        if num_missing > 0:
            # At least this many blocks must be shared with running requests. Looking at the last
            # of them alone keeps it cheap to ask again, step after step, for a long prompt.
            if num_missing > max_shared:
                return False
            if request.block_digests[num_missing - 1] not in self.cache:
                return False
        shared = self.cache.lookup(request.block_digests, max_shared)
        num_idle = sum(self.pool.ref_count(block) == 0 for block in shared)
        if num_missing > len(shared) - num_idle:
            return False

        for block in shared:
            self.pool.share(block)
        new = [self.pool.allocate() for _ in range(num_blocks - len(shared))]
        request.block_ids = shared + new
        request.num_committed_blocks = len(shared)
        request.num_computed_tokens = len(shared) * self.block_size
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            if reads_cache:
                self._num_query_tokens += request.num_tokens
                self._num_hit_tokens += request.num_cached_tokens
        return True

    def grow(self, request: Request) -> int:
        """Appends one block to the request's table. RuntimeError if none is free."""
        block = self.pool.allocate()
        request.block_ids.append(block)
        return block

    def commit(self, request: Request) -> None:
        """Registers the request's blocks that have become full, known and written."""
        if not self.enable_prefix_caching:
            return
        num_known = request.num_tokens
        if num_known < (request.num_committed_blocks + 1) * self.block_size:
            return
        num_full = min(request.num_computed_tokens, num_known) // self.block_size
        self._extend_digests(request, num_full)
        for index in range(request.num_committed_blocks, num_full):
            block = request.block_ids[index]
            if self.cache.register(request.block_digests[index], block):
                self.pool.mark_cached(block)
        request.num_committed_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes the blocks back; the last first, so that a chain is evicted from its end."""
        for block in reversed(request.block_ids):
            self.pool.release(block)
        request.block_ids = []
        request.num_committed_blocks = 0
        request.num_computed_tokens = 0

    def reset_cache(self) -> bool:
        """Forgets every cached prefix. False, with nothing changed, if any block is in use."""
        if self.pool.num_used:
            return False
        self.cache.clear()
        self.pool.drop_cached()
        return True

    def check(self, holders: Iterable[Request]) -> None:
        """AssertionError unless the tables of `holders` explain every block in use."""
        self.pool.check()
        counts = Counter(block for request in holders for block in request.block_ids)
        assert 0 not in counts, "block 0 was given out"
        for block in range(self.pool.num_total + 1):
            assert self.pool.ref_count(block) == counts[block], (
                f"block {block}: reference count {self.pool.ref_count(block)}, "
                f"but {counts[block]} tables hold it"
            )
        self.cache.check(self.pool.cached_blocks)

    def _extend_digests(self, request: Request, num_full: int) -> None:
        digests = request.block_digests
        for index in range(len(digests), num_full):
            start = index * self.block_size
            token_ids = request.token_slice(start, start + self.block_size)
            digests.append(block_digest(digests[-1] if digests else b"", token_ids))

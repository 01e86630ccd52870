"""Which KV blocks are free, and how many block tables hold each of the others."""

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Blocks 1 .. num_blocks - 1 with reference counts; block 0 is never given out. All O(1).

    A block is in use while its reference count is above 0. A free block that the prefix cache
    knows keeps its content, and `share` takes it back into use with it. Such a block is handed out
    as a new one only when no other block is free, the least recently released first; `on_evict`
    then tells the prefix cache.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_total = num_blocks - 1
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: set[int] = set()
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, those that it would have to evict included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_total - self.num_free

    @property
    def cached_blocks(self) -> frozenset[int]:
        """Blocks that the prefix cache knows, in use or free."""
        return frozenset(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A block for one holder, its old content forgotten. RuntimeError if none is free."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._cached.remove(block)
            self._on_evict(block)
        else:
            raise RuntimeError(f"all {self.num_total} KV blocks are in use")
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a cached block, in use or free."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Takes one holder away. RuntimeError if the block has none."""
        if self._ref_counts[block] == 0:
            raise RuntimeError(f"KV block {block} is freed, but not in use")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._cached:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def mark_cached(self, block: int) -> None:
        """Notes that the prefix cache knows this block, which must be in use."""
        self._cached.add(block)

    def drop_cached(self) -> None:
        """Makes every cached block an ordinary free one. No block may be in use."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._cached.clear()

    def check(self) -> None:
        """AssertionError unless every block is on exactly one side and free + used = total."""
        free = [*self._free, *self._evictable]
        used = {block for block, count in enumerate(self._ref_counts) if count > 0}
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert len(set(free)) == len(free), "a block is free twice"
        assert used.isdisjoint(free), f"blocks {used & set(free)} are free and in use"
        assert used.union(free) == set(range(1, self.num_total + 1)), "blocks are lost"
        assert set(self._evictable) == self._cached - used, "cached free blocks must be evictable"
        assert self.num_free + len(used) == self.num_total

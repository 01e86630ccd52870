"""Finds the KV blocks of a prompt's beginning that an earlier request left behind.

A full block is named by a digest of its parent's digest and its own token ids, so that equal
digests mean equal tokens from position 0 on, and therefore equal keys and values.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counted in prompt tokens at each request's first admission."""

    num_query_tokens: int
    num_hit_tokens: int


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block; `parent` is the previous block's, empty for the first.

    Ids are packed as 64-bit integers; a digest is never stored beyond the process.
    """
    content = parent + array("q", token_ids).tobytes()
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """The map from digests of full blocks to the blocks that hold them, one each way."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def lookup(self, digests: Sequence[bytes], max_blocks: int) -> list[int]:
        """The blocks of the longest cached beginning of this chain, at most `max_blocks`."""
        blocks: list[int] = []
        for digest in digests[:max_blocks]:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, digest: bytes, block: int) -> bool:
        """Makes `block` findable. False if another block with the same content already is."""
        if digest in self._blocks:
            return False
        self._blocks[digest] = block
        self._digests[block] = digest
        return True

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten. KeyError if it was not registered."""
        del self._blocks[self._digests.pop(block)]

    def clear(self) -> None:
        self._blocks.clear()
        self._digests.clear()

    def check(self, cached_blocks: frozenset[int]) -> None:
        """AssertionError unless exactly these blocks are known, each under one digest."""
        assert set(self._digests) == cached_blocks, "pool and prefix cache disagree"
        assert {block: digest for digest, block in self._blocks.items()} == self._digests

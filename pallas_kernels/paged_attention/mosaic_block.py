"""What a block of threads does in both `mosaic_decode` and `mosaic_prefill`: it works through its
share of the items, and copies the keys and values of each from the paged cache."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class ThreadBlock:
    """A block of threads of a persistent grid, whose axis is "block"."""

    Item: type
    """Makes an item, as the kernel sees it, of the fields that `load_item` gives."""
    load_item: Callable[[jax.Array], tuple[jax.Array, ...]]
    """The fields of this block's item i; of any item, where i is past its last."""
    num_items: jax.Array
    """Of all blocks."""
    pages: jax.Ref
    """[P * K * 2, S, H]: for each cache block and kv head its keys, then its values."""
    tables: jax.Ref
    """[B, M]"""
    k_smem: jax.Ref
    """[stages, tile_k, H]"""
    v_smem: jax.Ref
    k_ready: jax.Ref
    """[stages]: barriers of an arrival for each cache block of a tile."""
    v_ready: jax.Ref
    num_kv_heads: int
    tile_k: int

    def place(self, i):
        """Where this block's item i stands among those of all blocks, the longest first."""
        # Back and forth, so that no block always gets the longest item of a round.
        block, num_blocks = lax.axis_index("block"), lax.axis_size("block")
        return i * num_blocks + block + lax.rem(i, 2) * (num_blocks - 1 - 2 * block)

    def num_own_items(self):
        rounds = lax.div(self.num_items, lax.axis_size("block"))
        return rounds + (self.place(rounds) < self.num_items).astype(jnp.int32)

    def walk(self, first, num_items, body):
        """done = body(i, item, done) over the block's items, `first` being the fields of item 0;
        done counts tiles of keys."""

        def step(i, carry):
            done, fields = carry
            # Its loads are under way while this item is worked on.
            following = self.load_item(i + 1)
            return body(i, self.Item(*fields), done), following

        done, _ = lax.fori_loop(0, num_items, step, (jnp.int32(0), first))
        return done

    def cache_blocks(self, row, j, lowest, highest):
        """The cache blocks of a row's tile j of keys: those at places `lowest` to `highest` of its
        block table, which hold what the item's queries see."""
        tile_blocks = self.tile_k // self.pages.shape[1]
        # Only blocks of the span: the table's other entries may be anything.
        places = [jnp.clip(j * tile_blocks + n, lowest, highest) for n in range(tile_blocks)]
        return [self.tables[row, place] for place in places]

    def copy_keys(self, cache_blocks, kv_head, slot):
        """Have the TMA unit copy a tile of keys into a slot of shared memory."""
        self._copy(cache_blocks, kv_head, 0, self.k_smem, self.k_ready, slot)

    def copy_values(self, cache_blocks, kv_head, slot):
        self._copy(cache_blocks, kv_head, 1, self.v_smem, self.v_ready, slot)

    def _copy(self, cache_blocks, kv_head, half, smem, ready, slot):
        block_size = self.pages.shape[1]
        for n, block in enumerate(cache_blocks):
            page = (block * self.num_kv_heads + kv_head) * 2 + half
            rows = pl.ds(n * block_size, block_size)
            plgpu.copy_gmem_to_smem(self.pages.at[page], smem.at[slot, rows], ready.at[slot])


def drain(free: jax.Ref, uses: jax.Array) -> None:
    """Wait until slots that were used in turn, `uses` times in all, are free."""
    # A barrier may not go away with an arrival that nobody saw.
    for slot in range(free.shape[0]):
        pl.when(uses > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))

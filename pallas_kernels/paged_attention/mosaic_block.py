"""What a block of threads does in both `mosaic_decode` and `mosaic_prefill`: it copies keys and
values from the paged cache."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class ThreadBlock:
    """A block of threads of a persistent grid."""

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

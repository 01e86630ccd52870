"""What a block of threads does in both `mosaic_decode` and `mosaic_prefill`: it copies keys and
values from the paged cache."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_warp import in_one_warp


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
    num_stages: int

    def fetch_tiles(self, row, kv_head, span, tiles, done, k_free, v_free=None):
        """Have the TMA unit copy a row's tiles of keys and of values, those from tiles[0] to
        tiles[1] - 1, as slots of shared memory come free, after `done` others. An item's queries
        see what is from span[0] to span[1] - 1. `v_free` None: values have room where keys have.
        """
        (begin, end), (first, last) = span, tiles
        block_size = self.pages.shape[1]
        lowest, highest = lax.div(begin, block_size), lax.div(end - 1, block_size)

        @in_one_warp
        def _():
            @pl.loop(first, last)
            def _(j):
                use = done + j - first
                slot = lax.rem(use, self.num_stages)
                copies = self._tile_copies(row, kv_head, j, lowest, highest, slot)
                for free, copy in zip((k_free, v_free), copies, strict=True):
                    if free is not None:
                        await_room = functools.partial(plgpu.barrier_wait, free.at[slot])
                        pl.when(use >= self.num_stages)(await_room)
                    copy()

    def _tile_copies(self, row, kv_head, j, lowest, highest, slot):
        """(copy_keys, copy_values) of a row's tile j into a slot of shared memory: each copies the
        cache blocks at places `lowest` to `highest` of the row's block table, which hold what the
        item's queries see. In place of others the slot keeps what it had.
        """
        block_size = self.pages.shape[1]
        tile_blocks = self.tile_k // block_size
        places = [j * tile_blocks + n for n in range(tile_blocks)]
        # The table's other entries may be anything.
        blocks = [self.tables[row, jnp.clip(place, lowest, highest)] for place in places]

        def copy(half, smem, ready):
            pages = [(block * self.num_kv_heads + kv_head) * 2 + half for block in blocks]
            copies = [
                functools.partial(
                    plgpu.copy_gmem_to_smem,
                    self.pages.at[page],
                    smem.at[slot, pl.ds(n * block_size, block_size)],
                    ready.at[slot],
                )
                for n, page in enumerate(pages)
            ]
            skip = functools.partial(plgpu.barrier_arrive, ready.at[slot])

            def copy_all():
                for copy_block in copies:
                    copy_block()

            def copy_some():
                for place, copy_block in zip(places, copies, strict=True):
                    lax.cond((lowest <= place) & (place <= highest), copy_block, skip)

            lax.cond((lowest <= places[0]) & (places[-1] <= highest), copy_all, copy_some)

        return (
            functools.partial(copy, 0, self.k_smem, self.k_ready),
            functools.partial(copy, 1, self.v_smem, self.v_ready),
        )


def drain(free: jax.Ref, uses: jax.Array) -> None:
    """Wait until slots that were used in turn, `uses` times in all, are free."""
    # A barrier may not go away with an arrival that nobody saw.
    for slot in range(free.shape[0]):
        pl.when(uses > slot)(functools.partial(plgpu.barrier_wait, free.at[slot]))

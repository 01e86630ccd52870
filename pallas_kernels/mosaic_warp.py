"""Work for a single warp of a warpgroup in Mosaic GPU."""

from collections.abc import Callable

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def in_one_warp(body: Callable[[], None]) -> None:
    """Have the first warp of a warpgroup run `body`, which works with scalars; all four meet before
    and after it.

    A copy is started by one thread. Where a whole warpgroup does so, four warps compute where from
    and where to, wait for each other and arrive at the barrier, which takes energy. What is awaited
    here must always be: each thread has its own idea of a barrier's phase.
    """
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(body))

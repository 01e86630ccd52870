"""Work for a single warp of a warpgroup in Mosaic GPU."""

from collections.abc import Callable

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def in_one_warp(body: Callable[[], None]) -> None:
    """Have the first warp of a warpgroup run `body`, which works with scalars; the others wait.

    It is one thread that starts a copy. Where a whole warpgroup does so, all four warps compute
    where from and where to, wait for each other and arrive at the barrier, which takes energy.
    """
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(body))

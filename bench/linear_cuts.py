"""Which cuts of products with a weight are worth timing."""

import dataclasses
import functools
import math

import jax.numpy as jnp

from pallas_kernels.linear import tuning
from pallas_kernels.linear.mosaic_kernel import Tiles

CUTS = [
    tuning.Tiling(16, 256, 4, 4), tuning.Tiling(16, 256, 4, 6), tuning.Tiling(16, 512, 4, 3),
    tuning.Tiling(32, 128, 4, 4), tuning.Tiling(32, 256, 4, 3), tuning.Tiling(64, 128, 4, 4),
    tuning.Tiling(64, 64, 4, 5), tuning.Tiling(128, 64, 4, 4), tuning.Tiling(64, 128, 4, 3),
    tuning.Tiling(32, 256, 8, 3), tuning.Tiling(64, 128, 8, 4), tuning.Tiling(64, 128, 8, 3),
    tuning.Tiling(128, 64, 8, 4), tuning.Tiling(32, 256, 4, 4), tuning.Tiling(32, 256, 4, 6),
]  # fmt: skip
PARTS_CUTS = [
    tuning.Tiling(16, 256, 4, 4),
    tuning.Tiling(32, 128, 4, 4),
    tuning.Tiling(32, 256, 4, 3),
    tuning.Tiling(64, 128, 4, 3),
    tuning.Tiling(64, 128, 4, 4),
    tuning.Tiling(64, 128, 8, 4),
    tuning.Tiling(64, 128, 4, 6),
    tuning.Tiling(32, 256, 4, 6),
    tuning.Tiling(128, 64, 4, 4),
]
NORMED_CUTS = [
    tuning.Tiling(16, 256, 4, 4), tuning.Tiling(16, 256, 4, 6), tuning.Tiling(16, 512, 4, 4),
    tuning.Tiling(32, 128, 4, 4), tuning.Tiling(32, 256, 4, 3), tuning.Tiling(32, 256, 4, 6),
    tuning.Tiling(32, 256, 8, 6), tuning.Tiling(64, 128, 4, 3), tuning.Tiling(64, 128, 8, 6),
]  # fmt: skip
SPLITS = (1, 2, 4, 8)
MOSAIC_SPLITS = (1, 2, 4)
MOSAIC_CUTS = 4
"""With clusters of one size; none that is likely to take 40% longer than the best."""
BAND = 8
MAX_STAGES = 6

# Of an H200, or each of its multiprocessors; roughly, to see which cuts are likely the fastest.
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024 - 512
"""But for barriers."""
FLOP_PER_S = 5.5e12
FETCHED_BYTES_PER_S = 45e9
TILE_S = 1e-6
"""From the last sum of one tile to the first of the next."""
READ_BYTES_PER_S = 4e12


@dataclasses.dataclass(frozen=True)
class Product:
    """One of a layer's products, or the head's."""

    name: str
    out_size: int
    """Rows of the weight."""
    in_size: int
    kind: tuning.Kind = "plain"

    @property
    def is_head(self) -> bool:
        return self.name.endswith("head")

    def out_dtype(self, splits: int = 1) -> jnp.dtype:
        return jnp.dtype("float32" if self.is_head or splits > 1 else "bfloat16")

    def shape(self, num_tokens: int) -> tuning.Shape:
        return tuning.Shape(self.kind, num_tokens, self.out_size, self.in_size, "bfloat16")


def candidates(
    product: Product, num_tokens: int
) -> list[tuning.Tiling] | list[tuning.MosaicTiling]:
    """All that may be the fastest, of the kernel that is for so many tokens."""
    if num_tokens > tuning.MAX_TOKENS:
        return _mosaic_candidates(product, num_tokens)
    if product.kind not in ("parts", "normed"):
        return CUTS
    known = NORMED_CUTS if product.kind == "normed" else PARTS_CUTS
    cuts = [dataclasses.replace(cut, splits=splits) for cut in known for splits in SPLITS]
    programs = [math.ceil(product.out_size / cut.tile_out) * cut.splits for cut in cuts]
    # In the last to finish lies the norm's work: with many of them it comes late.
    most = (2 if product.kind == "normed" else 4) * MULTIPROCESSORS
    return [
        cut
        for cut, count in zip(cuts, programs, strict=True)
        if MULTIPROCESSORS // 3 < count <= most
    ]


def parts_s(product: Product, num_tokens: int, splits: int) -> float:
    """Seconds that the next kernel reads longer, or so, than if there were one part."""
    extra_bytes = 4 * splits - 2 if splits > 1 and product.kind == "parts" else 0
    return num_tokens * product.out_size * extra_bytes / READ_BYTES_PER_S


def _mosaic_candidates(product: Product, num_tokens: int) -> list[tuning.MosaicTiling]:
    """With clusters of either size those that `_estimate` has for the fastest, in that order."""
    cuts = [
        cut
        for tile_tokens in ((128, 256) if num_tokens > 128 else (128,))
        for tile_out in range(16, 256 + 1, 16)
        for splits in (MOSAIC_SPLITS if product.kind == "parts" else (1,))
        for cluster in (1, 2)
        if (cut := _deepest(product, tile_tokens, tile_out, cluster, splits))
        and tuning.fits_mosaic(product.shape(num_tokens), cut)
    ]
    estimate = functools.partial(_estimate, product, num_tokens)
    cuts.sort(key=estimate)
    cuts = [cut for cut in cuts if estimate(cut) < 1.4 * estimate(cuts[0])]
    likely = [[cut for cut in cuts if cut.cluster == cluster][:MOSAIC_CUTS] for cluster in (1, 2)]
    return [cut for cut in cuts if cut in likely[0] or cut in likely[1]]


def _deepest(
    product: Product, tile_tokens: int, tile_out: int, cluster: int, splits: int
) -> tuning.MosaicTiling | None:
    """With as many steps in shared memory as there is room for; None if there is no room for 3, or
    in registers."""
    rows = 2 * tile_out if product.kind == "gated" else tile_out
    if rows > 256 or tile_tokens * rows > 128 * 256:
        return None
    cut = tuning.MosaicTiling(tile_tokens, tile_out, 3, BAND, cluster, splits)
    itemsize = product.out_dtype(splits).itemsize
    room = SHARED_MEMORY - tile_tokens * cut.out_columns(itemsize) * itemsize
    num_stages = min(room // (2 * tuning.MOSAIC_TILE_IN * (tile_tokens + rows)), MAX_STAGES)
    return dataclasses.replace(cut, num_stages=num_stages) if num_stages >= 3 else None


def _estimate(product: Product, num_tokens: int, cut: tuning.MosaicTiling) -> float:
    """Seconds, of the block of threads that has most tiles."""
    halves = 2 if product.kind == "gated" else 1
    tiles = Tiles(num_tokens, product.out_size // halves, cut)
    rounds = math.ceil(tiles.count / (MULTIPROCESSORS // cut.cluster))
    tokens, rows = cut.tile_tokens, halves * cut.tile_out
    shared, own = (tokens, rows) if tiles.share_tokens else (rows, tokens)
    column_s = max(
        2 * tokens * rows / FLOP_PER_S, 2 * (shared / cut.cluster + own) / FETCHED_BYTES_PER_S
    )
    tile_s = product.in_size / cut.splits * column_s + TILE_S
    return rounds * tile_s + parts_s(product, num_tokens, cut.splits)

"""Which products with a weight are this project's own kernels', and how these are cut.

`tuning.json` holds what `bench/linear.py --tune` measured to be the fastest, or `bench/energy.py`
where steps draw all of a GPU's power; shapes that it does not know take the cut of the nearest that
it knows. For few tokens GPUs that it does not know get one that fits all; for many the product is
XLA's but where an entry of about its size has it otherwise.
"""

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Literal

Kind = Literal["plain", "gated", "parts", "normed"]

MAX_TOKENS = 64
"""Of `triton_kernel`. With more a product is bound by arithmetic, not by reading the weight."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a choice depends on; sizes as the weight has them."""

    kind: Kind
    num_tokens: int
    out_size: int
    in_size: int
    dtype: str

    @property
    def tile_tokens(self) -> int:
        """A single token, or all in a power of two of at least 16."""
        return 1 if self.num_tokens == 1 else max(1 << (self.num_tokens - 1).bit_length(), 16)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How `triton_kernel` is cut; each program has all tokens."""

    tile_out: int
    """Rows of the weight (pairs of rows, if gated)."""
    tile_in: int
    """Columns of one step."""
    num_warps: int
    num_stages: int
    splits: int = 1
    """Programs that share the columns of a row; of the kinds "parts" and "normed"."""


MOSAIC_TILE_IN = 64
"""Columns of one step of `mosaic_kernel`: 128 bytes, a row of the swizzle."""
_MOSAIC_OUT_BYTES = 32 * 1024
"""Of the shared memory through which a tile of the result goes, in pieces if it is larger."""


@dataclasses.dataclass(frozen=True)
class MosaicTiling:
    """How `mosaic_kernel` is cut."""

    tile_tokens: int
    """Of one block of threads: 128 or 256, for two warpgroups."""
    tile_out: int
    """Rows of the weight (pairs of rows, if gated), a multiple of 16. There are at most 256 rows,
    and `tile_tokens` / 2 by as many sums in float32 in the registers of a warpgroup, which have
    room for 64 * 256."""
    num_stages: int
    """Steps in shared memory."""
    band: int = 1
    """Tiles of tokens (as many as a cluster has, if it shares rows) that are walked along the rows
    at a time."""
    cluster: int = 1
    """Blocks that fetch once what they share: tokens where a tile holds all, else rows."""
    splits: int = 1
    """Blocks that share the columns of a row; of kind "parts"."""

    def out_columns(self, itemsize: int) -> int:
        """Of a tile of the result that leave shared memory at a time: in pieces that are alike, and
        as wide as one of the swizzles (32 bytes) or several."""
        return max(
            columns
            for columns in range(8, self.tile_out + 1, 8)
            if self.tile_out % columns == 0
            and columns * itemsize % 32 == 0
            and self.tile_tokens * columns * itemsize <= _MOSAIC_OUT_BYTES
        )


_FAR = math.log(5)
"""From here on an entry for many tokens says nothing: how well its tiles fill a GPU is another
matter. A quarter of the rows is near, or half of the rows and of the columns."""
DEFAULT = Tiling(16, 128, 4, 3)
DEFAULT_FLOAT32 = Tiling(16, 32, 4, 3)
"""Both need less shared memory than the 99 KiB of compute capability 8.6 and 8.9."""


def choose(compute_capability: str, shape: Shape) -> Tiling | MosaicTiling | None:
    """The fastest known cut for `shape` on a GPU of that compute capability, such as "9.0"; None:
    XLA's product is faster, or one of kind "normed" is better in parts."""
    known = [
        entry
        for entry in _table()
        if (entry["compute_capability"], entry["kind"]) == (compute_capability, shape.kind)
    ]
    if shape.kind == "normed" and (shape.num_tokens > 1 or shape.dtype != "bfloat16" or not known):
        return None
    if shape.num_tokens > MAX_TOKENS:
        return _choose_mosaic([entry for entry in known if "min_tokens" in entry], shape)
    if shape.dtype != "bfloat16":
        return DEFAULT_FLOAT32
    known = [
        entry
        for entry in known
        if "tile_tokens" in entry and (entry["tile_tokens"] == 1) == (shape.tile_tokens == 1)
    ]
    nearest = min(
        known,
        key=lambda entry: (_apart(shape, entry, "tile_tokens"), _sizes_apart(shape, entry)),
        default={"tiling": dataclasses.asdict(DEFAULT)},
    )["tiling"]
    return nearest and Tiling(**nearest)


def _choose_mosaic(known: list[dict], shape: Shape) -> MosaicTiling | None:
    """By that entry of the nearest sizes that is for the most tokens, of those `shape` reaches."""
    nearest = min((_sizes_apart(shape, entry) for entry in known), default=math.inf)
    if nearest > _FAR:
        return None
    entries = [
        entry
        for entry in known
        if _sizes_apart(shape, entry) == nearest and entry["min_tokens"] <= shape.num_tokens
    ]
    entry = max(entries, key=lambda entry: entry["min_tokens"], default={"tiling": None})
    tiling = entry["tiling"] and MosaicTiling(**entry["tiling"])
    return tiling if tiling and fits_mosaic(shape, tiling) else None


def _sizes_apart(shape: Shape, entry: dict) -> float:
    return _apart(shape, entry, "out_size") + _apart(shape, entry, "in_size")


def _apart(shape: Shape, entry: dict, name: str) -> float:
    return abs(math.log(getattr(shape, name) / entry[name]))


def fits_mosaic(shape: Shape, tiling: MosaicTiling) -> bool:
    """Whether `mosaic_kernel` can serve the shape at all."""
    num_outputs = shape.out_size // 2 if shape.kind == "gated" else shape.out_size
    return (
        shape.dtype == "bfloat16"
        and shape.num_tokens % 8 == 0
        and num_outputs % 64 == 0
        and shape.in_size % (tiling.splits * MOSAIC_TILE_IN) == 0
    )


@functools.cache
def _table() -> list[dict]:
    return json.loads(resources.files(__package__).joinpath("tuning.json").read_text())["entries"]

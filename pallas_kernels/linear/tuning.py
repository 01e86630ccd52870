"""Which products with a weight are this project's own kernel's, and how it is cut.

`tuning.json` holds what `bench/linear.py --tune` measured to be the fastest; shapes that it does
not know take the cut of the nearest that it knows, GPUs one that fits all.
"""

import dataclasses
import functools
import json
import math
from importlib import resources
from typing import Literal

Kind = Literal["plain", "gated", "parts"]

MAX_TOKENS = 64
"""With more a product is bound by arithmetic, not by reading the weight: XLA's are as good."""


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
    """How the kernel is cut; each program has all tokens."""

    tile_out: int
    """Rows of the weight (pairs of rows, if gated)."""
    tile_in: int
    """Columns of one step."""
    num_warps: int
    num_stages: int
    splits: int = 1
    """Programs that share the columns of a row; of kind "parts"."""


MOSAIC_TILE_IN = 64
"""Columns of one step of `mosaic_gated`: 128 bytes, a row of the swizzle."""


@dataclasses.dataclass(frozen=True)
class MosaicTiling:
    """How `mosaic_gated` is cut."""

    tile_tokens: int
    """Of one block of threads: 128 or 256, for two warpgroups."""
    tile_out: int
    """Pairs of rows of the weight. With `tile_tokens` / 2 by twice this in float32 in its
    registers a warpgroup has room for 64 * 256 sums."""
    num_stages: int
    """Steps in shared memory."""
    band: int
    """Tiles of tokens (pairs of tiles, in clusters of 2) that are walked along the rows at a
    time."""
    cluster: int
    """Blocks that have the same rows and fetch each row once: 1 or 2."""


DEFAULT = Tiling(16, 128, 4, 3)
DEFAULT_FLOAT32 = Tiling(16, 32, 4, 3)
"""Both need less shared memory than the 99 KiB of compute capability 8.6 and 8.9."""


def choose(compute_capability: str, shape: Shape) -> Tiling | None:
    """The fastest known cut for `shape` on a GPU of that compute capability, such as "9.0"; None:
    XLA's product is faster."""
    if shape.num_tokens > MAX_TOKENS:
        return None
    if shape.dtype != "bfloat16":
        return DEFAULT_FLOAT32
    known = [
        entry
        for entry in _table()
        if (entry["compute_capability"], entry["kind"]) == (compute_capability, shape.kind)
        and (entry["tile_tokens"] == 1) == (shape.tile_tokens == 1)
    ]

    def distance(entry: dict) -> tuple[float, float]:
        names = ("out_size", "in_size", "tile_tokens")
        out, columns, tokens = (abs(math.log(getattr(shape, n) / entry[n])) for n in names)
        return tokens, out + columns

    nearest = min(known, key=distance, default={"tiling": dataclasses.asdict(DEFAULT)})["tiling"]
    return nearest and Tiling(**nearest)


@functools.cache
def _table() -> list[dict]:
    return json.loads(resources.files(__package__).joinpath("tuning.json").read_text())["entries"]

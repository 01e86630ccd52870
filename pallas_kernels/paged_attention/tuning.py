"""Which kernel serves which shape on which GPU, and how its work is cut.

`tuning.json` holds what `bench/paged_attention.py --tune` measured to be the fastest. Shapes and
GPUs that it does not know get a cut that fits them all.
"""

import dataclasses
import functools
import json
from importlib import resources

# Shared memory for one tile of keys, and for one of values; a tile of queries takes twice that.
# With the stages below all fits in the 99 KiB of compute capability 8.6 and 8.9.
_KV_TILE_BYTES = 16 * 1024
# A decode batch of fewer programs than this leaves a large GPU half idle: its contexts are cut,
# into about so many programs altogether. From here up the longest programs start first, and a cut,
# which costs some microseconds at each end, pays only for contexts that would still be running
# when the GPU runs empty: those of over 4/3 the mean (H200).
_FULL_PROGRAMS = 128
_CUT_PROGRAMS = 256
_SHARES_PER_4_ROWS = 3
MOSAIC_HEAD_DIMS = (64, 128)
MOSAIC_DECODE_TILE = 64
"""Keys of one step of `mosaic_decode`: the rows of a product."""
MOSAIC_QUERIES = 8
"""The most heads of a query that may share a kv head in `mosaic_decode`: a product's columns."""


_NUM_SMS = 132
_SMEM_BYTES = 228 * 1024
"""Of each multiprocessor of an H100 or H200."""
_MORE_SMEM_BYTES = 3 * 1024
"""Of a block of threads, for barriers, reductions and the system."""


# An entry also holds `min_work`, the fewest tokens times kv heads it is meant for; of decode, rows
# that may decode.
_KEYS = ("compute_capability", "rows", "kernel", "dtype", "head_dim")


@dataclasses.dataclass(frozen=True)
class TritonTiling:
    """How `triton_kernel` is cut for one kind of row."""

    tile_rows: int
    """Rows of the matrix products: queries times their heads, a power of two."""
    tile_k: int
    """Context positions of one step."""
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class ContextCut:
    """How the contexts of decode rows are cut into pieces, one program for each kv head.

    The contexts of a batch together make a number of equal shares; each context is cut into as
    few equal pieces as are no longer than a share.
    """

    few_rows: int
    """From so many rows on, the number of shares goes by the rows."""
    few_shares: int
    """The shares of fewer rows."""
    shares_per_4_rows: int = _SHARES_PER_4_ROWS
    """With 4 or more, even contexts of one length are cut."""
    most_shares: int | None = None
    """However many the rows."""

    def max_shares(self, max_rows: int) -> int:
        """The most shares that up to `max_rows` rows have."""
        by_rows = max_rows * self.shares_per_4_rows // 4
        most = by_rows if self.most_shares is None else self.most_shares
        return max(self.few_shares, min(by_rows, most))


@dataclasses.dataclass(frozen=True)
class MosaicTiling:
    """How `mosaic_decode` or `mosaic_prefill` is cut."""

    tile_k: int
    """Positions of one tile of keys and of values."""
    num_stages: int
    """Tiles of keys, and of values, in shared memory."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a choice may depend on; the letters of the kernel's arguments."""

    num_tokens: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    table_width: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """The cut of one call: for rows of a single query, for the others, and for contexts."""

    decode: TritonTiling | MosaicTiling
    prefill: TritonTiling | MosaicTiling
    cut: ContextCut


def choose(impl: str, compute_capability: str, shape: Shape) -> Choice:
    """The fastest known cut for `shape` on a GPU of that compute capability, such as "9.0".

    `impl` "triton" keeps to Triton; with "mosaic" rows of either kind go to Mosaic GPU where that
    is known to be faster.
    """
    row_bytes = _power_of_two(shape.head_dim) * (4 if shape.dtype == "float32" else 2)
    group = _power_of_two(shape.num_heads // shape.num_kv_heads)
    tile_k = min(max(_KV_TILE_BYTES // row_bytes, 16), 128)

    def cut_of(rows: str, tiling: TritonTiling) -> TritonTiling | MosaicTiling:
        if impl == "mosaic" and (tuned := _tuned(compute_capability, rows, "mosaic", shape)):
            return MosaicTiling(**tuned)
        tuned = _tuned(compute_capability, rows, "triton", shape)
        return dataclasses.replace(tiling, **tuned)

    most_rows = 32 if shape.dtype == "float32" else 128
    tile_rows = max(min(2 * _KV_TILE_BYTES // row_bytes, most_rows), group, 16)
    prefill = TritonTiling(tile_rows, tile_k, num_warps=4 if tile_rows < 64 else 8, num_stages=2)
    decode = cut_of("decode", TritonTiling(max(group, 16), tile_k, num_warps=4, num_stages=3))
    most_shares = None
    if isinstance(decode, MosaicTiling):
        # A block takes the longest piece that is left, one after another. Only what is longer than
        # all that one block has to do holds up the end.
        most_shares = max(decode_blocks(decode, shape.head_dim) // shape.num_kv_heads, 1)
    cut = ContextCut(
        few_rows=-(-_FULL_PROGRAMS // shape.num_kv_heads),
        few_shares=max(_CUT_PROGRAMS // shape.num_kv_heads, 1),
        most_shares=most_shares,
    )
    return Choice(decode, cut_of("prefill", prefill), cut)


def decode_blocks(tiling: MosaicTiling, head_dim: int) -> int:
    """How many blocks of threads of `mosaic_decode` an H100 or H200 runs at a time."""
    tiles = 2 * tiling.num_stages * tiling.tile_k * head_dim
    values = tiles + MOSAIC_QUERIES * (4 * head_dim + tiling.tile_k)
    return _NUM_SMS * (_SMEM_BYTES // (2 * values + _MORE_SMEM_BYTES))


def fits_mosaic(rows: str, shape: Shape) -> bool:
    """Whether `mosaic_decode` or `mosaic_prefill`, by the kind of `rows`, can serve the shape."""
    if shape.head_dim not in MOSAIC_HEAD_DIMS or shape.dtype != "bfloat16":
        return False
    if rows == "prefill":
        return shape.num_tokens >= 64 and shape.num_tokens % 8 == 0 and shape.block_size <= 128
    group = shape.num_heads // shape.num_kv_heads
    fits = group <= MOSAIC_QUERIES <= shape.num_tokens * shape.num_heads
    return fits and shape.block_size <= MOSAIC_DECODE_TILE


def _tuned(compute_capability: str, rows: str, kernel: str, shape: Shape) -> dict[str, int]:
    if kernel == "mosaic" and not fits_mosaic(rows, shape):
        return {}
    wanted = (compute_capability, rows, kernel, shape.dtype, shape.head_dim)
    # In a step with prompts all rows may decode, or none.
    most = min(shape.num_tokens, shape.num_rows) if rows == "decode" else shape.num_tokens
    work = most * shape.num_kv_heads
    entries = [
        entry
        for entry in _table()
        if tuple(entry[key] for key in _KEYS) == wanted and entry["min_work"] <= work
    ]
    return max(entries, key=lambda entry: entry["min_work"], default={"tiling": {}})["tiling"]


@functools.cache
def _table() -> list[dict]:
    return json.loads(resources.files(__package__).joinpath("tuning.json").read_text())["entries"]


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

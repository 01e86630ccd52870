"""A step's input: how it is packed on the host, and what it unpacks to on the device.

Everything the host decides travels as one int32 vector, so that a dispatch costs one transfer.
Token masks alone, which are large and rare, travel apart.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.engine.buckets import Bucket
from jaxserve.model.attention import AttentionBatch
from jaxserve.sampling import SamplingRows

FROM_SLOT = -1
"""As a token id: take the token that this row's slot sampled last."""


_ALIGNMENT = 64
"""Elements; 256 bytes."""


class Column(IntEnum):
    """Per-row values, in the order they are packed; floats travel as their bits."""

    SLOT = 0
    SAMPLES = 1
    CONTEXT_LEN = 2
    OUTPUT_INDEX = 3
    NUM_STEPS = 4
    MIN_TOKENS = 5
    TOP_K = 6
    SEED_HIGH = 7
    SEED_LOW = 8
    HAS_BIAS = 9
    HAS_BAD_WORDS = 10
    HAS_GRAMMAR = 11
    TEMPERATURE = 12
    TOP_P = 13
    MIN_P = 14
    PRESENCE_PENALTY = 15
    FREQUENCY_PENALTY = 16
    REPETITION_PENALTY = 17


def float_bits(value: float) -> int:
    """The bits of `value` as float32, read as int32."""
    return int(np.float32(value).view(np.int32))


def neutral_columns() -> np.ndarray:
    """The columns of a padding row: greedy, no feature, samples nothing."""
    columns = np.zeros(len(Column), np.int32)
    columns[Column.TOP_P] = float_bits(1.0)
    columns[Column.REPETITION_PENALTY] = float_bits(1.0)
    return columns


class ForwardBatch(NamedTuple):
    """One step's input on the device."""

    token_ids: Int32[Array, "T"]
    """FROM_SLOT for decode tokens."""
    token_slots: Int32[Array, "T"]
    """The slot of the request that each token belongs to."""
    last_tokens: Int32[Array, "B"]
    """Flat index of each row's last token, whose logits are sampled."""
    attention: AttentionBatch
    rows: SamplingRows


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each part lies in the packed vector of one bucket."""

    bucket: Bucket
    max_blocks: int
    """M, blocks of the longest request."""
    block_size: int

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        return sum(rows * stride for rows, stride, _ in self._parts())

    def split(self, packed):
        """(token_ids [T], query_starts [B+1], num_decode_rows [1], columns [C, B],
        block_tables [B, M]), as views of `packed` (numpy or JAX)."""
        views = []
        offset = 0
        for rows, stride, shape in self._parts():
            part = packed[offset : offset + rows * stride].reshape(rows, stride)
            views.append(part[:, : shape[-1]].reshape(shape))
            offset += rows * stride
        return views

    def _parts(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(rows, elements from row to row, shape) of each part in order.

        Parts, and the columns that are read one by one, begin at multiples of _ALIGNMENT: XLA
        hands a kernel a slice where it lies, and Mosaic's pointers must be multiples of 256 bytes.
        """
        t, b = self.bucket.num_tokens, self.bucket.num_rows
        parts = [
            (1, _aligned(t), (t,)),
            (1, _aligned(b + 1), (b + 1,)),
            (1, _aligned(1), (1,)),
            (len(Column), _aligned(b), (len(Column), b)),
        ]
        # Last and read whole, so that its rows may stand close.
        return [*parts, (b, self.max_blocks, (b, self.max_blocks))]

    def unpack(
        self, packed: Int32[Array, "size"], step: int | Int32[Array, ""] = 0
    ) -> ForwardBatch:
        """Derive the arrays of one step on the device.

        `step` counts from the one that was packed: each before it gave every row a token. A row
        that takes part in no so late step has no context, writes into block 0 and samples nothing.
        """
        token_ids, query_starts, num_decode, columns, block_tables = self.split(packed)
        num_tokens, num_rows = self.bucket.num_tokens, self.bucket.num_rows
        takes_part = step < columns[Column.NUM_STEPS]
        context_lens = jnp.where(takes_part, columns[Column.CONTEXT_LEN] + step, 0)
        slots = columns[Column.SLOT]

        flat = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(query_starts[1:], flat, side="right", method="compare_all")
        row = jnp.minimum(row, num_rows - 1).astype(jnp.int32)
        valid = (flat < query_starts[-1]) & takes_part[row]
        positions = jnp.where(valid, context_lens[row] - query_starts[row + 1] + flat, 0)
        block = block_tables[row, positions // self.block_size]
        offset = positions % self.block_size
        kv_slots = jnp.where(valid, block * self.block_size + offset, flat % self.block_size)

        def floats(column: Column) -> jax.Array:
            return jax.lax.bitcast_convert_type(columns[column], jnp.float32)

        samples = takes_part & (columns[Column.SAMPLES] != 0)
        output_index = columns[Column.OUTPUT_INDEX] + step
        seed = columns[Column.SEED_HIGH : Column.SEED_LOW + 1].T
        return ForwardBatch(
            token_ids=token_ids,
            token_slots=slots[row],
            last_tokens=jnp.maximum(query_starts[1:] - 1, 0),
            attention=AttentionBatch(
                positions=positions,
                kv_slots=kv_slots,
                block_tables=block_tables,
                query_starts=query_starts,
                context_lens=context_lens,
                num_decode_rows=num_decode[0],
            ),
            rows=SamplingRows(
                slots=slots,
                samples=samples,
                temperature=floats(Column.TEMPERATURE),
                top_p=floats(Column.TOP_P),
                min_p=floats(Column.MIN_P),
                presence_penalty=floats(Column.PRESENCE_PENALTY),
                frequency_penalty=floats(Column.FREQUENCY_PENALTY),
                repetition_penalty=floats(Column.REPETITION_PENALTY),
                top_k=columns[Column.TOP_K],
                seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
                output_index=output_index,
                has_bias=columns[Column.HAS_BIAS] != 0,
                has_bad_words=columns[Column.HAS_BAD_WORDS] != 0,
                has_grammar=samples & (columns[Column.HAS_GRAMMAR] != 0),
                mask_stop_tokens=samples & (output_index < columns[Column.MIN_TOKENS]),
            ),
        )

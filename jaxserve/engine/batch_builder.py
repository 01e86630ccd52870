"""Turns a SchedulerOutput into the one packed host vector that a step reads."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.engine.forward_batch import (
    FROM_SLOT,
    BatchLayout,
    Column,
    float_bits,
    neutral_columns,
)
from jaxserve.engine.request_state import RequestState
from scheduler import ScheduledRequest, SchedulerOutput


def request_columns(state: RequestState) -> np.ndarray:
    """The values of one request that stay the same over its life."""
    params = state.params
    columns = neutral_columns()
    columns[Column.MIN_TOKENS] = params.min_tokens
    columns[Column.TOP_K] = max(params.top_k, 0)
    seed = np.array([state.seed >> 32, state.seed & 0xFFFFFFFF], np.uint32)
    columns[[Column.SEED_HIGH, Column.SEED_LOW]] = seed.view(np.int32)
    columns[Column.HAS_BIAS] = state.has_bias
    columns[Column.HAS_BAD_WORDS] = bool(state.bad_word_token_ids)
    columns[Column.HAS_GRAMMAR] = state.matcher is not None
    columns[Column.TEMPERATURE] = float_bits(params.temperature)
    columns[Column.TOP_P] = float_bits(params.top_p)
    columns[Column.MIN_P] = float_bits(params.min_p)
    columns[Column.PRESENCE_PENALTY] = float_bits(params.presence_penalty)
    columns[Column.FREQUENCY_PENALTY] = float_bits(params.frequency_penalty)
    columns[Column.REPETITION_PENALTY] = float_bits(params.repetition_penalty)
    return columns


class BatchBuilder:
    """Keeps each slot's block table and constant columns on the host, so that a step writes only
    what has changed."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self._block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._table_lens = [0] * max_num_seqs
        self._neutral = neutral_columns()[:, None]
        self._columns = np.tile(self._neutral, max_num_seqs)

    def build(
        self,
        output: SchedulerOutput,
        states: Mapping[str, RequestState],
        layout: BatchLayout,
    ) -> np.ndarray:
        """The packed int32 vector for `layout`; a new array, since the last may be in use yet."""
        packed = np.zeros(layout.size, np.int32)
        token_ids, query_starts, num_decode, columns, block_tables = layout.split(packed)
        token_ids[: output.num_decode] = FROM_SLOT
        num_decode[0] = output.num_decode

        num_rows = len(output.scheduled)
        fields = dict(
            zip(ScheduledRequest._fields, zip(*output.scheduled, strict=True), strict=True)
        )
        slots = np.array(fields["slot"], np.int32)
        num_tokens = np.array(fields["num_tokens"], np.int32)
        ends = np.cumsum(num_tokens)

        for row, end in zip(
            output.scheduled[output.num_decode :], ends[output.num_decode :], strict=True
        ):
            token_ids[end - row.num_tokens : end] = row.token_ids
            if row.admitted:
                self._table_lens[row.slot] = 0
                self._columns[:, row.slot] = request_columns(states[row.request_id])
        self._append_blocks(fields["slot"], fields["new_block_ids"])

        columns[:] = self._neutral
        columns[:, :num_rows] = self._columns[:, slots]
        columns[Column.SLOT, :num_rows] = slots
        columns[Column.SAMPLES, :num_rows] = fields["samples"]
        columns[Column.CONTEXT_LEN, :num_rows] = fields["start"] + num_tokens
        columns[Column.OUTPUT_INDEX, :num_rows] = fields["output_index"]
        columns[Column.NUM_STEPS, :num_rows] = fields["num_steps"]
        query_starts[1 : num_rows + 1] = ends
        query_starts[num_rows + 1 :] = ends[-1]
        longest = max(self._table_lens[slot] for slot in fields["slot"])
        block_tables[:num_rows, :longest] = self._block_tables[slots, :longest]
        return packed

    def _append_blocks(self, slots: Sequence[int], new_block_ids: Sequence[Sequence[int]]) -> None:
        max_blocks = self._block_tables.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for slot, block_ids in zip(slots, new_block_ids, strict=True):
            if block_ids:
                begin = self._table_lens[slot]
                end = begin + len(block_ids)
                places += range(slot * max_blocks + begin, slot * max_blocks + end)
                blocks += block_ids
                self._table_lens[slot] = end
        self._block_tables.put(places, blocks)

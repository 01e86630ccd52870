"""Turns a SchedulerOutput into the one packed host vector that a step reads."""

from collections.abc import Mapping

import numpy as np

from jaxserve.engine.forward_batch import (
    FROM_SLOT,
    BatchLayout,
    Column,
    float_bits,
    neutral_columns,
)
from jaxserve.engine.request_state import RequestState
from scheduler import SchedulerOutput


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
        self._columns = np.tile(neutral_columns(), (max_num_seqs, 1))

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

        tables, table_lens = self._block_tables, self._table_lens
        varying = []
        flat = 0
        for row in output.scheduled:
            slot = row.slot
            if row.admitted:
                table_lens[slot] = 0
                self._columns[slot] = request_columns(states[row.request_id])
            if row.new_block_ids:
                start = table_lens[slot]
                end = start + len(row.new_block_ids)
                tables[slot, start:end] = row.new_block_ids
                table_lens[slot] = end
            num_tokens = row.num_tokens
            varying.append(
                (
                    slot,
                    row.samples,
                    row.start + num_tokens,
                    row.output_index,
                    row.num_steps,
                    num_tokens,
                )
            )
            if row.token_ids is not None:
                token_ids[flat : flat + num_tokens] = row.token_ids
            flat += row.num_tokens

        num_rows = len(varying)
        values = np.array(varying, np.int32).T
        slots = values[0]
        columns[:] = neutral_columns()[:, None]
        columns[:, :num_rows] = self._columns[slots].T
        columns[: Column.NUM_STEPS + 1, :num_rows] = values[:5]
        np.cumsum(values[5], out=query_starts[1 : num_rows + 1])
        query_starts[num_rows + 1 :] = flat
        block_tables[:num_rows] = tables[slots]
        return packed

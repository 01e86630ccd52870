"""The token masks of a step: what the grammar of each row allows next.

A mask depends on the row's newest token, which may still be on the device when the next step is
about to be launched. Then the launch waits for that token: sampling is inside the one step
function, so nothing of the step could begin before. What needs no token (scheduling, packing) is
done before the wait, and what no mask needs (text, log-probabilities, delivery) after the launch.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int32
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.request_state import RequestState
from jaxserve.sampling import num_mask_words
from scheduler import SchedulerOutput


class GrammarMasks:
    """Moves matchers forward and fills masks, several rows at a time on threads of their own."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._executor = LLExecutor()
        self._num_words = num_mask_words(vocab_size)
        bits = np.ones(self._num_words * 32, np.uint8)
        bits[[token for token in eos_token_ids if token < vocab_size]] = 0
        self._not_eos = np.packbits(bits, bitorder="little").view(np.int32)

    def fill(
        self,
        scheduled: SchedulerOutput,
        states: Mapping[str, RequestState],
        previous: InFlight | None,
        num_rows: int,
    ) -> Int32[np.ndarray, "B W"] | None:
        """Masks of a step that is about to be launched; None if no row has a grammar.

        `previous` is the step in flight. To be called once for each step, in the order of their
        launches: it gives every matcher the one token before the row's.
        """
        rows = [
            (index, row.output_index, state)
            for index, row in enumerate(scheduled.scheduled)
            if row.samples and (state := states[row.request_id]).matcher is not None
        ]
        if not rows:
            return None
        if newest := self._newest_tokens(rows, previous):
            self._executor.consume_token_par(newest)
        masks = np.zeros((num_rows, self._num_words), np.int32)
        matchers = [(state.matcher, index) for index, _, state in rows]
        fill_next_token_bitmask_par(self._executor, matchers, masks)
        for index, _, state in rows:
            if state.params.ignore_eos:
                self._hold_back_eos(masks[index])
        return masks

    def _newest_tokens(
        self, rows: list[tuple[int, int, RequestState]], previous: InFlight | None
    ) -> list[tuple[object, int]]:
        newest = []
        sampled = None
        for _, output_index, state in rows:
            known = state.request.output_token_ids
            if output_index == 0:
                continue
            if output_index <= len(known):
                token = known[output_index - 1]
            else:
                sampled = sampled or previous.sampled()
                token = sampled[state.request.request_id]
            newest.append((state.matcher, token))
        return newest

    def _hold_back_eos(self, mask: Int32[np.ndarray, "W"]) -> None:
        """Ban the end where the grammar allows to go on."""
        others = mask & self._not_eos
        if others.any():
            mask[:] = others

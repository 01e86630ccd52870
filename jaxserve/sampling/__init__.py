"""From logits to tokens, on the device, every row with its own parameters."""

from jaxserve.sampling.sampler import TokenLogprobs, sample, token_logprobs
from jaxserve.sampling.slot_state import (
    check_token_ids,
    load_slot,
    needs_slot_state,
    new_slot_state,
    slot_rows,
)
from pallas_kernels.sample_tokens import SamplingRows, SlotState, num_mask_words

__all__ = [
    "SamplingRows",
    "SlotState",
    "TokenLogprobs",
    "check_token_ids",
    "load_slot",
    "needs_slot_state",
    "new_slot_state",
    "num_mask_words",
    "sample",
    "slot_rows",
    "token_logprobs",
]

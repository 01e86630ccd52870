from pallas_kernels.sample_tokens.arrays import (
    IN_OUTPUT,
    IN_PROMPT,
    IS_STOP,
    NO_TOKEN,
    SamplingRows,
    SlotState,
    num_mask_words,
)
from pallas_kernels.sample_tokens.dispatch import sample_tokens

__all__ = [
    "IN_OUTPUT",
    "IN_PROMPT",
    "IS_STOP",
    "NO_TOKEN",
    "SamplingRows",
    "SlotState",
    "num_mask_words",
    "sample_tokens",
]

"""The contract between the scheduler and whoever runs the step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.request import FinishReason


class ScheduledRequest(NamedTuple):
    """The tokens of one request in one step, at positions start .. start + num_tokens - 1.

    A tuple, since there is one for each running request in each step: it is made and turned into
    columns in a fraction of the time that a dataclass takes.
    """

    request_id: str
    slot: int
    """Row of the per-request device state; fixed from admission until the request leaves."""
    start: int
    """Tokens of this request already in the KV cache."""
    num_tokens: int
    token_ids: Sequence[int] | None
    """The ids, or None for a decode row: the one id that this slot's previous step sampled, which
    is on the device and may not be known here yet."""
    new_block_ids: Sequence[int]
    """Blocks to append to this slot's block table (to an empty table if `admitted`)."""
    samples: bool
    """True if the last of these tokens is the newest, so that the step samples the next."""
    output_index: int
    """Index among the request's output tokens of the one sampled here (0 for the first)."""
    admitted: bool
    """True in the first step after (re-)admission: the slot still holds somebody else's state."""
    num_steps: int = 1
    """Steps of this dispatch that the row takes part in, a token each: more than one for decode
    rows alone."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One dispatch: a step, or several if all rows decode.

    Rows are ordered: decode rows (one token a step, `token_ids is None`) first.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    num_decode: int
    """How many leading rows are decode rows."""
    num_tokens: int
    """Of the first step."""
    preempted: tuple[str, ...]
    """Requests that lost their slot and blocks to make room, and wait to be recomputed."""
    num_steps: int = 1
    """Decode steps that run one after another; row b takes part in the first `num_steps` of its
    own."""


class TokenEvent(NamedTuple):
    """What one finished dispatch means for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """At least one; none after the token that ended the request."""
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    """The stop token that ended it, if one did (it is also the last of `token_ids`)."""

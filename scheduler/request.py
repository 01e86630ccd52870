"""A request as the scheduler sees it: token counts, limits, stop ids, priority."""

from dataclasses import dataclass, field
from enum import Enum


class FinishReason(Enum):
    """Why a request ended; the values are OpenAI's `finish_reason` words, and vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate. The caller fills the first group, the scheduler owns the second."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    """Most output tokens, already clipped so that prompt + output fits `max_model_len`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the request once `min_tokens` are out (the end-of-sequence id too)."""
    min_tokens: int = 0
    priority: int = 0
    """Lower runs earlier; looked at by the priority policy alone."""
    use_prefix_cache: bool = True
    """False: compute every prompt position (prompt log-probabilities need them all)."""

    output_token_ids: list[int] = field(default_factory=list)
    slot: int = -1
    """Row of the per-request device state, -1 while not running."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are written by the steps launched so far."""
    num_sampled_tokens: int = 0
    """Output tokens that the steps launched so far sample, those in flight included."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache supplied at the first admission."""
    num_preemptions: int = 0
    arrival_index: int = -1
    finish_reason: FinishReason | None = None
    is_prefilling: bool = False
    """Running, with known tokens that no step has computed since it was (re-)admitted."""
    block_ids: list[int] = field(default_factory=list)
    """The block table: block i holds tokens i * block_size .. (i + 1) * block_size - 1."""
    block_digests: list[bytes] = field(default_factory=list)
    """Chained digests of the full blocks of known tokens, as far as anybody asked for them."""
    num_committed_blocks: int = 0
    """Leading blocks of the table that the prefix cache has been told of."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose ids are known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_in_flight_tokens(self) -> int:
        """Sampled by launched steps, ids not yet reported through `update`."""
        return self.num_sampled_tokens - len(self.output_token_ids)

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Known ids at positions start .. stop - 1, without joining prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]

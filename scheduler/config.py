"""What the scheduler needs to know before the first request."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler. Lengths are in tokens, the cache in blocks.

    `num_blocks` counts block 0, which takes the writes of padding and is never given to a request.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    policy: Policy = "fcfs"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is for padding), got {self.num_blocks}"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")

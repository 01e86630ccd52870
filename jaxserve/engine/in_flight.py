"""A dispatch that was launched and whose tokens the scheduler has not been told yet."""

import time
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxserve.engine.logprobs import StepLogprobs
from scheduler import SchedulerOutput


@dataclass(slots=True)
class InFlight:
    scheduled: SchedulerOutput
    device_token_ids: jax.Array
    """By step and row."""
    logprobs: StepLogprobs | None
    launched_s: float
    arrived_s: float | None = None
    """When its tokens were seen on the host."""
    _token_ids: list[tuple[int, ...]] = field(default_factory=list)

    def token_ids(self) -> list[tuple[int, ...]]:
        """For each scheduled row, one a step; waits for the end."""
        if self.arrived_s is None:
            sampled = np.asarray(self.device_token_ids)
            rows = self.scheduled.scheduled
            steps = sampled[: self.scheduled.num_steps, : len(rows)].tolist()
            self._token_ids = list(zip(*steps, strict=True))
            self.arrived_s = time.monotonic()
        return self._token_ids

    def sampled(self) -> dict[str, int]:
        """The token of each request that a single step samples; waits as `token_ids` does."""
        rows = zip(self.scheduled.scheduled, self.token_ids(), strict=True)
        return {row.request_id: token for row, (token,) in rows if row.samples}

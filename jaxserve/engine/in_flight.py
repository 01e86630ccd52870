"""A step that was launched and whose tokens the scheduler has not been told yet."""

import time
from dataclasses import dataclass, field

import numpy as np

from jaxserve.engine.step import StepOutput
from scheduler import SchedulerOutput


@dataclass(slots=True)
class InFlight:
    scheduled: SchedulerOutput
    output: StepOutput
    launched_s: float
    arrived_s: float | None = None
    """When its tokens were seen on the host."""
    _token_ids: list[int] = field(default_factory=list)

    def token_ids(self) -> list[int]:
        """One for each scheduled row; waits for the step to end."""
        if self.arrived_s is None:
            sampled = np.asarray(self.output.sampled.token_ids)
            self._token_ids = sampled[: len(self.scheduled.scheduled)].tolist()
            self.arrived_s = time.monotonic()
        return self._token_ids

    def sampled(self) -> dict[str, int]:
        """The token of each request that the step samples; waits as `token_ids` does."""
        rows = zip(self.scheduled.scheduled, self.token_ids(), strict=True)
        return {row.request_id: token for row, token in rows if row.samples}

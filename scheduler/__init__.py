"""Continuous batching over a paged KV cache, and a simulator of it; the standard library only."""

from scheduler.config import Policy, SchedulerConfig
from scheduler.output import ScheduledRequest, SchedulerOutput, TokenEvent
from scheduler.prefix_cache import PrefixCacheStats, block_digest
from scheduler.request import FinishReason, Request
from scheduler.scheduler import Scheduler
from scheduler.simulator import (
    CostModel,
    Percentiles,
    RequestTiming,
    SimulationResult,
    TraceRequest,
    read_trace,
    simulate,
)

__all__ = [
    "CostModel",
    "FinishReason",
    "Percentiles",
    "Policy",
    "PrefixCacheStats",
    "Request",
    "RequestTiming",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SimulationResult",
    "TokenEvent",
    "TraceRequest",
    "block_digest",
    "read_trace",
    "simulate",
]

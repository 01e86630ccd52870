"""jaxserve: LLM inference in JAX for NVIDIA GPUs."""

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import EngineDeadError
from jaxserve.llm import LLM, AsyncLLM, RequestErrors
from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "Logprob",
    "RequestErrors",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]

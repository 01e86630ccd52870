"""jaxserve: LLM inference in JAX for NVIDIA GPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.engine.streams import EngineDeadError
    from jaxserve.llm import LLM, AsyncLLM, RequestErrors

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
    "StructuredOutputsParams",
]

# Imported when first asked for: they bring in JAX, which takes longer than `jaxserve --help` may.
_MODULES = {
    "AsyncLLM": "jaxserve.llm",
    "EngineDeadError": "jaxserve.engine.streams",
    "LLM": "jaxserve.llm",
    "RequestErrors": "jaxserve.llm",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

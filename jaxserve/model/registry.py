"""Which class builds which architecture of config.json."""

from jaxserve.model.decoder import CausalLM
from jaxserve.model.llama import LlamaForCausalLM
from jaxserve.model.mistral import MistralForCausalLM
from jaxserve.model.qwen2 import Qwen2ForCausalLM
from jaxserve.model.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
"""One for each of `ARCHITECTURES`."""

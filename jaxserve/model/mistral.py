"""Mistral (arXiv:2310.06825)."""

from jaxserve.model.config import ModelConfig
from jaxserve.model.decoder import CausalLM
from jaxserve.model.layers import AttentionOptions


class MistralForCausalLM(CausalLM):
    """Sliding-window attention in every layer where `sliding_window` is set; no biases."""

    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=config.sliding_windows[layer])

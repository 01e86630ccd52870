"""Llama 1, 2 and 3.x, and all that is built like them."""

from jaxserve.model.config import ModelConfig
from jaxserve.model.decoder import CausalLM
from jaxserve.model.layers import AttentionOptions


class LlamaForCausalLM(CausalLM):
    """Full attention; QKV and O have biases where `attention_bias` says so."""

    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=config.attention_bias, o_bias=config.attention_bias)

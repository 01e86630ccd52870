"""Qwen3, dense (arXiv:2505.09388)."""

from jaxserve.model.config import ModelConfig
from jaxserve.model.decoder import CausalLM
from jaxserve.model.layers import AttentionOptions


class Qwen3ForCausalLM(CausalLM):
    """Query and key heads are normed; biases and windows where the configuration says so."""

    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=True,
            sliding_window=config.sliding_windows[layer],
        )

"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from jaxserve.model.config import ModelConfig
from jaxserve.model.decoder import CausalLM
from jaxserve.model.layers import AttentionOptions


class Qwen2ForCausalLM(CausalLM):
    """QKV always has biases, O never; some layers may have a sliding window."""

    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        return AttentionOptions(qkv_bias=True, sliding_window=config.sliding_windows[layer])

"""The least time that a step can take: what it must read, and what it must compute.

Sizes are of a config.json (`shapes.SHAPES`), weights and cache in `itemsize` bytes an element.
"""

from typing import Any


def num_params(shape: dict[str, Any]) -> int:
    """Parameters that a step reads: all but the rows of the embedding that it does not look up."""
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * intermediate
    return shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden


def kv_bytes_per_token(shape: dict[str, Any], itemsize: int = 2) -> int:
    """Keys and values of one token in all layers."""
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * itemsize


def decode_floor_ms(
    shape: dict[str, Any],
    batch_size: int,
    context_len: float,
    bytes_per_s: float,
    flops_per_s: float,
    itemsize: int = 2,
) -> float:
    """The slower of reading weights and cache once, and multiplying every row by every weight."""
    read = num_params(shape) * itemsize
    read += batch_size * context_len * kv_bytes_per_token(shape, itemsize)
    return 1000 * max(read / bytes_per_s, 2 * num_params(shape) * batch_size / flops_per_s)


def tokens_per_s_ceiling(shape: dict[str, Any], flops_per_s: float) -> float:
    """Tokens a second, prompt and output together, if nothing but the weights' products were to be
    computed."""
    return flops_per_s / (2 * num_params(shape))

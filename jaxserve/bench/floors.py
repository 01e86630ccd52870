"""The least time that work can take: what must be read, and what must be computed.

Sizes are of a config.json (`shapes.SHAPES`), weights and cache in `itemsize` bytes an element;
rates are of one device. Activations, norms and sampling count as nothing.
"""

from collections.abc import Sequence
from typing import Any


def num_layer_params(shape: dict[str, Any]) -> int:
    """Weights of all layers' products."""
    hidden = shape["hidden_size"]
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = hidden * _head_dim(shape) * heads + 3 * hidden * shape["intermediate_size"]
    return shape["num_hidden_layers"] * layer


def num_output_params(shape: dict[str, Any]) -> int:
    """Weights of the product that makes logits; a tied model's embedding."""
    return shape["vocab_size"] * shape["hidden_size"]


def kv_bytes_per_token(shape: dict[str, Any], itemsize: int = 2) -> int:
    """Keys and values of one token in all layers."""
    per_layer = 2 * shape["num_key_value_heads"] * _head_dim(shape) * itemsize
    return shape["num_hidden_layers"] * per_layer


def decode_floor_ms(
    shape: dict[str, Any],
    batch_size: int,
    context_len: float,
    bytes_per_s: float,
    flops_per_s: float,
    itemsize: int = 2,
) -> float:
    """Of one step: the slower of reading weights and cache once, and computing."""
    params = num_layer_params(shape) + num_output_params(shape)
    read = params * itemsize + batch_size * context_len * kv_bytes_per_token(shape, itemsize)
    flops = batch_size * (2 * params + context_len * _attention_flops(shape))
    return 1000 * max(read / bytes_per_s, flops / flops_per_s)


def workload_floor_s(
    shape: dict[str, Any],
    lengths: Sequence[tuple[int, int]],
    max_num_seqs: int,
    bytes_per_s: float,
    flops_per_s: float,
    itemsize: int = 2,
) -> float:
    """Of a whole workload of (input, output) tokens: the slower of its arithmetic, and of what its
    decode steps read.

    There are no fewer steps than the longest output has tokens, nor than all outputs have, divided
    by `max_num_seqs`; each reads the weights. Every output token but the first reads its context.
    """
    num_outputs = sum(o for _, o in lengths)
    # Token n of a request attends to n tokens.
    contexts = sum((i + o - 1) * (i + o) / 2 for i, o in lengths)
    decode_contexts = contexts - sum(i * (i + 1) / 2 for i, _ in lengths)
    flops = 2 * num_layer_params(shape) * sum(i + o - 1 for i, o in lengths)
    flops += 2 * num_output_params(shape) * num_outputs + contexts * _attention_flops(shape)
    steps = max(max(o for _, o in lengths), num_outputs / max_num_seqs)
    read = steps * (num_layer_params(shape) + num_output_params(shape)) * itemsize
    read += decode_contexts * kv_bytes_per_token(shape, itemsize)
    return max(flops / flops_per_s, read / bytes_per_s)


def _head_dim(shape: dict[str, Any]) -> int:
    return shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]


def _attention_flops(shape: dict[str, Any]) -> int:
    """Of one token for each token that it attends to: scores, and their sum of values."""
    return 4 * shape["num_hidden_layers"] * shape["num_attention_heads"] * _head_dim(shape)

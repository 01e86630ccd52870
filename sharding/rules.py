"""How each array is split, by its name: the dotted path of its keys, "layers.0.attn.o.weight".

The split follows Megatron-LM (arXiv:1909.08053): QKV and gate/up by output, O and down by input,
embedding and head by vocabulary, the rest whole on every device.
"""

import re
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec as P

from sharding.mesh import TENSOR_AXIS

KV_CACHE_SPEC = P(None, TENSOR_AXIS)
"""Of each layer's [blocks, kv heads, 2, block size, head dim]."""

_LAYER = r"layers\.\d+\."
_RULES = tuple(
    (re.compile(pattern), spec)
    for pattern, spec in (
        (r"(embed|head)\.weight", P(TENSOR_AXIS)),
        (_LAYER + r"attn\.qkv\.(weight|bias)", P(TENSOR_AXIS)),
        (_LAYER + r"attn\.o\.weight", P(None, TENSOR_AXIS)),
        (_LAYER + r"attn\.o\.bias", P()),
        (_LAYER + r"attn\.[qk]_norm\.weight", P()),
        (_LAYER + r"mlp\.gate_up\.weight", P(None, TENSOR_AXIS)),
        (_LAYER + r"mlp\.down\.weight", P(None, TENSOR_AXIS)),
        (_LAYER + r"(attn|mlp)_norm\.weight", P()),
        (r"norm\.weight", P()),
    )
)


def partition_spec(path: str) -> P:
    """The split of the array at `path`; ValueError where no rule speaks of it."""
    for pattern, spec in _RULES:
        if pattern.fullmatch(path):
            return spec
    raise ValueError(f"no partition rule for the array {path!r}")


def map_with_path(function: Callable[..., Any], *trees: dict[str, Any], path: str = "") -> Any:
    """Apply function(path, leaf, ...) to nested dicts of one structure; a dict of the results."""
    if not isinstance(trees[0], dict):
        return function(path, *trees)
    prefix = f"{path}." if path else ""
    return {
        key: map_with_path(function, *(tree[key] for tree in trees), path=prefix + key)
        for key in trees[0]
    }


def partition_specs(arrays: dict[str, Any]) -> dict[str, Any]:
    """The splits of nested dicts of arrays, in the same nesting."""
    return map_with_path(lambda path, _: partition_spec(path), arrays)

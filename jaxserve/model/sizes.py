"""The global sizes of a model's arrays, which depend on how many devices share it."""

from dataclasses import dataclass

from jaxserve.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class GlobalSizes:
    """Sizes of the dimensions that are split, before the split."""

    num_kv_heads: int
    """KV heads in the arrays: each of the model's is repeated where devices outnumber them."""
    group_size: int
    """Query heads of each of these KV heads."""
    num_vocab_rows: int
    """The vocabulary, filled up to a multiple of the devices."""


def global_sizes(config: ModelConfig, tensor_parallel_size: int) -> GlobalSizes:
    """Split by whole query heads; ValueError naming the sizes allowed where that is impossible.

    A KV head that serves several devices is repeated, its query heads dealt among the copies in
    order, so that query heads keep the checkpoint's order at every size.
    """
    if not _fits(config, tensor_parallel_size):
        allowed = [n for n in range(1, config.num_heads + 1) if _fits(config, n)]
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide this model "
            f"({config.num_heads} heads, {config.num_kv_heads} KV heads, intermediate size "
            f"{config.intermediate_size}); allowed: {', '.join(map(str, allowed))}"
        )
    num_kv_heads = max(config.num_kv_heads, tensor_parallel_size)
    return GlobalSizes(
        num_kv_heads=num_kv_heads,
        group_size=config.num_heads // num_kv_heads,
        num_vocab_rows=-(-config.vocab_size // tensor_parallel_size) * tensor_parallel_size,
    )


def _fits(config: ModelConfig, num_devices: int) -> bool:
    fewer, more = sorted((config.num_kv_heads, num_devices))
    return (
        more % fewer == 0
        and config.num_heads % more == 0
        and config.intermediate_size % num_devices == 0
    )

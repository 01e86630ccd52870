"""Every program that serving runs, compiled before the engine says ready.

Execution takes them from a table by bucket and compiles nothing: a shape that is not in the table
is a KeyError, not a new compilation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.engine.buckets import Bucket
from jaxserve.engine.forward_batch import NO_TARGET, BatchLayout
from jaxserve.engine.step import make_step
from jaxserve.model.definition import ModelDefinition
from jaxserve.sampling import load_slot, new_slot_state, num_mask_words
from sharding import KV_CACHE_SPEC, shardings

COMPILE_THREADS = 8


@dataclass(frozen=True)
class Programs:
    """The compiled step of each bucket, and the one that fills a slot's sampling state."""

    steps: dict[Bucket, Callable]
    layouts: dict[Bucket, BatchLayout]
    load_slot: Callable
    temp_bytes: int
    """Largest scratch memory of any step on one device."""


def use_compilation_cache(folder: str | None) -> None:
    """Keep this process's compiled programs in `folder`; None: in the user's cache, unless a place
    was chosen before; "": leave JAX's setting alone.

    JAX has one place for a process: ValueError if `folder` is not the one that is in use.
    """
    current = jax.config.jax_compilation_cache_dir
    if folder == "" or (folder is None and current is not None):
        return
    chosen = folder or str(Path(platformdirs.user_cache_dir("jaxserve")) / "compiled")
    if current is not None and current != chosen:
        raise ValueError(
            f"compilation_cache_dir must be {current!r}, which this process uses already, "
            f"got {folder!r}"
        )
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def abstract_arguments(
    definition: ModelDefinition,
    mesh: Mesh,
    layout: BatchLayout,
    num_blocks: int,
    max_num_seqs: int,
):
    """Shapes, types and shardings of a step's (params, kv_caches, slots, packed,
    token_masks)."""

    def struct(shape_dtype, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape_dtype.shape, shape_dtype.dtype, sharding=sharding)

    params = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        definition.abstract_params,
        shardings(definition.abstract_params, mesh),
    )
    shape = definition.kv_cache_shape(num_blocks, layout.block_size)
    kv_cache = struct(jax.ShapeDtypeStruct(shape, definition.dtype), KV_CACHE_SPEC)
    slots = jax.eval_shape(lambda: new_slot_state(max_num_seqs, definition.config.vocab_size))
    slots = jax.tree.map(lambda x: struct(x, P()), slots)
    packed = struct(jax.ShapeDtypeStruct((layout.size,), jnp.int32), P())
    masks_shape = token_masks_shape(layout.bucket, definition.config.vocab_size)
    token_masks = struct(jax.ShapeDtypeStruct(masks_shape, jnp.int32), P())
    return params, (kv_cache,) * definition.config.num_layers, slots, packed, token_masks


def token_masks_shape(bucket: Bucket, vocab_size: int) -> tuple[int, int]:
    """[B, W] of the masks that a bucket's step takes."""
    return bucket.num_rows, num_mask_words(vocab_size)


def compile_programs(
    definition: ModelDefinition,
    mesh: Mesh,
    layouts: dict[Bucket, BatchLayout],
    num_blocks: int,
    max_num_seqs: int,
    max_logprobs: int,
) -> Programs:
    """Compile the step for every layout, several at a time."""

    def compile_step(layout: BatchLayout):
        step = make_step(definition, mesh, layout, max_logprobs)
        arguments = abstract_arguments(definition, mesh, layout, num_blocks, max_num_seqs)
        return step.lower(*arguments).compile()

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        steps = dict(zip(layouts, pool.map(compile_step, layouts.values()), strict=True))

    _, _, slots, *_ = abstract_arguments(
        definition, mesh, next(iter(layouts.values())), num_blocks, max_num_seqs
    )
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=NamedSharding(mesh, P())),
        slots,
    )
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    load = jax.jit(load_slot, donate_argnums=0).lower(slots, slot, *rows[1:]).compile()
    temp_bytes = max(step.memory_analysis().temp_size_in_bytes for step in steps.values())
    return Programs(steps, layouts, load, temp_bytes)


def padding_batch(layout: BatchLayout) -> np.ndarray:
    """A packed batch without a request: what warm-up runs."""
    packed = np.zeros(layout.size, np.int32)
    layout.split(packed)[1].fill(NO_TARGET)
    return packed

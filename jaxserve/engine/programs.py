"""Every program that serving runs, compiled before the engine says ready.

Execution takes them from a table by bucket and compiles nothing: a shape that is not in the table
is a KeyError, not a new compilation.
"""

import os
import threading
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
from jaxserve.engine.executables import ExecutableCache
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.logprobs import make_logprobs, tile_size
from jaxserve.engine.step import make_step
from jaxserve.model.definition import ModelDefinition
from jaxserve.sampling import load_slot, new_slot_state, num_mask_words
from sharding import KV_CACHE_SPEC, shardings

COMPILE_THREADS = 16
COMPILE_NICENESS = 10
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Products of few tokens are our own kernels', those of many cuBLAS's first choice: timing all
choices for each product of each program takes minutes."""


@dataclass(frozen=True)
class Programs:
    """What serving runs, by bucket, and the program that fills a slot's sampling state."""

    steps: dict[Bucket, Callable]
    decode_steps: dict[Bucket, Callable]
    """Several decode steps in one; of the buckets where that pays."""
    logprobs: dict[Bucket, Callable]
    layouts: dict[Bucket, BatchLayout]
    load_slot: Callable
    temp_bytes: int
    """Largest scratch memory of any program on one device."""


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


def input_sharding(mesh: Mesh) -> NamedSharding:
    """Where the host leaves a packed batch.

    For a GPU, in host memory that it can read itself: a copy to the device by the host would wait
    for the step in flight, and the next launch for the copy.
    """
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    return NamedSharding(mesh, P(), memory_kind="pinned_host" if on_gpu else None)


def executables_folder() -> Path | None:
    """Where to keep whole executables: beside what JAX keeps, if it keeps anything on disk."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) / "executables" if folder and "://" not in folder else None


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
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=input_sharding(mesh))
    masks_shape = token_masks_shape(layout.bucket, definition.config.vocab_size)
    token_masks = struct(jax.ShapeDtypeStruct(masks_shape, jnp.int32), P())
    return params, (kv_cache,) * definition.config.num_layers, slots, packed, token_masks


def lower_step(
    definition: ModelDefinition,
    mesh: Mesh,
    layout: BatchLayout,
    num_steps: int,
    num_blocks: int,
    max_num_seqs: int,
) -> jax.stages.Lowered:
    """The program of one step, or of several decode steps in one dispatch, yet to be compiled."""
    arguments = abstract_arguments(definition, mesh, layout, num_blocks, max_num_seqs)
    return make_step(definition, mesh, layout, num_steps).lower(*arguments)


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
    num_decode_steps: int,
    cache: ExecutableCache,
) -> Programs:
    """Compile what every layout needs, several programs at a time.

    Buckets of decode rows alone (a row for each token) get `num_decode_steps` in one program too.
    """
    replicated = NamedSharding(mesh, P())
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    options = GPU_OPTIONS if on_gpu else None
    # Tracing holds the interpreter's lock in any case, and one after another they find the Triton
    # kernels that those before have compiled. XLA compiles outside of it.
    tracer = ThreadPoolExecutor(1)

    def compile_step(layout: BatchLayout, num_steps: int) -> Callable:
        def compile_it() -> jax.stages.Compiled:
            arguments = definition, mesh, layout, num_steps, num_blocks, max_num_seqs
            return tracer.submit(lower_step, *arguments).result().compile(options)

        return cache.load_or_compile(compile_it, "step", layout, num_steps, num_blocks)

    def compile_logprobs(layout: BatchLayout) -> Callable:
        num_tokens, num_rows = layout.bucket.num_tokens, layout.bucket.num_rows

        def struct(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

        params, *_ = abstract_arguments(definition, mesh, layout, num_blocks, max_num_seqs)
        hidden = struct((num_tokens, definition.config.hidden_size), definition.dtype)
        sampled = struct((1, num_rows), jnp.int32)
        queries = struct((tile_size(layout), 2), jnp.int32)

        def compile_it() -> jax.stages.Compiled:
            program = make_logprobs(definition, mesh, max_logprobs)
            lowering = tracer.submit(program.lower, params, hidden, sampled, queries)
            return lowering.result().compile(options)

        return cache.load_or_compile(compile_it, "logprobs", layout, max_logprobs)

    yielding = _yield_to_tracing if on_gpu else None
    with tracer, ThreadPoolExecutor(COMPILE_THREADS, initializer=yielding) as pool:

        def start(compile_one: Callable, *args: int, only_decode: bool = False) -> dict:
            return {  # the largest takes longest: first
                bucket: pool.submit(compile_one, layout, *args)
                for bucket, layout in reversed(layouts.items())
                if not only_decode or bucket.num_rows == bucket.num_tokens
            }

        started = [
            start(compile_step, 1),
            start(compile_step, num_decode_steps, only_decode=True) if num_decode_steps > 1 else {},
            start(compile_logprobs),
        ]
        steps, decode_steps, logprobs = (
            {bucket: future.result() for bucket, future in futures.items()} for futures in started
        )

    _, _, slots, *_ = abstract_arguments(
        definition, mesh, next(iter(layouts.values())), num_blocks, max_num_seqs
    )
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=replicated), slots
    )
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    load = jax.jit(load_slot, donate_argnums=0).lower(slots, slot, *rows[1:]).compile()
    temp_bytes = max(
        program.memory_analysis().temp_size_in_bytes
        for programs in (steps, decode_steps, logprobs)
        for program in programs.values()
    )
    return Programs(steps, decode_steps, logprobs, layouts, load, temp_bytes)


def _yield_to_tracing() -> None:
    """Let this thread, and those that XLA starts for it, stand back: more of them want to run than
    there are processors, and the thread that traces is the one that all wait for. On Linux, where
    GPUs are, each thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)


def padding_batch(layout: BatchLayout) -> np.ndarray:
    """A packed batch without a request: what warm-up runs."""
    return np.zeros(layout.size, np.int32)

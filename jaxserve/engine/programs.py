"""Every program that serving runs, compiled before the engine says ready.

Execution takes them from a table by bucket and compiles nothing: a shape that is not in the table
is a KeyError, not a new compilation.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
from jaxserve.engine.logprobs import LOGPROBS_TILES, make_logprobs
from jaxserve.engine.state import StateSizes, abstract_state
from jaxserve.engine.step import make_step
from jaxserve.model.definition import ModelDefinition, Params
from jaxserve.sampling import load_slot, num_mask_words
from sharding import shardings

COMPILE_NICENESS = 10
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Products of few tokens are our own kernels', those of many cuBLAS's first choice: timing all
choices for each product of each program takes minutes."""


@dataclass(frozen=True)
class Programs:
    """What serving runs: the steps by bucket, and the small programs beside them."""

    steps: dict[Bucket, Callable]
    decode_steps: dict[Bucket, Callable]
    """Several decode steps in one; of the buckets where that pays."""
    receive: dict[Bucket, Callable]
    """(inputs, packed) -> inputs: a packed batch into where the bucket's steps read it."""
    logprobs: dict[int, Callable]
    """By the number of positions that are scored at once."""
    layouts: dict[Bucket, BatchLayout]
    load_slot: Callable
    copy: Callable
    """Of the token ids, for the host to read while the next dispatch writes."""
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


def host_sharding(mesh: Mesh) -> NamedSharding:
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


def abstract_params(definition: ModelDefinition, mesh: Mesh) -> Params:
    """Shapes, types and shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        definition.abstract_params,
        shardings(definition.abstract_params, mesh),
    )


def lower_step(
    definition: ModelDefinition,
    mesh: Mesh,
    layout: BatchLayout,
    num_steps: int,
    sizes: StateSizes,
) -> jax.stages.Lowered:
    """The program of one step, or of several decode steps in one dispatch, yet to be compiled."""
    replicated = NamedSharding(mesh, P())
    masks_shape = token_masks_shape(layout.bucket, definition.config.vocab_size)
    return make_step(definition, mesh, layout, num_steps).lower(
        abstract_params(definition, mesh),
        abstract_state(definition, mesh, sizes),
        jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=replicated),
        jax.ShapeDtypeStruct(masks_shape, jnp.int32, sharding=replicated),
    )


def compile_receive(mesh: Mesh, layout: BatchLayout) -> jax.stages.Compiled:
    """A program apart, since graphs hold addresses and each transfer from the host has another."""

    def receive(inputs, packed):
        return jax.device_put(packed, jax.memory.Space.Device)

    here, host = (
        jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=sharding)
        for sharding in (NamedSharding(mesh, P()), host_sharding(mesh))
    )
    program = jax.jit(receive, donate_argnums=0, keep_unused=True, out_shardings=here.sharding)
    return program.lower(here, host).compile()


def token_masks_shape(bucket: Bucket, vocab_size: int) -> tuple[int, int]:
    """[B, W] of the masks that a bucket's step takes."""
    return bucket.num_rows, num_mask_words(vocab_size)


def compile_programs(
    definition: ModelDefinition,
    mesh: Mesh,
    layouts: dict[Bucket, BatchLayout],
    sizes: StateSizes,
    max_logprobs: int,
    cache: ExecutableCache,
) -> Programs:
    """Compile what every layout needs, several programs at a time.

    Buckets of decode rows alone (a row for each token) get `sizes.max_num_steps` in one program
    too.
    """
    replicated = NamedSharding(mesh, P())
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    options = GPU_OPTIONS if on_gpu else None
    state = abstract_state(definition, mesh, sizes)
    # Tracing holds the interpreter's lock in any case, and one after another they find the Triton
    # kernels that those before have compiled. XLA compiles outside of it. Writing a program holds
    # it too, so that is left for when all are lowered and XLA compiles the last ones.
    tracer = ThreadPoolExecutor(1)

    def compile_step(layout: BatchLayout, num_steps: int) -> Callable:
        def compile_it() -> jax.stages.Compiled:
            lowering = tracer.submit(lower_step, definition, mesh, layout, num_steps, sizes)
            return lowering.result().compile(options)

        return cache.load_or_compile(compile_it, "step", layout, num_steps, sizes, keeper=tracer)

    def compile_logprobs(tile: int) -> Callable:
        def compile_it() -> jax.stages.Compiled:
            program = make_logprobs(definition, mesh, max_logprobs)
            queries = jax.ShapeDtypeStruct((tile, 2), jnp.int32, sharding=replicated)
            arguments = abstract_params(definition, mesh), state.output, queries
            return tracer.submit(program.lower, *arguments).result().compile(options)

        shapes = [part.shape for part in state.output]
        return cache.load_or_compile(
            compile_it, "logprobs", tile, shapes, max_logprobs, keeper=tracer
        )

    yielding = _yield_to_tracing if on_gpu else None
    # A thread for each program, so that all wait for the tracer before any is to be written.
    num_threads = 2 * len(layouts) + len(LOGPROBS_TILES)
    with tracer, ThreadPoolExecutor(num_threads, initializer=yielding) as pool:

        def start(num_steps: int, *, only_decode: bool) -> dict[Bucket, Future]:
            return {  # the largest takes longest: first
                bucket: pool.submit(compile_step, layout, num_steps)
                for bucket, layout in reversed(layouts.items())
                if not only_decode or bucket.num_rows == bucket.num_tokens
            }

        several = sizes.max_num_steps
        started = [
            start(1, only_decode=False),
            start(several, only_decode=True) if several > 1 else {},
            {tile: pool.submit(compile_logprobs, tile) for tile in LOGPROBS_TILES},
        ]
        steps, decode_steps, logprobs = (
            {key: future.result() for key, future in futures.items()} for futures in started
        )

    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    rows = [
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=replicated) for x in state.slots[1:]
    ]
    load = jax.jit(load_slot, donate_argnums=0).lower(state.slots, slot, *rows).compile()
    copy = jax.jit(jnp.copy).lower(state.output.token_ids).compile()
    receive = {bucket: compile_receive(mesh, layout) for bucket, layout in layouts.items()}
    temp_bytes = max(
        program.memory_analysis().temp_size_in_bytes
        for programs in (steps, decode_steps, logprobs)
        for program in programs.values()
    )
    return Programs(steps, decode_steps, receive, logprobs, layouts, load, copy, temp_bytes)


def _yield_to_tracing() -> None:
    """Let this thread, and those that XLA starts for it, stand back: more of them want to run than
    there are processors, and the thread that traces is the one that all wait for. On Linux, where
    GPUs are, each thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)


def padding_batch(layout: BatchLayout) -> np.ndarray:
    """A packed batch without a request: what warm-up runs."""
    return np.zeros(layout.size, np.int32)

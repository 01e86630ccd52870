"""Every program that serving runs, compiled before the engine says ready.

Execution takes them from a table by bucket and compiles nothing: a shape that is not in the table
is a KeyError, not a new compilation.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

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


class ProgramKey(NamedTuple):
    """One of the larger programs."""

    kind: Literal["step", "decode_step", "logprobs"]
    """A step, several steps of decode rows alone, or the log-probabilities."""
    of: Bucket | int
    """The bucket; of log-probabilities how many positions are scored at once."""


ShareOut = Callable[[Sequence[ProgramKey]], AbstractContextManager[Sequence[ProgramKey]]]


@dataclass(frozen=True)
class Compiler:
    """Compiles what every layout needs, several programs at a time.

    Buckets of decode rows alone (a row for each token) get `sizes.max_num_steps` in one program
    too.
    """

    definition: ModelDefinition
    mesh: Mesh
    layouts: dict[Bucket, BatchLayout]
    sizes: StateSizes
    max_logprobs: int
    cache: ExecutableCache
    max_decode_rows: int | None = None
    """Buckets of more rows get no program of several steps."""

    def keys(self) -> list[ProgramKey]:
        """Of all programs. The largest takes longest: first."""
        buckets = list(reversed(self.layouts))
        most = math.inf if self.max_decode_rows is None else self.max_decode_rows
        decode = [
            bucket
            for bucket in buckets
            if bucket.num_rows == bucket.num_tokens <= most and self.sizes.max_num_steps > 1
        ]
        return [
            *(ProgramKey("step", bucket) for bucket in buckets),
            *(ProgramKey("decode_step", bucket) for bucket in decode),
            *(ProgramKey("logprobs", tile) for tile in LOGPROBS_TILES),
        ]

    def is_kept(self, key: ProgramKey) -> bool:
        """Whether the cache has it."""
        return self.cache.has(*self._name(key))

    def compile(self, keys: Sequence[ProgramKey]) -> dict[ProgramKey, jax.stages.Compiled]:
        on_gpu = self.mesh.devices.flat[0].platform == "gpu"
        options = GPU_OPTIONS if on_gpu else None
        # Tracing holds the interpreter's lock in any case, and one after another they find the
        # Triton kernels that those before have compiled. XLA compiles outside of it. Writing a
        # program holds it too, so that is left for when all are lowered and XLA compiles the last.
        tracer = ThreadPoolExecutor(1)

        def load_or_compile(key: ProgramKey) -> jax.stages.Compiled:
            def lower() -> jax.stages.Lowered:
                return tracer.submit(self._lower, key).result()

            name = self._name(key)
            return self.cache.load_or_compile(lower, *name, options=options, keeper=tracer)

        yielding = _yield_to_tracing if on_gpu else None
        # A thread for each program, so that all wait for the tracer before any is to be written.
        with tracer, ThreadPoolExecutor(max(len(keys), 1), initializer=yielding) as pool:
            try:
                return dict(zip(keys, pool.map(load_or_compile, keys), strict=True))
            except BaseException:
                tracer.shutdown(wait=False, cancel_futures=True)  # nobody needs the others now
                raise

    def _num_steps(self, key: ProgramKey) -> int:
        return self.sizes.max_num_steps if key.kind == "decode_step" else 1

    def _name(self, key: ProgramKey) -> tuple:
        if key.kind != "logprobs":
            return "step", self.layouts[key.of], self._num_steps(key), self.sizes
        output = abstract_state(self.definition, self.mesh, self.sizes).output
        return "logprobs", key.of, [part.shape for part in output], self.max_logprobs

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        definition, mesh = self.definition, self.mesh
        if key.kind != "logprobs":
            layout = self.layouts[key.of]
            return lower_step(definition, mesh, layout, self._num_steps(key), self.sizes)
        output = abstract_state(definition, mesh, self.sizes).output
        replicated = NamedSharding(mesh, P())
        queries = jax.ShapeDtypeStruct((key.of, 2), jnp.int32, sharding=replicated)
        program = make_logprobs(definition, mesh, self.max_logprobs)
        return program.lower(abstract_params(definition, mesh), output, queries)


def compile_programs(compiler: Compiler, share_out: ShareOut) -> Programs:
    """Compile everything. Of the programs that the cache lacks, if it can be written, `share_out`
    gives those to compile here; the others it should have brought into the cache at its end."""
    keys = compiler.keys()
    programs = {}
    if not all(map(compiler.is_kept, keys)):
        with compiler.cache.locked() as can_be_written:
            missing = [key for key in keys if not compiler.is_kept(key)]
            with (share_out if can_be_written else nullcontext)(missing) as own:
                programs = compiler.compile(own)
    programs |= compiler.compile([key for key in keys if key not in programs])

    def of_kind(kind: str) -> dict:
        return {key.of: program for key, program in programs.items() if key.kind == kind}

    mesh = compiler.mesh
    state = abstract_state(compiler.definition, mesh, compiler.sizes)
    replicated = NamedSharding(mesh, P())
    slot = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    rows = [
        jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=replicated) for x in state.slots[1:]
    ]
    return Programs(
        steps=of_kind("step"),
        decode_steps=of_kind("decode_step"),
        receive={b: compile_receive(mesh, layout) for b, layout in compiler.layouts.items()},
        logprobs=of_kind("logprobs"),
        layouts=compiler.layouts,
        load_slot=jax.jit(load_slot, donate_argnums=0).lower(state.slots, slot, *rows).compile(),
        copy=jax.jit(jnp.copy).lower(state.output.token_ids).compile(),
        temp_bytes=max(x.memory_analysis().temp_size_in_bytes for x in programs.values()),
    )


def _yield_to_tracing() -> None:
    """Let this thread, and those that XLA starts for it, stand back: more of them want to run than
    there are processors, and the thread that traces is the one that all wait for. On Linux, where
    GPUs are, each thread has a priority of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)


def padding_batch(layout: BatchLayout) -> np.ndarray:
    """A packed batch without a request: what warm-up runs."""
    return np.zeros(layout.size, np.int32)

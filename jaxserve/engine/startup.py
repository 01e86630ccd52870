"""From a configuration to everything a running engine holds, phase by phase."""

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config import EngineConfig
from jaxserve.engine.buckets import Bucket, make_buckets, pick_bucket
from jaxserve.engine.executables import ExecutableCache
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.memory import kv_cache_budget, num_kv_blocks
from jaxserve.engine.precompile import Job, share_out
from jaxserve.engine.programs import (
    Compiler,
    Programs,
    compile_programs,
    executables_folder,
    host_sharding,
    lower_step,
    padding_batch,
    token_masks_shape,
    use_compilation_cache,
)
from jaxserve.engine.state import StateSizes, StepState, bytes_beside_kv_cache, new_state
from jaxserve.model.attention import AttentionImpl
from jaxserve.model.definition import ModelDefinition
from jaxserve.model.loader import load_model_params, read_config
from jaxserve.model.resolve import resolve_model
from jaxserve.text.tokenizer import Tokenizer
from scheduler import SchedulerConfig
from sharding import make_mesh

MAX_SCHEDULER_STEPS = 8
MAX_DISPATCH_S = 0.02
"""Decode steps are put in one dispatch where they take no longer than this together."""
READ_BYTES_PER_S = 4.2e12
"""Of an H200's memory, as measured: on a slower GPU fewer batch sizes pass the test of warm-up."""
PRODUCTS_PER_S = 3.7e14
"""Of two bfloat16 values, by an H200, as measured."""
TRIES = 3
"""The fastest counts: a GPU that was idle has yet to raise its clock."""


@dataclass
class EngineParts:
    """What the engine owns; the device arrays among them are replaced by every step."""

    definition: ModelDefinition
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    scheduler_config: SchedulerConfig
    max_blocks: int
    buckets: tuple[Bucket, ...]
    programs: Programs
    steps_per_dispatch: int
    """Of decode rows, in the buckets that `programs.decode_steps` has."""
    no_masks: dict[Bucket, jax.Array]
    """The token masks of a step without a grammar, which are not read."""
    replicated: NamedSharding
    host: NamedSharding
    """Where a packed batch goes first."""
    inputs: dict[Bucket, jax.Array]
    """Where the steps read it."""
    params: Any
    state: StepState | None
    """None when closed."""
    sizes: StateSizes
    phases_s: dict[str, float]

    def num_decode_steps(self, num_running: int) -> int:
        """How many steps one dispatch may take, should all `num_running` sequences decode."""
        bucket = pick_bucket(self.buckets, max(num_running, 1))
        return self.steps_per_dispatch if bucket in self.programs.decode_steps else 1

    def steps_in_dispatch(self) -> dict[int, int]:
        """Of dispatches that only decode, by the number of sequences."""
        decode = [b.num_rows for b in self.buckets if b.num_rows == b.num_tokens]
        return {num_rows: self.num_decode_steps(num_rows) for num_rows in decode}

    def lower_step(self, num_tokens: int, *, decode: bool) -> tuple[jax.stages.Lowered, int]:
        """(the program of a dispatch, yet to be compiled; how many steps it takes): each step of so
        many tokens, and all of them of decode rows, or not."""
        num_steps = self.num_decode_steps(num_tokens) if decode else 1
        mesh = self.replicated.mesh
        layout = self.programs.layouts[pick_bucket(self.buckets, num_tokens)]
        return lower_step(self.definition, mesh, layout, num_steps, self.sizes), num_steps

    def make_state(self) -> None:
        """Anew, of no request, and what the steps read. The old goes first: both may not fit."""
        _delete(self.state, *self.inputs.values())
        self.state = new_state(self.definition, self.replicated.mesh, self.sizes)
        self.inputs = _make_inputs(self.programs.layouts, self.replicated)

    def free(self) -> None:
        """Delete the device arrays."""
        _delete(self.params, self.state, *self.inputs.values(), *self.no_masks.values())
        self.params, self.state, self.inputs, self.no_masks = None, None, {}, {}


def _delete(*trees: Any) -> None:
    """What a step has taken already may be among them."""
    for array in jax.tree.leaves(trees):
        array.delete()


class _Phases:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)


def start(config: EngineConfig) -> EngineParts:
    """Load, size, compile, warm up. ValueError or OSError says in one line what is wrong."""
    phase = _Phases()
    use_compilation_cache(config.compilation_cache_dir)

    with phase("resolve"):
        folder = resolve_model(config.model)
        model_config = read_config(folder)
        mesh = make_mesh(config.tensor_parallel_size)
        device = mesh.devices.flat[0]
        on_gpu = device.platform == "gpu"
        dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
        impl = config.attention_impl
        if impl == "auto":
            impl = _attention_impl(device)
        definition = ModelDefinition.create(
            model_config,
            tensor_parallel_size=config.tensor_parallel_size,
            dtype=jnp.dtype(dtype),
            attention_impl=impl,
        )
        max_model_len = config.max_model_len or model_config.max_position_embeddings
        if max_model_len > model_config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={max_model_len} is more than the model was made for "
                f"({model_config.max_position_embeddings})"
            )
        max_num_batched_tokens = config.max_num_batched_tokens or (2048 if on_gpu else 256)
        default = min(256 if on_gpu else 64, max_num_batched_tokens)
        max_num_seqs = config.max_num_seqs or default
        if max_num_seqs > max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs must be at most max_num_batched_tokens={max_num_batched_tokens}, "
                f"got {max_num_seqs}"
            )

    with phase("tokenizer"):
        tokenizer = None if config.skip_tokenizer_init else Tokenizer(folder)
        eos = model_config.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids

    bytes_per_block = definition.kv_block_bytes(config.block_size)
    max_blocks = -(-max_model_len // config.block_size)
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    layouts = {b: BatchLayout(b, max_blocks, config.block_size) for b in buckets}

    if impl != "reference":
        # It registers the calls that executables from disk make; only tracing would import it.
        import pallas_kernels.paged_attention.gpu  # noqa: F401

    replicated = NamedSharding(mesh, P())
    cache = ExecutableCache(
        executables_folder() if on_gpu else None, mesh, model_config, dtype, impl
    )

    def blocks_beside(temp_bytes: int) -> int:
        budget = kv_cache_budget(
            device,
            config.kv_cache_memory_bytes,
            config.gpu_memory_utilization,
            weight_bytes,
            temp_bytes + state_bytes,
        )
        return num_kv_blocks(budget, bytes_per_block, config.block_size, max_model_len)

    def load() -> Any:
        with phase("weights"):
            params = load_model_params(folder, definition, mesh, config.load_format, config.seed)
            return jax.block_until_ready(params)

    def sizes_of(num_blocks: int) -> StateSizes:
        return StateSizes(
            num_blocks,
            config.block_size,
            max_num_seqs,
            max_num_batched_tokens,
            steps_per_dispatch,
        )

    def compiled(num_blocks: int) -> Programs:
        sizes = sizes_of(num_blocks)
        compiler = Compiler(
            definition, mesh, layouts, sizes, config.max_logprobs, cache, max_decode_rows
        )
        job = Job(
            model_config=model_config,
            tensor_parallel_size=config.tensor_parallel_size,
            dtype=dtype,
            attention_impl=impl,
            layouts=tuple(layouts.values()),
            sizes=sizes,
            max_logprobs=config.max_logprobs,
            compilation_cache_dir=jax.config.jax_compilation_cache_dir,
            device_bytes=device.memory_stats()["bytes_limit"] if on_gpu else 0,
        )
        return compile_programs(compiler, functools.partial(share_out, job))

    weight_bytes = definition.param_bytes(mesh)
    steps_per_dispatch = config.num_scheduler_steps or (
        scheduler_steps(weight_bytes) if on_gpu else 1
    )
    # Warm-up would drop the programs of more rows.
    measured = on_gpu and config.num_scheduler_steps is None
    max_decode_rows = decode_rows(weight_bytes, steps_per_dispatch) if measured else None
    state_bytes = bytes_beside_kv_cache(definition, sizes_of(0))
    scratch_bytes = _expected_scratch_bytes(definition, buckets[-1])
    # A cache that cannot fit is refused before anything is loaded.
    num_blocks = blocks_beside(scratch_bytes)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        if not on_gpu:
            loading.result()  # compiling takes all of a CPU; and a bad file is refused at once
        with phase("compile"):
            programs = compiled(num_blocks)
            sized = on_gpu and config.kv_cache_memory_bytes is None
            if sized and programs.temp_bytes > scratch_bytes:
                num_blocks -= -(-(programs.temp_bytes - scratch_bytes) // bytes_per_block)
                programs = compiled(num_blocks)
        params = loading.result()

    with phase("warm_up"):
        sizes = sizes_of(num_blocks)
        state = new_state(definition, mesh, sizes)
        host = host_sharding(mesh)
        inputs = _make_inputs(layouts, replicated)
        no_masks = _make_no_masks(buckets, model_config.vocab_size, replicated)

        def launch(step: Callable, bucket: Bucket) -> jax.Array:
            """The padding batch; what it returns is ready when the device is done."""
            nonlocal state
            packed = jax.device_put(padding_batch(layouts[bucket]), host)
            inputs[bucket] = programs.receive[bucket](inputs[bucket], packed)
            state = step(params, state, inputs[bucket], no_masks[bucket])
            return programs.copy(state.output.token_ids)

        def device_time_s(step: Callable, bucket: Bucket) -> float:
            """Of a dispatch whose launch need not be waited for, since one before it runs."""
            first, second = launch(step, bucket), launch(step, bucket)
            jax.block_until_ready(first)
            begin = time.perf_counter()
            jax.block_until_ready(second)
            return time.perf_counter() - begin

        for steps in (programs.steps, programs.decode_steps):
            for bucket, step in steps.items():
                jax.block_until_ready(launch(step, bucket))
        if measured:
            # Several steps at once hide the host where a step is short; where it is long, they
            # would only hold up whoever arrives. The largest first: those below the first that is
            # short enough are shorter.
            for bucket in sorted(programs.decode_steps, key=lambda b: b.num_rows, reverse=True):
                step = programs.decode_steps[bucket]
                if min(device_time_s(step, bucket) for _ in range(TRIES)) <= MAX_DISPATCH_S:
                    break
                del programs.decode_steps[bucket]

    return EngineParts(
        definition=definition,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(eos),
        scheduler_config=SchedulerConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
        ),
        max_blocks=max_blocks,
        buckets=buckets,
        programs=programs,
        steps_per_dispatch=steps_per_dispatch,
        no_masks=no_masks,
        replicated=replicated,
        host=host,
        inputs=inputs,
        params=params,
        state=state,
        sizes=sizes,
        phases_s=phase.seconds,
    )


def _attention_impl(device: jax.Device) -> AttentionImpl:
    if device.platform != "gpu":
        return "reference"
    return "mosaic" if device.compute_capability == "9.0" else "triton"


def scheduler_steps(weight_bytes: int) -> int:
    """How many decode steps, a power of two, fit into MAX_DISPATCH_S: each reads all weights."""
    longest = MAX_DISPATCH_S * READ_BYTES_PER_S / weight_bytes
    return min(1 << max(int(longest).bit_length() - 1, 0), MAX_SCHEDULER_STEPS)


def decode_rows(weight_bytes: int, num_steps: int) -> int:
    """How many rows so many decode steps may have if their products alone are to fit into
    MAX_DISPATCH_S: each row multiplies with all weights, of two bytes."""
    return int(MAX_DISPATCH_S * PRODUCTS_PER_S / (num_steps * weight_bytes / 2))


def _expected_scratch_bytes(definition: ModelDefinition, largest: Bucket) -> int:
    """More than the largest program is expected to need: the logits, a few times over, and what
    one layer makes of all tokens."""
    config = definition.config
    logits = 4 * largest.num_rows * config.vocab_size
    width = 4 * config.intermediate_size + 8 * config.hidden_size
    return 8 * logits + largest.num_tokens * width * definition.dtype.itemsize + (256 << 20)


def _make_inputs(
    layouts: dict[Bucket, BatchLayout], sharding: NamedSharding
) -> dict[Bucket, jax.Array]:
    """Of padding."""
    return {b: jax.device_put(padding_batch(layout), sharding) for b, layout in layouts.items()}


def _make_no_masks(
    buckets: tuple[Bucket, ...], vocab_size: int, sharding: NamedSharding
) -> dict[Bucket, jax.Array]:
    shapes = {bucket: token_masks_shape(bucket, vocab_size) for bucket in buckets}
    arrays = {
        shape: jax.device_put(np.zeros(shape, np.int32), sharding) for shape in shapes.values()
    }
    return {bucket: arrays[shape] for bucket, shape in shapes.items()}

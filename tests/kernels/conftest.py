"""Runs each kernel test on every implementation that this machine can run.

`triton` runs the kernels on a GPU. `triton-interpreted` runs the same kernels, and the JAX code
around them, in Triton's interpreter on a CPU, where triton and jax-triton are installed.
"""

import dataclasses
import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.tiles import (
    aligned_query_tiles,
    context_pieces,
    query_tiles,
)
from pallas_kernels.paged_attention.tuning import MosaicTiling

HAS_GPU = jax.default_backend() == "gpu"
CAN_INTERPRET = not HAS_GPU and all(
    importlib.util.find_spec(name) for name in ("triton", "jax_triton")
)
if CAN_INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


TRITON = (
    pytest.param("triton", marks=pytest.mark.gpu),
    pytest.param(
        "triton-interpreted",
        marks=pytest.mark.skipif(not CAN_INTERPRET, reason="needs triton and no GPU"),
    ),
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


# Largest error of one query head's output, relative to its norm.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.5e-2}


@dataclasses.dataclass
class Case:
    """One call's arguments, and what a dense evaluation of each request gives."""

    arrays: dict[str, jax.Array]
    options: dict
    expected: np.ndarray

    def run(self, attention):
        """`attention`'s output as float32."""
        out = attention(**self.arrays, **self.options)
        assert out.dtype == self.arrays["q"].dtype
        return np.asarray(out, np.float32)

    def check(self, out):
        """The one check: right and finite outputs, zeros for padding."""
        assert np.isfinite(out).all()
        error = np.linalg.norm(out - self.expected, axis=-1)
        bound = TOLERANCE[str(self.arrays["q"].dtype)] * np.linalg.norm(self.expected, axis=-1)
        wrong = np.argwhere(error > bound)
        assert not len(wrong), f"(token, head) pairs {wrong[:8].tolist()} and others are wrong"

    def passes(self, out):
        try:
            self.check(out)
        except AssertionError:
            return False
        return True


def _make_case(
    rows,
    *,
    num_decode=0,
    heads=(4, 2),
    head_dim=16,
    block_size=16,
    dtype="float32",
    window=None,
    padding_rows=0,
    padding_tokens=0,
    needles=False,
    needle=6,
    table_width=None,
    num_blocks=None,
    seed=0,
):
    """rows: (number of queries, context length) of each request, decode rows first.

    All that a request does not own is NaN, or garbage in the block tables. With `needles` each
    query's oldest visible, newest visible or a middle key is `needle` times its own direction.
    """
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    group = num_heads // num_kv_heads
    num_rows = len(rows) + padding_rows
    num_queries = sum(count for count, _ in rows)
    num_tokens = num_queries + padding_tokens

    def normal(*shape):
        return np.array(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)

    blocks_of = [-(-context // block_size) for _, context in rows]
    width = table_width or max(blocks_of) + 2
    num_blocks = num_blocks or sum(blocks_of) + 4
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((num_rows, width), np.int32)
    cache = np.full((num_blocks, num_kv_heads, 2, block_size, head_dim), np.nan)
    q = normal(num_tokens, num_heads, head_dim)
    expected = np.zeros_like(q)
    scale = head_dim**-0.5
    start = 0
    for row, (count, context) in enumerate(rows):
        tables[row] = rng.integers(-(2**31), 2**31, width)
        tables[row, : blocks_of[row]] = [next(free) for _ in range(blocks_of[row])]
        keys, values = normal(2, context, num_kv_heads, head_dim)
        past = context - count
        if needles:
            for i in range(count):
                position = past + i
                oldest = 0 if window is None else max(position - window + 1, 0)
                target = [oldest, position, (oldest + position) // 2][(row + i) % 3]
                keys[target] = needle * q[start + i, ::group] / scale / head_dim
            keys = np.array(jnp.asarray(keys, dtype), np.float64)
        position = np.arange(context)
        block, offset = tables[row, position // block_size], position % block_size
        cache[block, :, 0, offset] = keys
        cache[block, :, 1, offset] = values
        for i in range(count):
            seen = position <= past + i
            if window is not None:
                seen &= past + i - position < window
            for head in range(num_heads):
                scores = keys[seen, head // group] @ q[start + i, head] * scale
                weights = np.exp(scores - scores.max())
                expected[start + i, head] = weights @ values[seen, head // group] / weights.sum()
        start += count

    # What a finished request leaves behind a window is not owned either: poison it.
    if window is not None:
        for row, (count, context) in enumerate(rows):
            for position in range(max(context - count - window + 1, 0)):
                block, offset = tables[row, position // block_size], position % block_size
                cache[block, :, :, offset] = np.nan
    counts = [count for count, _ in rows] + [0] * padding_rows
    contexts = [context for _, context in rows] + [0] * padding_rows
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    arrays = {
        "q": jnp.asarray(q, dtype),
        "kv_cache": jnp.asarray(cache, dtype),
        "counters": jnp.zeros((num_tokens + 1, num_kv_heads), jnp.int32),
        "block_tables": ints(tables),
        "query_starts": ints(np.cumsum([0, *counts])),
        "context_lens": ints(contexts),
        "num_decode_rows": ints(num_decode),
    }
    options = {"scale": scale, "sliding_window": window}
    return Case(arrays, options, expected)


@pytest.fixture(scope="session")
def make_case():
    """Makes a Case, with the arguments of `_make_case`."""
    return _make_case


@pytest.fixture(params=["reference", *TRITON])
def attention(request, monkeypatch):
    """paged_attention(*arrays, scale=, sliding_window=) by one implementation."""
    if request.param == "triton-interpreted":
        _interpret_triton(monkeypatch)
        return functools.partial(paged_attention, impl="triton")
    return _jitted(request.param)


@pytest.fixture(params=TRITON)
def attention_by_choice(request, monkeypatch):
    """Gives the GPU kernels' paged_attention for a Choice."""
    if request.param == "triton-interpreted":
        _interpret_triton(monkeypatch)
    from pallas_kernels.paged_attention import gpu

    def by_choice(choice):
        call = functools.partial(gpu.paged_attention, choice=choice)
        if request.param == "triton-interpreted":
            if isinstance(choice.decode, MosaicTiling):
                pytest.skip("for Mosaic there is another interpreter, with tests of its own")
            return call
        return jax.jit(call, static_argnames=("scale", "sliding_window"))

    return by_choice


@pytest.fixture
def mosaic_prefill_interpreted(monkeypatch):
    """Paged attention whose rows all go to `mosaic_prefill`, in Pallas' GPU interpreter."""
    from pallas_kernels.paged_attention import mosaic_prefill

    def attend(q, *others, counters, query_starts, context_lens, num_decode_rows, **options):
        del counters, num_decode_rows
        num_tokens = len(q)
        tiles, num_tiles = aligned_query_tiles(
            query_starts, context_lens, 0, num_tokens=num_tokens, tile_q=mosaic_prefill.TILE_Q
        )
        q = jnp.pad(q, ((0, -num_tokens % 8), (0, 0), (0, 0)))
        out = jax.new_ref(jnp.full(q.shape, jnp.nan, q.dtype))
        tiling = MosaicTiling(128, 2)
        mosaic_prefill.attend(q, *others, tiles, num_tiles, out, tiling=tiling, **options)
        return jax.freeze(out)

    monkeypatch.setattr(mosaic_prefill, "_NUM_BLOCKS", 3)
    return _mosaic_interpreted(monkeypatch, attend)


@pytest.fixture
def mosaic_decode_interpreted(monkeypatch):
    """Gives paged attention in Pallas' GPU interpreter, for a ContextCut: all queries go to
    `mosaic_decode` one by one, or `beside_prompts` those of decode rows, the rest to
    `mosaic_prefill`."""
    from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill

    counted = []

    # The interpreter runs one block of threads after another.
    def take(counter, shared):
        shared[0] = counter[...]
        counter[...] = shared[0] + 1
        return shared[0]

    def count(counter, shared):
        jax.debug.callback(lambda: counted.append(1))
        return take(counter, shared)

    def by_cut(cut, beside_prompts=False):
        def attend(*arrays, counters, query_starts, context_lens, num_decode_rows, **options):
            batch = {
                "query_starts": query_starts,
                "context_lens": context_lens,
                "num_tokens": len(arrays[0]),
            }
            tiles = query_tiles(
                **batch,
                first_row=0,
                end_row=num_decode_rows if beside_prompts else len(context_lens) + 1,
                tile_q=1,
                max_tiles=len(context_lens) if beside_prompts else batch["num_tokens"],
            )
            window = options["sliding_window"]
            pieces = context_pieces(tiles, cut, tile_k=64, sliding_window=window)
            num_pieces = jnp.sum(pieces[:, 2:3] > 0, axis=0, dtype=jnp.int32)
            tiling = MosaicTiling(64, 3)
            counted.clear()
            out = mosaic_decode.attend(
                *arrays, pieces, num_pieces, counters, tiling=tiling, **options
            )
            jax.effects_barrier()
            in_pieces = (pieces[:, 2] > 0) & (pieces[:, 5] > 1)
            # Twice the same piece: the result would be right, but on a GPU merged too early.
            assert len(counted) == in_pieces.sum() * counters.shape[1]
            if beside_prompts:
                out = jax.new_ref(out)
                tiles = aligned_query_tiles(
                    **batch, first_row=num_decode_rows, tile_q=mosaic_prefill.TILE_Q
                )
                tiling = MosaicTiling(128, 2)
                mosaic_prefill.attend(*arrays, *tiles, out, tiling=tiling, **options)
                out = jax.freeze(out)
            return out

        return _mosaic_interpreted(monkeypatch, attend)

    monkeypatch.setattr(mosaic_decode, "decode_blocks", lambda *_: 2)
    monkeypatch.setattr(mosaic_decode, "count", count)
    monkeypatch.setattr(mosaic_decode, "take", take)
    monkeypatch.setattr(mosaic_prefill, "_NUM_BLOCKS", 3)
    return by_cut


def _mosaic_interpreted(monkeypatch, attend):
    """Paged attention by `attend(q, kv_cache, block_tables, **others)`.

    The interpreter, of jax 0.11, knows neither stores to an accumulator nor products whose left
    side is in registers: both are put in terms of what it knows.
    """
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.state import primitives as state
    from jax.experimental.pallas import mosaic_gpu as plgpu

    wgmma = plgpu.wgmma

    def store(accumulator, value):
        state.ref_swap(accumulator, None, value)

    def multiply(accumulator, left, right):
        if isinstance(left, jax.Array):
            product = left.astype(jnp.float32) @ right[...].astype(jnp.float32)
            store(accumulator, accumulator[...] + product)
        else:
            wgmma(accumulator, left, right)

    monkeypatch.setattr(primitives, "wgmma_accumulator_store", store)
    monkeypatch.setattr(plgpu, "wgmma", multiply)

    def attention(q, kv_cache, *, block_tables, **others):
        with plgpu.force_gpu_interpret_mode():
            out = attend(q, kv_cache, block_tables, **others)
        return out[: len(q)]

    return attention


@pytest.fixture(params=TRITON)
def by_triton(request, monkeypatch):
    """Makes of a kernel's entry point one that runs it by Triton."""
    return _entry_maker(request.param, monkeypatch)


@pytest.fixture(params=["reference", *TRITON])
def by_each(request, monkeypatch):
    """Makes of a kernel's entry point one that runs it by one implementation."""
    return _entry_maker(request.param, monkeypatch)


def _entry_maker(impl, monkeypatch):
    if impl == "triton-interpreted":
        _interpret_triton(monkeypatch)
        return lambda function, **options: functools.partial(function, impl="triton", **options)
    return lambda function, **options: jax.jit(functools.partial(function, impl=impl, **options))


@pytest.fixture
def in_random_order(monkeypatch):
    """Calls a kernel's entry point whose programs the interpreter runs one after another."""

    def call(entry, grid, seed, *arguments):
        if hasattr(entry, "lower"):
            pytest.skip("a GPU has its own order")
        from triton.runtime.interpreter import interpreter_builder

        places = np.random.default_rng(seed).permutation([(*i, 0) for i in np.ndindex(*grid)])
        order = iter(places.tolist())
        set_place = interpreter_builder.set_grid_idx
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda *_: set_place(*next(order)))
        results = entry(*arguments)
        assert next(order, None) is None
        return results

    return call


@functools.cache  # so that tests of the same shapes share a compilation
def _jitted(impl):
    return jax.jit(
        functools.partial(paged_attention, impl=impl),
        static_argnames=("scale", "sliding_window"),
    )


def _interpret_triton(monkeypatch):
    from pallas_kernels.paged_attention import gpu, triton_kernel

    # The interpreter needs concrete arrays: no jit, and no conditions in a program.
    monkeypatch.setattr(gpu, "paged_attention", gpu.paged_attention.__wrapped__)
    monkeypatch.setattr(triton_kernel.jax_triton, "triton_call", _interpret)


class _HostTensor:
    """The part of torch's tensor interface that Triton's interpreter uses, over numpy."""

    def __init__(self, array):
        self.array = array
        self.dtype = str(array.dtype)

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, size, device):
        return _HostTensor(np.empty(size, self.array.dtype))

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def set_(self, storage, offset, size, stride):
        self.array = storage.array

    def copy_(self, other):
        assert other.array is self.array


def _poison(out):
    return np.full(out.shape, np.nan if jnp.issubdtype(out.dtype, jnp.floating) else 77, out.dtype)


def _interpret(
    *args, kernel, out_type, grid, num_warps=4, num_stages=3, backend_options=None, **constants
):
    """jax_triton.triton_call on concrete arrays; outputs start as garbage."""
    if any(getattr(arg, "dtype", None) == jnp.bfloat16 for arg in args):
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 matrices")
    refs = [arg for arg in args if isinstance(arg, jax.Ref)]
    hosts = {id(ref): np.array(ref[...]) for ref in refs}

    def operand(arg):
        if isinstance(arg, tuple):
            return tuple(operand(part) for part in arg)
        if isinstance(arg, jax.Ref):
            return _HostTensor(hosts[id(arg)])
        return _HostTensor(np.array(arg)) if isinstance(arg, jax.Array) else arg

    operands = [operand(arg) for arg in args]
    outs = jax.tree.map(_poison, out_type)
    operands += [_HostTensor(out) for out in jax.tree.leaves(outs)]
    with np.errstate(all="ignore"):  # as on a GPU
        kernel[grid](*operands, **constants)
    for ref in refs:
        ref[...] = hosts[id(ref)]
    return jax.tree.map(jnp.asarray, outs)

"""Runs each kernel test on every implementation that this machine can run.

`triton` runs the kernels on a GPU. `triton-interpreted` runs the same kernels, and the JAX code
around them, in Triton's interpreter on a CPU, where triton and jax-triton are installed.
"""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention

HAS_GPU = jax.default_backend() == "gpu"
CAN_INTERPRET = not HAS_GPU and all(
    importlib.util.find_spec(name) for name in ("triton", "jax_triton")
)
if CAN_INTERPRET:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(
    params=[
        "reference",
        pytest.param("triton", marks=pytest.mark.gpu),
        pytest.param(
            "triton-interpreted",
            marks=pytest.mark.skipif(not CAN_INTERPRET, reason="needs triton and no GPU"),
        ),
    ]
)
def attention(request, monkeypatch):
    """paged_attention(*arrays, scale=, sliding_window=) by one implementation."""
    if request.param == "triton-interpreted":
        from pallas_kernels.paged_attention import triton_kernel

        monkeypatch.setattr(triton_kernel.jax_triton, "triton_call", _interpret)
        return functools.partial(paged_attention, impl="triton")
    return _jitted(request.param)


@pytest.fixture(
    params=[
        pytest.param("triton", marks=pytest.mark.gpu),
        pytest.param(
            "triton-interpreted",
            marks=pytest.mark.skipif(not CAN_INTERPRET, reason="needs triton and no GPU"),
        ),
    ]
)
def by_triton(request, monkeypatch):
    """Makes of a kernel's entry point one that runs it by Triton."""
    if request.param == "triton-interpreted":
        from pallas_kernels.triton_import import jax_triton

        monkeypatch.setattr(jax_triton, "triton_call", _interpret)
        return lambda function, **options: functools.partial(function, impl="triton", **options)
    return lambda function, **options: jax.jit(
        functools.partial(function, impl="triton", **options)
    )


@functools.cache  # so that tests of the same shapes share a compilation
def _jitted(impl):
    return jax.jit(
        functools.partial(paged_attention, impl=impl),
        static_argnames=("scale", "sliding_window"),
        donate_argnames="kv_cache",
    )


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


def _interpret(*args, kernel, out_type, grid, num_warps=4, num_stages=3, **constants):
    """jax_triton.triton_call on concrete arrays; outputs start as NaN."""
    if any(getattr(arg, "dtype", None) == jnp.bfloat16 for arg in args):
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 matrices")
    refs = [arg for arg in args if isinstance(arg, jax.Ref)]
    hosts = {id(ref): np.array(ref[...]) for ref in refs}
    operands = []
    for arg in args:
        if isinstance(arg, jax.Ref):
            operands.append(_HostTensor(hosts[id(arg)]))
        else:
            operands.append(_HostTensor(np.array(arg)) if isinstance(arg, jax.Array) else arg)
    outs = jax.tree.map(lambda out: np.full(out.shape, np.nan, out.dtype), out_type)
    operands += [_HostTensor(out) for out in jax.tree.leaves(outs)]
    kernel[grid](*operands, **constants)
    for ref in refs:
        ref[...] = hosts[id(ref)]
    return jax.tree.map(jnp.asarray, outs)

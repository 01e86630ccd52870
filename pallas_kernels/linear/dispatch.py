"""The entry point of products with a weight."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.add_rms_norm import add_rms_norm, rms_norm
from pallas_kernels.linear import reference, tuning
from pallas_kernels.rope_and_write_kv import rope_and_write_kv

Impl = Literal["reference", "triton", "mosaic"]
CACHED_BYTES = 60 * 2**20
"""An H200's L2 cache. A residual of more, 8192 tokens of the 8B shape, is not read from it."""


def linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "O I"],
    *,
    gated: bool = False,
    out_dtype: jnp.dtype | None = None,
    impl: Impl,
) -> Float[Array, "T P"]:
    """x @ weight.T, summed in float32, in x's dtype unless told; P is O.

    If `gated`, the weight's first half of rows makes gates and the other what they let through,
    silu(gate) * up (SwiGLU, arXiv:2002.05202), and P is O // 2. `impl`: "reference" is plain JAX,
    which leaves the product to XLA; "triton" reads the weight at the memory's speed where there
    are few tokens, on an NVIDIA GPU, and does as "reference" where `tuning.json` knows that to be
    faster, and where there are many; "mosaic" does as "triton", but with many tokens takes Mosaic
    GPU in the shapes and on the GPUs where the file has it faster. Raises ValueError for another
    `impl`.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    tiling = _tiling(x, weight, "gated" if gated else "plain", impl)
    if tiling is None:
        return reference.linear(x, weight, gated=gated, out_dtype=out_dtype)
    (product,) = _kernel(tiling)(x, weight, gated=gated, out_dtype=out_dtype, tiling=tiling)
    return product


def linear_parts(
    x: Float[Array, "T I"], weight: Float[Array, "O I"], *, impl: Impl
) -> Float[Array, "S T O"]:
    """x @ weight.T in S parts that are yet to be added up, in float32 if there are several.

    Where the weight has few rows, only so can all of a GPU read it: each part is over a share of
    its columns. `impl` is as for `linear`; "reference" makes one part.
    """
    tiling = _tiling(x, weight, "parts", impl)
    if tiling is None:
        return reference.linear(x, weight, gated=False, out_dtype=x.dtype)[None]
    out_dtype = jnp.dtype(jnp.float32) if tiling.splits > 1 else x.dtype
    return _kernel(tiling)(x, weight, gated=False, out_dtype=out_dtype, tiling=tiling)


def linear_add_rms_norm(
    x: Float[Array, "T I"],
    weight: Float[Array, "D I"],
    residual: Float[Array, "T D"],
    norm_weight: Float[Array, "D"],
    arrived: Int32[Array, "C"],
    *,
    eps: float,
    impl: Impl,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Int32[Array, "C"]]:
    """`add_rms_norm` of the residual and `linear_parts`; and `arrived`. `impl` is as for `linear`.

    On a GPU that is one kernel for a single token, where `tuning.json` has a cut for it: the last
    of its programs norms. They count in `arrived`, at least D zeros before and after. A call's are
    for the next one: used once, they are updated in place. Of a residual of more than CACHED_BYTES
    the sum is the product's where that is XLA's.
    """
    tiling = _tiling(x, weight, "normed", impl)
    if tiling is None:
        sum_bytes = residual.size * residual.dtype.itemsize
        is_xlas = impl != "reference" and _tiling(x, weight, "parts", impl) is None
        if is_xlas and sum_bytes > CACHED_BYTES:
            # So the norm has less to read and to write. Of 512 tokens cuBLAS took longer for it
            # than that saved, and of one token XLA made a kernel of the sum.
            total = residual + reference.linear(x, weight, gated=False, out_dtype=x.dtype)
            return total, rms_norm(total, norm_weight, eps=eps, impl=_beside(impl)), arrived
        parts = linear_parts(x, weight, impl=impl)
        return *add_rms_norm(residual, parts, norm_weight, eps=eps, impl=_beside(impl)), arrived
    from pallas_kernels.linear import triton_add_rms_norm

    return triton_add_rms_norm.linear_add_rms_norm(
        x, weight, residual, norm_weight, arrived, eps=eps, tiling=tiling
    )


def linear_rope_and_write_kv(
    x: Float[Array, "T I"],
    weight: Float[Array, "K G+2 H I"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "T H//2"],
    sin: Float32[Array, "T H//2"],
    kv_cache: Float[Array, "P K 2 S H"],
    kv_slots: Int32[Array, "T"],
    arrived: Int32[Array, "C"],
    *,
    eps: float,
    impl: Impl,
) -> tuple[
    Float[Array, "T K*G H"], Float[Array, "P K 2 S H"], Int32[Array, "T+1 K"], Int32[Array, "C"]
]:
    """`rope_and_write_kv` of `linear_parts`; and `arrived`.

    On a GPU that is one kernel for a single token, if its tiles divide a kv head's rows: the last
    of its programs on those turns and writes. They count in `arrived`, at least K zeros; see
    `linear_add_rms_norm`.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    others = (bias, q_norm, k_norm, cos, sin, kv_cache, kv_slots)
    tiling = _tiling(x, matrix, "parts", impl) if len(x) == 1 else None
    head_rows = math.prod(weight.shape[1:-1])
    if tiling is None or head_rows % tiling.tile_out:
        parts = linear_parts(x, matrix, impl=impl)
        qkv = parts.reshape(len(parts), len(x), *weight.shape[:-1])
        return *rope_and_write_kv(qkv, *others, eps=eps, impl=_beside(impl)), arrived
    from pallas_kernels.linear import triton_rope_and_write_kv

    return triton_rope_and_write_kv.linear_rope_and_write_kv(
        x, weight, *others, arrived, eps=eps, tiling=tiling
    )


def _kernel(tiling: tuning.Tiling | tuning.MosaicTiling) -> Callable[..., jax.Array]:
    # Imported where needed, so that machines without a GPU need no triton.
    if isinstance(tiling, tuning.MosaicTiling):
        from pallas_kernels.linear import mosaic_kernel

        return mosaic_kernel.linear
    from pallas_kernels.linear import triton_kernel

    return triton_kernel.linear


def _beside(impl: Impl) -> Literal["reference", "triton"]:
    """What goes with such a product."""
    return "reference" if impl == "reference" else "triton"


def _tiling(
    x: jax.Array, weight: jax.Array, kind: tuning.Kind, impl: Impl
) -> tuning.Tiling | tuning.MosaicTiling | None:
    """None: the product is XLA's."""
    if impl == "reference":
        return None
    if impl not in ("triton", "mosaic"):
        raise ValueError(f"impl={impl!r} is unknown: choose 'reference', 'triton' or 'mosaic'")
    # Of the GPUs that this process sees; none has the attribute where Triton is interpreted.
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    shape = tuning.Shape(kind, len(x), *weight.shape, str(x.dtype))
    if impl == "triton" and shape.num_tokens > tuning.MAX_TOKENS:
        return None
    return tuning.choose(capability, shape)

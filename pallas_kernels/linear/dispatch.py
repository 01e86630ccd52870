"""The entry point of products with a weight."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.linear import reference, tuning

Impl = Literal["reference", "triton"]


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
    faster. For many tokens that is everywhere, but in the shapes and on the GPUs that the file
    gives to Mosaic GPU. Raises ValueError for another `impl`.
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
    counters: Int32[Array, "D"],
    *,
    eps: float,
    impl: Impl,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Int32[Array, "D"]]:
    """`add_rms_norm` of the residual and `linear_parts`; and the counters.

    For few tokens that is one kernel, with "triton" where `tuning.json` has a cut for it: the last
    program to finish norms. They count in `counters`, which are zeros before and after; whoever
    donates them, as one call's to the next, spares a copy.
    """
    tiling = _tiling(x, weight, "normed", impl)
    if tiling is None:
        parts = linear_parts(x, weight, impl=impl)
        return *add_rms_norm(residual, parts, norm_weight, eps=eps, impl=impl), counters
    from pallas_kernels.linear import triton_add_rms_norm

    return triton_add_rms_norm.linear_add_rms_norm(
        x, weight, residual, norm_weight, counters, eps=eps, tiling=tiling
    )


def _kernel(tiling: tuning.Tiling | tuning.MosaicTiling) -> Callable[..., jax.Array]:
    # Imported where needed, so that machines without a GPU need no triton.
    if isinstance(tiling, tuning.MosaicTiling):
        from pallas_kernels.linear import mosaic_kernel

        return mosaic_kernel.linear
    from pallas_kernels.linear import triton_kernel

    return triton_kernel.linear


def _tiling(
    x: jax.Array, weight: jax.Array, kind: tuning.Kind, impl: Impl
) -> tuning.Tiling | tuning.MosaicTiling | None:
    """None: the product is XLA's."""
    if impl == "reference":
        return None
    if impl != "triton":
        raise ValueError(f"impl={impl!r} is unknown: choose 'reference' or 'triton'")
    # Of the GPUs that this process sees; none has the attribute where Triton is interpreted.
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    return tuning.choose(capability, tuning.Shape(kind, len(x), *weight.shape, str(x.dtype)))

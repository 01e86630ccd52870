"""The entry points of the residual sum and the norm that follows it."""

from types import ModuleType
from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import reference

Impl = Literal["reference", "triton"]


def add_rms_norm(
    x: Float[Array, "T D"],
    delta: Float[Array, "S T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    impl: Impl,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + delta, the root mean square norm of that sum times `weight`); delta's S parts are
    added up first.

    Sums are in float32, and rounded to x's dtype before the norm, which is computed in float32.
    `impl`: "reference" is plain JAX; "triton" reads and writes each element once, on an NVIDIA GPU.
    Raises ValueError for another `impl`.
    """
    return _implementation(impl).add_rms_norm(x, delta, weight, eps=eps)


def rms_norm(
    x: Float[Array, "T D"], weight: Float[Array, "D"], *, eps: float, impl: Impl
) -> Float[Array, "T D"]:
    """The norm alone, of a sum that is there already; in float32, rounded to x's dtype. `impl` and
    errors are as for `add_rms_norm`."""
    return _implementation(impl).rms_norm(x, weight, eps=eps)


def _implementation(impl: Impl) -> ModuleType:
    if impl == "reference":
        return reference
    if impl == "triton":
        # Imported here so that machines without a GPU need no triton.
        from pallas_kernels.add_rms_norm import triton_kernel

        return triton_kernel
    raise ValueError(f"impl={impl!r} is unknown: choose 'reference' or 'triton'")

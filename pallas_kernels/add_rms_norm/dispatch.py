"""The entry point of the residual sum and the norm that follows it."""

from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import reference


def add_rms_norm(
    x: Float[Array, "T D"],
    delta: Float[Array, "S T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    impl: Literal["reference", "triton"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + delta, the root mean square norm of that sum times `weight`); delta's S parts are
    added up first.

    Sums are in float32, and rounded to x's dtype before the norm, which is computed in float32.
    `impl`: "reference" is plain JAX; "triton" reads and writes each element once, on an NVIDIA GPU.
    Raises ValueError for another `impl`.
    """
    if impl == "reference":
        return reference.add_rms_norm(x, delta, weight, eps=eps)
    if impl == "triton":
        # Imported here so that machines without a GPU need no triton.
        from pallas_kernels.add_rms_norm import triton_kernel

        return triton_kernel.add_rms_norm(x, delta, weight, eps=eps)
    raise ValueError(f"impl={impl!r} is unknown: choose 'reference' or 'triton'")

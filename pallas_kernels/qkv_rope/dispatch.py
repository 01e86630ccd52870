"""The entry point of what lies between the QKV projection and attention."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.qkv_rope import reference


def qkv_rope(
    qkv: Float[Array, "S T K G+2 H"],
    bias: Float[Array, "K G+2 H"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    cos: Float32[Array, "T H//2"],
    sin: Float32[Array, "T H//2"],
    *,
    eps: float,
    dtype: jnp.dtype,
    impl: Literal["reference", "triton"],
) -> tuple[Float[Array, "T K*G H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Split the projection into q, k and v, add its bias, norm q's and k's heads, turn them.

    The projection comes in S parts that are yet to be added up; q, k and v are of `dtype`. Of each
    kv head, qkv holds the G query heads, the key and the value. The norms (root mean square with
    `eps`; both or neither) and the rotation (dimension i turns with i + H/2) are computed in
    float32. `impl`: "reference" is plain JAX; "triton" reads and writes each element
    once, on an NVIDIA GPU. Raises ValueError for another `impl`.
    """
    arrays = (qkv, bias, q_norm, k_norm, cos, sin)
    if impl == "reference":
        return reference.qkv_rope(*arrays, eps=eps, dtype=dtype)
    if impl == "triton":
        # Imported here so that machines without a GPU need no triton.
        from pallas_kernels.qkv_rope import triton_kernel

        return triton_kernel.qkv_rope(*arrays, eps=eps, dtype=dtype)
    raise ValueError(f"impl={impl!r} is unknown: choose 'reference' or 'triton'")

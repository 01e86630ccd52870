"""Products with a weight in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "T I"], weight: Float[Array, "O I"], *, gated: bool, out_dtype: jnp.dtype
) -> Float[Array, "T P"]:
    product = lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        # float32 asks for the full precision: a GPU would otherwise round the operands to TF32.
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    if not gated:
        return product
    gate, up = jnp.split(product, 2, axis=1)
    return jax.nn.silu(gate) * up

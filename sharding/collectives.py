"""The collectives that a sharded model is written with.

They are called inside `jax.shard_map(..., check_vma=False)` over the tensor axis: kernels carry no
marks of which values vary between shards, so these cannot be checked. Over one device each of
them is the identity.
"""

import jax

from sharding.mesh import TENSOR_AXIS


def shard_index() -> jax.Array:
    """This shard's place on the tensor axis."""
    return jax.lax.axis_index(TENSOR_AXIS)


def num_shards() -> int:
    """How many there are on the tensor axis."""
    return jax.lax.axis_size(TENSOR_AXIS)


def all_reduce(x: jax.Array) -> jax.Array:
    """The sum of all shards' `x`, on every shard."""
    return jax.lax.psum(x, TENSOR_AXIS)


def all_gather(x: jax.Array, axis: int) -> jax.Array:
    """All shards' `x` joined along `axis` in the mesh's order, on every shard."""
    return jax.lax.all_gather(x, TENSOR_AXIS, axis=axis, tiled=True)

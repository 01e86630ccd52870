"""The device mesh: one axis, over which every model is split."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

TENSOR_AXIS = "tensor"


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `tensor_parallel_size` of `devices` (None: all that JAX sees).

    Raises ValueError when there are fewer.
    """
    devices = jax.devices() if devices is None else devices
    if not 1 <= tensor_parallel_size <= len(devices):
        raise ValueError(
            f"tensor_parallel_size must be from 1 to the number of devices, {len(devices)}, "
            f"got {tensor_parallel_size}"
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]), (TENSOR_AXIS,))

"""Putting arrays on the mesh as the rules say."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.rules import map_with_path, partition_spec


def shardings(arrays: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Where each array of nested dicts belongs, in the same nesting."""
    return map_with_path(lambda path, _: NamedSharding(mesh, partition_spec(path)), arrays)


def place_array(path: str, array: np.ndarray | jax.Array, mesh: Mesh) -> jax.Array:
    """Put one array on the mesh; ValueError naming it where its shape does not split evenly."""
    sharding = NamedSharding(mesh, partition_spec(path))
    try:
        sharding.shard_shape(array.shape)
    except ValueError as error:
        raise ValueError(
            f"array {path!r} of shape {array.shape} does not split over {mesh.size} devices "
            f"as {sharding.spec}"
        ) from error
    return jax.device_put(array, sharding)


def place(arrays: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Put nested dicts of arrays on the mesh, one after another."""
    return map_with_path(lambda path, array: place_array(path, array, mesh), arrays)

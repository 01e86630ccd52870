"""Mesh, partition rules by array name, placement and collectives; knows no model."""

from sharding.collectives import all_gather, all_reduce, num_shards, shard_index
from sharding.mesh import TENSOR_AXIS, make_mesh
from sharding.place import place, place_array, shardings
from sharding.rules import KV_CACHE_SPEC, map_with_path, partition_spec, partition_specs

__all__ = [
    "KV_CACHE_SPEC",
    "TENSOR_AXIS",
    "all_gather",
    "all_reduce",
    "make_mesh",
    "map_with_path",
    "num_shards",
    "partition_spec",
    "partition_specs",
    "place",
    "place_array",
    "shard_index",
    "shardings",
]

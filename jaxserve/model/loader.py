"""Weights into the engine, whatever they are kept in."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxserve.config import Dtype, LoadFormat
from jaxserve.model.checkpoint import MARKER, load_checkpoint, save_checkpoint
from jaxserve.model.config import ModelConfig
from jaxserve.model.definition import ModelDefinition, Params, init_random
from jaxserve.model.errors import ModelError
from jaxserve.model.folders import read_json
from jaxserve.model.hf_weights import load_params
from jaxserve.model.resolve import resolve_model
from sharding import make_mesh, shardings


def read_config(folder: Path) -> ModelConfig:
    """The config of the model in `folder`, with the end tokens that generation_config.json adds.

    Raises ModelError if config.json is missing, damaged, or asks for what is not supported.
    """
    try:
        config = ModelConfig.from_hf(read_json(folder / "config.json"))
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = read_json(generation).get("eos_token_id") or []
    ids = (*config.eos_token_ids, *(more if isinstance(more, list) else [more]))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


def load_model_params(
    folder: Path, definition: ModelDefinition, mesh: Mesh, load_format: LoadFormat, seed: int
) -> Params:
    """The parameters of the model in `folder`, on `mesh`, in the definition's dtype.

    load_format "auto": what the folder holds, a checkpoint or safetensors; "dummy": random from
    `seed`, made on the devices, whatever the folder holds. Raises ModelError.
    """
    if load_format == "dummy":
        abstract = definition.abstract_params
        return init_random(abstract, seed, shardings(abstract, mesh))
    if (folder / MARKER).exists():
        return load_checkpoint(folder, definition, mesh)
    return load_params(folder, definition, mesh)


def convert(model: str, out: Path, *, dtype: Dtype = "auto", tensor_parallel_size: int = 1) -> None:
    """Write `model`, by any name that `resolve_model` takes, as a checkpoint into the new `out`.

    dtype "auto": what config.json says (float32 where it is silent, bfloat16 for float16). It works
    on one device, the CPU, whatever tensor_parallel_size the checkpoint is for; other sizes that
    lay the arrays out alike load it too. Raises ModelError, also if `out` exists.
    """
    if out.exists():
        raise ModelError(f"{out} exists already")
    folder = resolve_model(model)
    config = read_config(folder)
    if dtype == "auto":
        dtype = "float32" if config.dtype in (None, "float32") else "bfloat16"
    definition = ModelDefinition.create(
        config,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        attention_impl="reference",
    )
    mesh = make_mesh(1, jax.devices("cpu"))
    params = load_model_params(folder, definition, mesh, "auto", seed=0)
    save_checkpoint(out, params, definition, folder)

"""Safetensors in Hugging Face's layout, loaded into the engine's: fused, cast, split over the mesh.

One parameter at a time is in host memory beside the model: files are memory-mapped, the few
tensors that make one parameter are copied into it in the target dtype, and it is on its devices
before the next one is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from jaxserve.model.definition import ModelDefinition, Params
from jaxserve.model.errors import ModelError
from jaxserve.model.folders import read_json
from sharding import map_with_path, place_array

_FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq")
_MAX_PROBLEMS = 10

_MODULES = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
"""Which modules of a checkpoint make one of the engine's; of a layer, without its prefix."""

Fuse = Callable[[np.ndarray, list[np.ndarray]], None]


class _Recipe(NamedTuple):
    """How one parameter is made."""

    sources: dict[str, tuple[int, ...]]
    """The checkpoint's tensors and the shapes they must have, in the order that `fuse` takes."""
    fuse: Fuse
    """Fills the parameter from the tensors, casting to its dtype."""


def load_params(folder: Path, definition: ModelDefinition, mesh: Mesh) -> Params:
    """The model in `folder` (config.json, safetensors in one file or several with an index).

    Returns the arrays of `definition.abstract_params`, placed on `mesh` by the partition rules.
    Raises ModelError naming a file that is missing or cut short, and all tensors (at most ten)
    that are missing, unknown or of the wrong shape or type.
    """
    recipes: dict[str, _Recipe] = {}
    map_with_path(
        lambda path, leaf: recipes.update({path: _recipe(path, leaf.shape, definition)}),
        definition.abstract_params,
    )
    with _open_tensors(folder) as tensors:
        _check_tensors(folder, tensors, recipes, tied=definition.config.tie_word_embeddings)

        def load(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            sources = [tensors[name].get_tensor(name) for name in recipes[path].sources]
            parameter = np.empty(leaf.shape, leaf.dtype)
            recipes[path].fuse(parameter, sources)
            # Without the wait, transfers would queue up and hold the host copies of all.
            return jax.block_until_ready(place_array(path, parameter, mesh))

        return map_with_path(load, definition.abstract_params)


def _recipe(path: str, shape: tuple[int, ...], definition: ModelDefinition) -> _Recipe:
    prefix, module, kind = re.fullmatch(r"(layers\.\d+\.|)(.+)\.(\w+)", path).groups()
    prefix = f"model.{prefix}" if prefix else ""
    names = [f"{prefix}{source}.{kind}" for source in _MODULES[module]]
    config = definition.config
    match module:
        case "attn.qkv":
            width = shape[3:]  # of a weight [D]; a bias has none
            shapes = [
                (heads * config.head_dim, *width)
                for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            ]
            return _Recipe(dict(zip(names, shapes, strict=True)), _fuse_qkv)
        case "mlp.gate_up":
            return _Recipe(dict.fromkeys(names, shape[1:]), _stack)
        case "embed" | "head":
            return _Recipe({names[0]: (config.vocab_size, *shape[1:])}, _fill_rows)
        case _:
            return _Recipe({names[0]: shape}, _fill_rows)


def _fuse_qkv(out: np.ndarray, sources: list[np.ndarray]) -> None:
    """[K', G' + 2, H, ...]: of each KV head its query heads, then K, then V.

    Where devices outnumber KV heads, each is repeated and its query heads are dealt in order.
    """
    num_kv_heads, head = out.shape[0], out.shape[2:]
    q, k, v = sources
    out[:, :-2] = q.reshape(num_kv_heads, -1, *head)
    for slot, source in ((-2, k), (-1, v)):
        heads = source.reshape(-1, *head)
        out[:, slot].reshape(heads.shape[0], -1, *head)[:] = heads[:, None]


def _stack(out: np.ndarray, sources: list[np.ndarray]) -> None:
    for row, source in zip(out, sources, strict=True):
        row[:] = source


def _fill_rows(out: np.ndarray, sources: list[np.ndarray]) -> None:
    """The one source, and zeros in the rows that fill up a vocabulary."""
    (source,) = sources
    out[: len(source)] = source
    out[len(source) :] = 0


@contextmanager
def _open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """The open file of each tensor in `folder`."""
    with ExitStack() as stack:
        tensors = {}
        for path in _weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except FileNotFoundError as error:
                raise ModelError(f"{path} is missing") from error
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is cut short or no safetensors file: {error}") from error
            tensors |= dict.fromkeys(file.keys(), file)
        yield tensors


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise ModelError(f"{folder} has neither {single.name} nor {index.name}")
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _check_tensors(
    folder: Path, tensors: Mapping[str, Any], recipes: Mapping[str, _Recipe], *, tied: bool
) -> None:
    expected = {name: shape for r in recipes.values() for name, shape in r.sources.items()}
    problems = []
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"{name} is missing")
            continue
        stored = tensors[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            found = tuple(stored.get_shape())
            problems.append(f"{name} has shape {found}, the model's config makes it {shape}")
        if stored.get_dtype() not in _FLOAT_DTYPES:
            problems.append(f"{name} has type {stored.get_dtype()}, not {', '.join(_FLOAT_DTYPES)}")
    ignored = {"lm_head.weight"} if tied else set()
    problems += [
        f"{name} is not a tensor of this model"
        for name in sorted(set(tensors) - set(expected) - ignored)
        if not _NOT_WEIGHTS.fullmatch(name)
    ]
    if problems:
        listed = "; ".join(problems[:_MAX_PROBLEMS])
        if len(problems) > _MAX_PROBLEMS:
            listed += f"; and {len(problems) - _MAX_PROBLEMS} more"
        raise ModelError(f"the weights in {folder} do not fit its config: {listed}")

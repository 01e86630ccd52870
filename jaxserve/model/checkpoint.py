"""Checkpoints in the engine's own layout, written by `jaxserve convert`: fused, restored sharded.

A checkpoint folder holds the model's config and tokenizer files, `params/` (Orbax) and a marker,
`jaxserve_checkpoint.json`, that tells it from a Hugging Face folder, says how it was laid out, and
lists its files' sizes: at one cut short Orbax itself would fail with a storm of messages.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from jaxserve.model.definition import ModelDefinition, Params
from jaxserve.model.errors import ModelError
from jaxserve.model.folders import make_folder, read_json
from sharding import shardings

MARKER = "jaxserve_checkpoint.json"
_FORMAT = 1
_PARAMS = "params"
# All of a model folder but its weights and the index of these.
_COPIED = ("*.json", "*.jinja", "*.model", "merges.txt")


def save_checkpoint(
    out: Path, params: Params, definition: ModelDefinition, model_folder: Path
) -> None:
    """Write `params` and the files of `model_folder` that are no weights into the new folder `out`.

    `out` appears when it is complete. Raises ModelError if it exists.
    """

    def fill(folder: Path) -> None:
        for pattern in _COPIED:
            for file in model_folder.glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copy(file, folder)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / _PARAMS).absolute(), params)
        marker = {"format": _FORMAT, "dtype": definition.dtype.name, **_layout(definition)}
        marker["files"] = _file_sizes(folder / _PARAMS)
        (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")

    if out.exists():
        raise ModelError(f"{out} exists already")
    make_folder(out, fill)


def load_checkpoint(folder: Path, definition: ModelDefinition, mesh: Mesh) -> Params:
    """Restore a checkpoint straight to the devices of `mesh`, each its part.

    Casts where `definition` has another dtype than the checkpoint. Raises ModelError if the
    folder is damaged or laid out for another tensor_parallel_size.
    """
    marker = read_json(folder / MARKER)
    if marker.get("format") != _FORMAT:
        raise ModelError(
            f"{folder} is a checkpoint of format {marker.get('format')!r}; supported is {_FORMAT}"
        )
    layout = _layout(definition)
    found = {name: marker.get(name) for name in layout}
    if found != layout:
        raise ModelError(
            f"{folder} was converted for another tensor_parallel_size (it has {_words(found)}, "
            f"size {definition.tensor_parallel_size} needs {_words(layout)}): convert the model "
            f"with --tensor-parallel-size {definition.tensor_parallel_size}"
        )
    present = _file_sizes(folder / _PARAMS)
    for name, size_bytes in marker["files"].items():
        if present.get(name) != size_bytes:
            raise ModelError(
                f"{folder / _PARAMS / name} should have {size_bytes} bytes, "
                f"it {f'has {present[name]}' if name in present else 'is missing'}"
            )
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        definition.abstract_params,
        shardings(definition.abstract_params, mesh),
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore((folder / _PARAMS).absolute(), abstract)
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:500]
        raise ModelError(f"the checkpoint in {folder} cannot be restored: {reason}") from error


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file below `folder`, by its path from there."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _layout(definition: ModelDefinition) -> dict[str, int]:
    """What the arrays' shapes depend on beside the model."""
    sizes = definition.sizes
    return {"num_kv_heads": sizes.num_kv_heads, "num_vocab_rows": sizes.num_vocab_rows}


def _words(layout: dict[str, Any]) -> str:
    return f"{layout['num_kv_heads']} KV heads and {layout['num_vocab_rows']} vocabulary rows"

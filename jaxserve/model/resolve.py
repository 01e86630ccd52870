"""From what the user calls a model to a folder that holds it."""

import hashlib
import re
import subprocess
from functools import partial
from pathlib import Path

from jaxserve.model import hub
from jaxserve.model.demo import DEMO_MODEL, make_demo_model
from jaxserve.model.downloads import run_download
from jaxserve.model.errors import ModelError
from jaxserve.model.folders import cache_folder, make_folder
from jaxserve.model.gguf import convert_gguf

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def resolve_model(name: str) -> Path:
    """Return the folder of model `name`, made or downloaded into the user's cache if need be.

    `name` is, in this order: a folder (a Hugging Face model or one written by `jaxserve convert`),
    a .gguf file, "smollm2-135m" (the demo model), or "organisation/model" on the Hugging Face hub.
    Raises ModelError with one line otherwise.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if name == DEMO_MODEL:
        return make_demo_model(cache_folder() / DEMO_MODEL)
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise ModelError(
        f"no model {name!r}: give a model folder, a .gguf file, {DEMO_MODEL!r} (the demo model) "
        "or 'organisation/model' on the Hugging Face hub"
    )


def _from_gguf(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"no GGUF file {path}")
    stat = path.stat()
    key = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return make_folder(cache_folder() / f"{path.stem}-{digest}", partial(convert_gguf, path))


def _from_hub(name: str) -> Path:
    # By path: the script needs the hub's library alone.
    done = run_download(hub.__file__, name, stdout=subprocess.PIPE)
    if done.returncode != 0:
        reason = " ".join(done.stdout.split()) or f"exit code {done.returncode}"
        raise ModelError(
            f"{name} is no local folder and could not be had from the Hugging Face hub: {reason}"
        )
    return Path(done.stdout)

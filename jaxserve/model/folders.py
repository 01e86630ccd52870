"""Model folders: whole or absent, whoever is killed and however many make them."""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from jaxserve.model.errors import ModelError

_PARTIAL_SUFFIX = ".jaxserve-partial"


def cache_folder() -> Path:
    """Where models made from other files are kept: a folder in the user's cache."""
    return Path(platformdirs.user_cache_dir("jaxserve")) / "models"


def make_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Return `target`, made by `fill(folder)` if it does not exist yet.

    `fill` writes into a hidden folder beside `target`, which is renamed when it is complete; if
    `fill` raises, nothing is left. One process at a time makes folders in one parent: a second
    maker of the same target waits and finds it made. A killed process leaves only a hidden folder,
    which the next maker removes.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        # The kernel drops a killed process's lock, so what lies here now belongs to no one.
        for leftover in target.parent.glob(f".*{_PARTIAL_SUFFIX}"):
            shutil.rmtree(leftover)
        if target.exists():
            return target
        partial = target.parent / f".{target.name}{_PARTIAL_SUFFIX}"
        partial.mkdir()
        try:
            fill(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial)
            raise
    return target


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelError naming the file if it is missing or none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing") from error
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive advisory lock of `folder` itself, so that no lock file is needed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is writing in {folder}", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

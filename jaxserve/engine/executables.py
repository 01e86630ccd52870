"""Compiled programs kept on disk whole, so that the next start neither traces nor compiles them."""

import hashlib
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

import pallas_kernels
import sharding

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""Of all that the folder holds."""
LOCK_S = 300.0
"""How long a start may wait for another of the same configuration to compile."""
_PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "triton")


class ExecutableCache:
    """One folder of executables, each named by a digest of all that it depends on.

    That is: what the caller names, the versions of the packages that compile, this project's own
    sources, XLA's flags, and the devices of `mesh`. `folder` None: keep nothing. The folder must
    be the user's own: reading a file from it runs what it holds.
    """

    def __init__(self, folder: Path | None, mesh: Mesh, *depends_on: object) -> None:
        self._folder = folder
        self._devices = list(mesh.devices.flat)
        self._key = (
            *depends_on,
            _versions(),
            _sources_digest(),
            os.environ.get("XLA_FLAGS", ""),
            [(d.id, d.device_kind) for d in self._devices],
            self._devices[0].client.platform_version,
        )

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether programs can be written; if so, other processes that would write the same ones
        wait here meanwhile, `LOCK_S` at most."""
        if self._folder is None:
            yield False
            return
        lock = FileLock(self._folder / f"{self._digest()}.lock", timeout=LOCK_S)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            logger.warning("another start has held %s for %g s", lock.lock_file, LOCK_S)
        except OSError as error:
            logger.warning("the next start compiles anew what cannot be kept: %s", error)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def has(self, *name: object) -> bool:
        """Whether there is a program of this name, sound or not."""
        # Not Path.exists, which raises where the folder may not be read.
        return self._folder is not None and os.path.exists(self._path(name))

    def load_or_compile(
        self,
        lower: Callable[[], jax.stages.Lowered],
        *name: object,
        options: dict[str, Any] | None = None,
        keeper: Executor,
    ) -> jax.stages.Compiled:
        """The program of this name, from the folder or else lowered and compiled with `options`;
        `keeper` then writes it, which takes tenths of a second of the interpreter's lock."""
        if self._folder is None:
            return lower().compile(options)
        path = self._path(name)
        try:
            program = serialize_executable.deserialize_and_load(
                *pickle.loads(path.read_bytes()), execution_devices=self._devices
            )
            path.touch()  # used last
            return program
        except FileNotFoundError:
            pass
        except Exception as error:
            logger.warning("compiling anew what %s holds: %s", path, error)
        lowered = lower()
        # Not sooner: what other threads compile meanwhile, such as random weights, JAX may keep.
        with _jax_cache_off:
            program = lowered.compile(options)
        keeper.submit(self._keep, path, program)
        return program

    def _digest(self, *name: object) -> str:
        return hashlib.sha256(repr((name, self._key)).encode()).hexdigest()

    def _path(self, name: tuple) -> Path:
        return self._folder / f"{self._digest(*name)}.pickle"

    def _keep(self, path: Path, program: jax.stages.Compiled) -> None:
        try:
            self._write(path, pickle.dumps(serialize_executable.serialize(program)))
            self._prune()
        except Exception as error:
            logger.warning("the next start compiles anew what could not be kept: %s", error)

    def _write(self, path: Path, data: bytes) -> None:
        """Whole or not at all, since several processes may start at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink()
                raise

    def _prune(self) -> None:
        """Remove what was used longest ago, down to MAX_BYTES, and what ended processes have left
        half written likewise. Other processes may do the same."""
        found = []
        for path in self._folder.iterdir():
            if path.suffix == ".lock":
                continue
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        num_bytes = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if num_bytes <= MAX_BYTES:
                return
            path.unlink(missing_ok=True)
            num_bytes -= size


class _JaxCacheOff:
    """While any thread is inside, JAX's own cache gives nothing and keeps nothing: what it gives
    does not run once it was serialised and loaded again (seen on the CPU), and what is kept here
    it need not keep as well."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_enabled = True

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was_enabled = jax.config.jax_enable_compilation_cache
                self._set(False)
            self._num_inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._set(self._was_enabled)

    def _set(self, enabled: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # it looks at its settings once


_jax_cache_off = _JaxCacheOff()


def _versions() -> list[tuple[str, str]]:
    found = [("numpy", np.__version__)]
    for package in _PACKAGES:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    jaxserve = Path(__file__).parent.parent
    others = (Path(package.__file__).parent for package in (pallas_kernels, sharding))
    for root in (jaxserve, *others):
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):
            digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()

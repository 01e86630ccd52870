"""A cold start's programs, compiled by several processes into the cache that this one reads.

Lowering a program and writing it into the cache hold the interpreter's lock, of a large model for a
second or two, and there are some thirty. Only XLA's own part can go on beside them in a process.

    python -m jaxserve.engine.precompile < JOB

is such a process; JOB is a pickled `Job`. It ends as soon as the process that started it does,
whatever ended that: nobody holds the other end of its standard input open then.
"""

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from jaxserve.engine.executables import ExecutableCache
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.programs import (
    Compiler,
    ProgramKey,
    executables_folder,
    use_compilation_cache,
)
from jaxserve.engine.state import StateSizes
from jaxserve.model.attention import AttentionImpl
from jaxserve.model.config import ModelConfig
from jaxserve.model.definition import ModelDefinition
from sharding import make_mesh

logger = logging.getLogger(__name__)

PROGRAMS_EACH = 5
"""With fewer a process is not worth its own start."""
CPUS_EACH = 2
BYTES_EACH = 16 << 30
"""Of what JAX may allocate on a device. Each process holds half a gigabyte of every GPU while it
runs, outside of that."""
MAX_PROCESSES = 6
MAX_S = 300.0
"""How long this process waits for the others when it has compiled its own share."""


@dataclass(frozen=True)
class Job:
    """What a process compiles, and where it keeps it."""

    model_config: ModelConfig
    tensor_parallel_size: int
    dtype: str
    attention_impl: AttentionImpl
    layouts: tuple[BatchLayout, ...]
    sizes: StateSizes
    max_logprobs: int
    compilation_cache_dir: str | None
    device_bytes: int
    """What the process that starts others may allocate on a device."""
    keys: tuple[ProgramKey, ...] = ()

    def run(self) -> None:
        """RuntimeError if the cache keeps nothing."""
        use_compilation_cache(self.compilation_cache_dir)
        mesh = make_mesh(self.tensor_parallel_size)
        definition = ModelDefinition.create(
            self.model_config,
            tensor_parallel_size=self.tensor_parallel_size,
            dtype=self.dtype,
            attention_impl=self.attention_impl,
        )
        cache = ExecutableCache(
            executables_folder(), mesh, self.model_config, self.dtype, self.attention_impl
        )
        layouts = {layout.bucket: layout for layout in self.layouts}
        compiler = Compiler(definition, mesh, layouts, self.sizes, self.max_logprobs, cache)
        # Another start may have brought some, which this process need not load.
        compiler.compile([key for key in self.keys if not compiler.is_kept(key)])
        if not all(map(compiler.is_kept, self.keys)):
            raise RuntimeError(f"programs could not be kept in {self.compilation_cache_dir}")


@contextmanager
def share_out(job: Job, keys: Sequence[ProgramKey]) -> Iterator[Sequence[ProgramKey]]:
    """The share of these programs that is left to this process. Those of others are in the cache
    at the end, or it is logged why not."""
    cpus = len(os.sched_getaffinity(0))
    most = (len(keys) // PROGRAMS_EACH, cpus // CPUS_EACH, job.device_bytes // BYTES_EACH)
    count = max(min(*most, MAX_PROCESSES), 1)
    with ExitStack() as stack:
        # By turns: neighbours are about as large.
        others = []
        for i in range(1, count):
            share = dataclasses.replace(job, keys=tuple(keys[i::count]))
            try:
                others.append(stack.enter_context(_process(share)))
            except OSError as error:
                logger.warning("compiling here what another process could not: %s", error)
        yield keys[::count]
        deadline = time.monotonic() + MAX_S
        for process, errors in others:
            reason = _why_not(process, errors, deadline)
            if reason is not None:
                logger.warning("compiling here what another process could not: %s", reason)


def _why_not(process: subprocess.Popen, errors: IO[str], deadline: float) -> str | None:
    """What kept the process from doing its job; None if it is done."""
    try:
        status = process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return f"it was not done {MAX_S:g} s after this one"
    if status < 0:
        return f"it was ended by signal {-status}"
    errors.seek(0)
    return (errors.read().strip().splitlines() or ["it said nothing"])[-1] if status else None


@contextmanager
def _process(job: Job) -> Iterator[tuple[subprocess.Popen, IO[str]]]:
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxserve.engine.precompile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ
            | {
                # What this process imports, whatever is in its folder.
                "PYTHONPATH": os.pathsep.join(sys.path),
                # It needs none of the GPU's memory; JAX would reserve most of it.
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
        )
        try:
            with suppress(BrokenPipeError):  # what ended it is told by its status
                pickle.dump(job, process.stdin)
                process.stdin.flush()
            yield process, errors
        finally:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()


def _end_with_the_pipe() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _main() -> None:
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    try:
        job.run()
    except Exception as error:
        # In one line: JAX ends its tracebacks with advice.
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    _main()

"""A cold start's programs, compiled by several processes into the cache that this one reads.

Lowering a program and writing it into the cache hold the interpreter's lock, of a large model for a
second or two, and there are some thirty. Only XLA's own part can go on beside them in a process.

    python -m jaxserve.engine.precompile < JOB

is such a process; JOB is a pickled `Job`.
"""

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
MAX_PROCESSES = 6
"""Each holds half a gigabyte of every GPU while it runs."""
MAX_S = 300.0


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
    compilation_cache_dir: str
    keys: tuple[ProgramKey, ...] = ()

    def run(self) -> None:
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
        Compiler(definition, mesh, layouts, self.sizes, self.max_logprobs, cache).compile(self.keys)


@contextmanager
def share_out(job: Job, keys: Sequence[ProgramKey]) -> Iterator[Sequence[ProgramKey]]:
    """The share of these programs that is left to this process. Those of others are in the cache
    at the end, or it is logged why not."""
    cpus = len(os.sched_getaffinity(0))
    count = max(min(len(keys) // PROGRAMS_EACH, cpus // CPUS_EACH, MAX_PROCESSES), 1)
    with ExitStack() as stack:
        # By turns: neighbours are about as large.
        others = [
            stack.enter_context(_process(dataclasses.replace(job, keys=tuple(keys[i::count]))))
            for i in range(1, count)
        ]
        yield keys[::count]
        for process, errors in others:
            if process.wait(MAX_S) != 0:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
                logger.warning("compiling here what another process could not: %s", last)


@contextmanager
def _process(job: Job) -> Iterator[tuple[subprocess.Popen, IO[str]]]:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile("w+") as errors:
        pickle.dump(job, given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.engine.precompile"],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # It needs none of the GPU's memory; JAX would reserve most of it.
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )
        try:
            yield process, errors
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    pickle.load(sys.stdin.buffer).run()

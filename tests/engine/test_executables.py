"""Executables on disk: found again, told apart, and made anew where the file is no good."""

import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import executables, programs
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.executables import ExecutableCache
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.programs import Compiler, compile_programs
from sharding import make_mesh


@pytest.fixture
def lower_double():
    """Lowers x -> 2x with x donated; keeps count. Each program is another, so that JAX's own
    cache, where another test has turned it on, holds none of them."""

    def lower():
        lower.count += 1
        limit = random.uniform(1e3, 1e6)
        double = jax.jit(lambda x: jnp.minimum(2 * x, limit), donate_argnums=0)
        return double.lower(jnp.zeros(4))

    lower.count = 0
    return lower


class AtOnce(Executor):
    """Runs what it is given before `submit` returns."""

    def submit(self, function, /, *args, **kwargs):
        function(*args, **kwargs)
        return Future()


def doubles(program) -> bool:
    x = jnp.arange(4.0)
    return np.asarray(program(x)).tolist() == [0, 2, 4, 6] and x.is_deleted()


def test_found_again_by_what_it_depends_on(tmp_path, lower_double):
    mesh = make_mesh(1)
    for number, depends_on in enumerate((("a", 1), ("a", 1), ("a", 2), ("b", 1))):
        cache = ExecutableCache(tmp_path / "new", mesh, depends_on)
        assert doubles(cache.load_or_compile(lower_double, "step", 8, keeper=AtOnce()))
        assert lower_double.count == (1, 1, 2, 3)[number]
    assert doubles(cache.load_or_compile(lower_double, "step", 9, keeper=AtOnce()))
    assert lower_double.count == 4
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_names_hold_what_a_program_depends_on(tiny_definition, tiny_sizes):
    bucket = Bucket(1, 1)
    layouts = {bucket: BatchLayout(bucket, max_blocks=2, block_size=8)}

    def names(**sizes):
        made = {"step": [], "logprobs": []}

        def remember(lower, kind, *name, options, keeper):
            made[kind].append(repr(name))
            return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(temp_size_in_bytes=0))

        cache = SimpleNamespace(
            load_or_compile=remember, has=lambda *_: False, locked=lambda: nullcontext(False)
        )
        sizes = dataclasses.replace(tiny_sizes, **sizes)
        compiler = Compiler(tiny_definition, make_mesh(1), layouts, sizes, 5, cache)
        compile_programs(compiler, nullcontext)
        return {kind: set(of_kind) for kind, of_kind in made.items()}

    usual = names()
    for field in ("num_blocks", "max_num_seqs", "max_num_batched_tokens"):
        others = names(**{field: 5})
        assert not others["step"] & usual["step"]
        assert (others["logprobs"] == usual["logprobs"]) == (field == "num_blocks")


def test_all_programs_are_lowered_before_any_is_written(
    tmp_path, tiny_definition, tiny_sizes, monkeypatch
):
    buckets = [Bucket(1, 1), Bucket(2, 2), Bucket(4, 2)]
    layouts = {bucket: BatchLayout(bucket, max_blocks=2, block_size=8) for bucket in buckets}
    lower_step, serialize = programs.lower_step, executables.serialize_executable.serialize
    done, threads = [], set()

    def lower(*args):
        done.append("lower")
        threads.add(threading.get_ident())
        return lower_step(*args)

    def write(program):
        done.append("write")
        threads.add(threading.get_ident())
        return serialize(program)

    monkeypatch.setattr(programs, "lower_step", lower)
    monkeypatch.setattr(executables.serialize_executable, "serialize", write)
    mesh = make_mesh(1)
    cache = ExecutableCache(tmp_path, mesh)
    compiler = Compiler(tiny_definition, mesh, layouts, tiny_sizes, 5, cache)
    compile_programs(compiler, nullcontext)
    # Three steps and two of decode rows; those, and three of log-probabilities.
    assert done == ["lower"] * 5 + ["write"] * 8
    assert len(threads) == 1
    assert len(list(tmp_path.glob("*.pickle"))) == 8


def test_a_damaged_file_is_made_anew(tmp_path, lower_double, caplog):
    cache = ExecutableCache(tmp_path, make_mesh(1))
    cache.load_or_compile(lower_double, "step", keeper=AtOnce())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert doubles(cache.load_or_compile(lower_double, "step", keeper=AtOnce()))
    assert f"compiling anew what {path} holds" in caplog.text
    assert doubles(
        ExecutableCache(tmp_path, make_mesh(1)).load_or_compile(
            lower_double, "step", keeper=AtOnce()
        )
    )
    assert lower_double.count == 2


def test_jax_keeps_what_others_compile_while_a_program_is_lowered(tmp_path, lower_double):
    enabled = []

    class Lowered:
        def compile(self, options):
            enabled.append(jax.config.jax_enable_compilation_cache)
            return lower_double().compile(options)

    def lower():
        enabled.append(jax.config.jax_enable_compilation_cache)
        return Lowered()

    cache = ExecutableCache(tmp_path, make_mesh(1))
    assert doubles(cache.load_or_compile(lower, "step", keeper=AtOnce()))
    assert enabled == [True, False]
    assert jax.config.jax_enable_compilation_cache


def test_no_folder_keeps_nothing(lower_double):
    cache = ExecutableCache(None, make_mesh(1))
    assert all(
        doubles(cache.load_or_compile(lower_double, "step", keeper=AtOnce())) for _ in range(2)
    )
    assert lower_double.count == 2


def test_a_failed_write_leaves_nothing(tmp_path, lower_double, monkeypatch, caplog):
    def fail(source, target):
        raise OSError("no room")

    monkeypatch.setattr("os.replace", fail)
    cache = ExecutableCache(tmp_path, make_mesh(1))
    assert doubles(cache.load_or_compile(lower_double, "step", keeper=AtOnce()))
    assert "could not be kept: no room" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_was_used_longest_ago_goes_first(tmp_path, lower_double, monkeypatch):
    cache = ExecutableCache(tmp_path, make_mesh(1))

    def use(name):
        before = lower_double.count
        assert doubles(cache.load_or_compile(lower_double, name, keeper=AtOnce()))
        time.sleep(0.02)  # file systems tell times apart from there on
        return lower_double.count > before

    # Of a process that was ended while it wrote, and of one that compiles.
    half_written, lock = tmp_path / "tmp1234", tmp_path / "it.lock"
    for path in (half_written, lock):
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    assert [use(name) for name in "abc"] == [True] * 3
    sizes = [path.stat().st_size for path in tmp_path.glob("*.pickle")]
    monkeypatch.setattr(executables, "MAX_BYTES", sum(sizes) + max(sizes) // 2)
    assert [use(name) for name in "ad"] == [False, True]
    assert len(list(tmp_path.glob("*.pickle"))) == 3
    assert lock.exists()
    assert not half_written.exists()
    assert [use(name) for name in "acdb"] == [False, False, False, True]


FROM_BOTH_CACHES = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxserve.engine.executables import ExecutableCache
from sharding import make_mesh

folder = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(
    lambda event, **kwargs: hits.append(event) if event.endswith("cache_hits") else None
)
x = jnp.arange(4.0)

def lower():
    return jax.jit(lambda x: jnp.sort(jnp.cumsum(x) * 3)[::-1]).lower(x)

lower().compile()
jax.clear_caches()
lower().compile()
assert len(hits) == 1, hits  # JAX's own cache is on, and has it
for _ in range(3):  # compiled, then loaded twice
    jax.clear_caches()
    with ThreadPoolExecutor(1) as keeper:
        program = ExecutableCache(folder / "executables", make_mesh(1)).load_or_compile(
            lower, "it", keeper=keeper
        )
    assert np.asarray(program(x)).tolist() == [18, 9, 3, 0]
assert len(hits) == 1, hits
jax.clear_caches()
lower().compile()
assert len(hits) == 2, hits  # and is on again
"""


def test_nothing_is_kept_that_came_from_jax_s_own_cache(tmp_path):
    command = [sys.executable, "-c", FROM_BOTH_CACHES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

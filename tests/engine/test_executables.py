"""Executables on disk: found again, told apart, and made anew where the file is no good."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.executables import ExecutableCache
from sharding import make_mesh


@pytest.fixture
def compile_double():
    """Compiles x -> 2x with x donated; keeps count. Each program is another, so that JAX's own
    cache, where another test has turned it on, holds none of them."""

    def compile_program():
        compile_program.count += 1
        limit = random.uniform(1e3, 1e6)
        double = jax.jit(lambda x: jnp.minimum(2 * x, limit), donate_argnums=0)
        return double.lower(jnp.zeros(4)).compile()

    compile_program.count = 0
    return compile_program


def doubles(program) -> bool:
    x = jnp.arange(4.0)
    return np.asarray(program(x)).tolist() == [0, 2, 4, 6] and x.is_deleted()


def test_found_again_by_what_it_depends_on(tmp_path, compile_double):
    mesh = make_mesh(1)
    for number, depends_on in enumerate((("a", 1), ("a", 1), ("a", 2), ("b", 1))):
        cache = ExecutableCache(tmp_path / "new", mesh, depends_on)
        assert doubles(cache.load_or_compile(compile_double, "step", 8))
        assert compile_double.count == (1, 1, 2, 3)[number]
    assert doubles(cache.load_or_compile(compile_double, "step", 9))
    assert compile_double.count == 4
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_a_damaged_file_is_made_anew(tmp_path, compile_double, caplog):
    cache = ExecutableCache(tmp_path, make_mesh(1))
    cache.load_or_compile(compile_double, "step")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert doubles(cache.load_or_compile(compile_double, "step"))
    assert f"compiling anew what {path} holds" in caplog.text
    assert doubles(ExecutableCache(tmp_path, make_mesh(1)).load_or_compile(compile_double, "step"))
    assert compile_double.count == 2


def test_no_folder_keeps_nothing(compile_double):
    cache = ExecutableCache(None, make_mesh(1))
    assert all(doubles(cache.load_or_compile(compile_double, "step")) for _ in range(2))
    assert compile_double.count == 2

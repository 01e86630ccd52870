"""Programs that other processes compile: found in the cache, or compiled here if one failed."""

import dataclasses
import signal
import time

import pytest

from jaxserve.engine import executables, precompile
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.executables import ExecutableCache
from jaxserve.engine.forward_batch import BatchLayout
from jaxserve.engine.precompile import Job, share_out
from jaxserve.engine.programs import Compiler, ProgramKey, compile_programs
from sharding import make_mesh

LAYOUTS = tuple(BatchLayout(Bucket(n, min(n, 2)), max_blocks=2, block_size=8) for n in (1, 4))
NUM_PROGRAMS = 2 + 1 + 3
"""Steps, steps of decode rows, log-probabilities."""


@pytest.fixture
def two_processes(monkeypatch):
    monkeypatch.setattr(precompile, "PROGRAMS_EACH", 2)
    monkeypatch.setattr(precompile, "CPUS_EACH", 1)
    monkeypatch.setattr(precompile, "MAX_PROCESSES", 2)
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def job(tmp_path, tiny_definition, tiny_sizes):
    return Job(
        model_config=tiny_definition.config,
        tensor_parallel_size=1,
        dtype="float32",
        attention_impl="reference",
        layouts=LAYOUTS,
        sizes=tiny_sizes,
        max_logprobs=5,
        compilation_cache_dir=str(tmp_path),
        device_bytes=3 * precompile.BYTES_EACH,
    )


@pytest.fixture
def compiler(tmp_path, tiny_definition, tiny_sizes):
    mesh = make_mesh(1)
    cache = ExecutableCache(
        tmp_path / "executables", mesh, tiny_definition.config, "float32", "reference"
    )
    layouts = {layout.bucket: layout for layout in LAYOUTS}
    return Compiler(tiny_definition, mesh, layouts, tiny_sizes, 5, cache)


@pytest.fixture
def lowered(monkeypatch):
    """The programs that this process lowers."""
    keys: list[ProgramKey] = []
    lower = Compiler._lower

    def remember(self, key):
        keys.append(key)
        return lower(self, key)

    monkeypatch.setattr(Compiler, "_lower", remember)
    return keys


def compile_all(compiler: Compiler, job: Job) -> None:
    programs = compile_programs(compiler, lambda keys: share_out(job, keys))
    found = (programs.steps, programs.decode_steps, programs.logprobs)
    assert sum(len(by_key) for by_key in found) == NUM_PROGRAMS


def test_few_rows_get_several_steps_in_a_program(compiler):
    def rows(compiler):
        keys = compiler.keys()
        return {key.of.num_rows for key in keys if key.kind == "decode_step"}

    every = rows(compiler)
    assert rows(dataclasses.replace(compiler, max_decode_rows=max(every) - 1)) == every - {
        max(every)
    }


def test_each_process_compiles_its_share(two_processes, job, compiler, lowered):
    compile_all(compiler, job)
    assert set(lowered) == set(compiler.keys()[::2])
    lowered.clear()
    compile_all(compiler, job)
    assert lowered == []


def test_what_a_process_could_not_is_compiled_here(two_processes, job, compiler, lowered, caplog):
    compile_all(compiler, dataclasses.replace(job, tensor_parallel_size=99))
    assert set(lowered) == set(compiler.keys())
    (record,) = caplog.records
    assert (
        "compiling here what another process could not: ValueError: tensor_parallel_size must"
        in (record.getMessage())
    )


def test_few_programs_are_not_worth_a_process(job, compiler, monkeypatch):
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda _: set(range(64)))
    keys = compiler.keys()[: 2 * precompile.PROGRAMS_EACH - 1]
    with share_out(job, keys) as own:
        assert own == keys


def test_a_small_gpu_has_no_room_for_a_process(two_processes, job, compiler, monkeypatch):
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    job = dataclasses.replace(job, device_bytes=2 * precompile.BYTES_EACH - 1)
    with share_out(job, compiler.keys()) as own:
        assert own == compiler.keys()


def test_a_process_ends_with_the_start(two_processes, job, compiler, monkeypatch):
    started = []
    popen = precompile.subprocess.Popen

    def remember(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(precompile.subprocess, "Popen", remember)
    with pytest.raises(KeyboardInterrupt), share_out(job, compiler.keys()):
        raise KeyboardInterrupt
    (process,) = started
    assert process.returncode == -signal.SIGKILL


def test_a_process_ends_with_the_one_that_started_it(job, compiler):
    keys = tuple(compiler.keys())
    with precompile._process(dataclasses.replace(job, keys=keys)) as (process, _):
        process.stdin.close()
        assert process.wait(60) == 1
    assert not any(map(compiler.is_kept, keys))


def test_a_process_that_is_never_done_is_not_waited_for(
    two_processes, job, compiler, monkeypatch, caplog
):
    monkeypatch.setattr(precompile, "MAX_S", 0.01)
    with share_out(job, compiler.keys()):
        pass
    (record,) = caplog.records
    assert "it was not done 0.01 s after this one" in record.getMessage()


def test_what_cannot_be_kept_is_told(tmp_path, job, monkeypatch):
    folder = tmp_path / "executables"
    folder.write_text("not a folder")
    monkeypatch.setattr(precompile, "use_compilation_cache", lambda _: None)
    monkeypatch.setattr(precompile, "executables_folder", lambda: folder)
    with pytest.raises(RuntimeError, match="programs could not be kept in"):
        dataclasses.replace(job, keys=(ProgramKey("logprobs", 1),)).run()


def test_an_error_leaves_the_other_programs(compiler, monkeypatch):
    lowered = []

    def lower(self, key):
        lowered.append(key)
        time.sleep(0.1)
        raise RuntimeError("no")

    monkeypatch.setattr(Compiler, "_lower", lower)
    with pytest.raises(RuntimeError, match="no"):
        compiler.compile(compiler.keys())
    assert len(lowered) < len(compiler.keys())


def test_a_folder_that_cannot_be_written_is_not_compiled_into(
    two_processes, job, compiler, lowered, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(precompile.subprocess, "Popen", None)
    (tmp_path / "executables").write_text("a file")
    compile_all(compiler, job)
    assert set(lowered) == set(compiler.keys())
    assert "the next start compiles anew what cannot be kept" in caplog.text


def test_a_process_that_cannot_start_is_done_without(
    two_processes, job, compiler, monkeypatch, caplog
):
    def refuse(*args, **kwargs):
        raise OSError("too many processes")

    monkeypatch.setattr(precompile.subprocess, "Popen", refuse)
    keys = compiler.keys()
    with share_out(job, keys) as own:
        assert own == keys[::2]
    assert "compiling here what another process could not: too many processes" in caplog.text


def test_starts_of_one_configuration_wait_for_each_other(compiler, monkeypatch, caplog):
    monkeypatch.setattr(executables, "LOCK_S", 0.2)
    with compiler.cache.locked() as first, compiler.cache.locked() as second:
        assert (first, second) == (True, True)
    assert "another start has held" in caplog.text
    caplog.clear()
    with compiler.cache.locked() as third:
        assert third
    assert not caplog.text

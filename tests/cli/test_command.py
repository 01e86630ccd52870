"""How the command ends, and the commands that need no engine."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from jaxserve import EngineConfig, SamplingParams

GENERATE = ("generate", "--model", "m")
RUN = (sys.executable, "-m", "jaxserve")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (GENERATE, "one of the arguments --prompt --prompts-file is required"),
        ((*GENERATE, "--prompt", "a", "--prompts-file", "f"), "not allowed with"),
        (("generate", "--prompt", "a"), "required: --model"),
        ((*GENERATE, "--prompt", "a", "--top-p", "x"), "--top-p: invalid float value: 'x'"),
        ((*GENERATE, "--prompt", "a", "--max-tokens", "x"), "invalid int value: 'x'"),
        ((*GENERATE, "--prompt", "a", "--max-tok", "5"), "unrecognized arguments: --max-tok"),
        ((*GENERATE, "--prompt", "a", "--dtype", "int4"), "invalid choice: 'int4'"),
        ((*GENERATE, "--prompt", "a", "--logit-bias", "5"), "not a JSON object of token ids"),
        ((*GENERATE, "--prompt", "a", "--structured-outputs", "{"), "--structured-outputs: {: "),
        ((*GENERATE, "--prompt", "a", "--structured-outputs", '{"regex": 5}'), "regex must be"),
        ((*GENERATE, "--prompt", "a", "--max-tokens", "0"), "max_tokens must be None or an"),
        ((*GENERATE, "--prompt", "a", "--block-size", "9"), "block_size must be 8, 16"),
        (
            (*GENERATE, "--prompt", "a", "--max-model-len", "1"),
            "max_model_len must be None or at least 2, got 1",
        ),
        ((*GENERATE, "--prompt", "a", "--max-num-seqs", "0"), "must be None or at least 1, got 0"),
        (("chat", "--model", "m", "--temperature", "-1"), "temperature must be"),
    ],
)
def test_usage_errors(cli, engines, argv, error):
    code, out, err = cli(*argv)
    assert (code, out, engines) == (2, "", [])
    assert re.fullmatch(r"jaxserve: error: .*\n", err)
    assert error in err


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (
            ("generate", "--model", "missing", "--prompt", "a"),
            1,
            "no model 'missing': give another",
        ),
        ((*GENERATE, "--prompts-file", "no.jsonl"), 1, "no.jsonl: No such file or directory"),
        ((*GENERATE, "--prompt", "bug"), 1, "KeyError: 'lost' (--debug shows where)"),
        (("chat", "--model", "missing"), 1, "no model 'missing': give another"),
        (("convert", "missing", "out"), 1, "no model 'missing'"),
    ],
)
def test_errors_take_one_line(cli, argv, code, error):
    got, out, err = cli(*argv)
    assert (got, out) == (code, "")
    assert re.fullmatch(r"jaxserve: error: .*\n", err)
    assert error in err


def test_debug_shows_the_traceback(cli):
    with pytest.raises(KeyError):
        cli(*GENERATE, "--prompt", "bug", "--debug")


def test_closed_stdout():
    command = ("bash", "-c", '"$0" -m jaxserve collect-env >&-', sys.executable)
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "jaxserve: error: standard output is closed\n")


def test_ctrl_c(cli, engines):
    assert cli(*GENERATE, "--prompt", "interrupt") == (130, "", "")
    assert engines[0].closed


def test_every_field_is_a_flag_with_its_default(cli):
    code, out, _ = cli("generate", "--help")
    assert code == 0
    for field in (*fields(EngineConfig), *fields(SamplingParams)):
        assert f"--{field.name.replace('_', '-')}" in out
    text = " ".join(out.split())
    assert "--gpu-memory-utilization X Share of the GPU's memory" in text
    assert "(default: 0.9)" in text


def test_help_needs_no_heavy_library():
    program = (
        "import sys, jaxserve.cli\n"
        "try:\n    jaxserve.cli.main(['generate', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'jax', 'numpy', 'flax', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.startswith(b"usage: ")


def test_a_reader_that_leaves_ends_the_command_quietly():
    command = [*RUN, "collect-env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_collect_env(cli):
    code, out, err = cli("collect-env")
    assert (code, err) == (0, "")
    facts = dict(line.split(": ", 1) for line in out.splitlines())
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    for name in ("jax", "jaxlib", "flax", "triton", "jax-triton", "jax devices", "gpu 0", "memory"):
        assert facts[name]
    assert facts["jax devices"].endswith("(cpu)")
    assert str(Path.home()) not in out


def test_convert(cli, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(
        "jaxserve.model.loader.convert", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    flags = ("--dtype", "bfloat16", "--tensor-parallel-size", 2)
    assert cli("convert", "m", tmp_path / "out", *flags) == (0, "", "")
    assert cli("convert", "m", tmp_path / "out")[0] == 0
    assert calls == [
        (("m", tmp_path / "out"), {"dtype": "bfloat16", "tensor_parallel_size": 2}),
        (("m", tmp_path / "out"), {}),
    ]

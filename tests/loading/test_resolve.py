"""What a user may call a model, and what is said of everything else."""

import os

import huggingface_hub
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


def test_a_hub_name_fetches_what_is_needed(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/some-model.1") == tmp_path
    assert asked["name"] == "org/some-model.1"
    files = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"]
    files += ["original/consolidated.00.pth", "original/params.json", "chat_template.jinja"]
    files += ["consolidated.safetensors", "model-00001-of-00002.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert set(kept) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
    }


@pytest.mark.parametrize(
    "error", [OSError, ValueError, huggingface_hub.errors.OfflineModeIsEnabled]
)
def test_an_unreachable_hub_is_one_line(error, monkeypatch):
    def snapshot_download(name, **options):
        raise error("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError) as raised:
        resolve_model("org/model")
    assert str(raised.value) == (
        "org/model is no local folder and could not be had from the Hugging Face hub: no network"
    )


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../nowhere", "/no/such/folder"])
def test_anything_else_lists_what_is_allowed(name):
    with pytest.raises(ModelError, match=r"a \.gguf file, 'smollm2-135m'.*organisation/model"):
        resolve_model(name)


def test_a_missing_gguf_file_is_named():
    with pytest.raises(ModelError, match=r"no GGUF file missing\.gguf"):
        resolve_model("missing.gguf")

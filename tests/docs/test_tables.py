"""Tables in README.md and docs/ are those that the result files give."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tool", ["docs_tables", "results_table"])
def test_tables_are_made_from_the_results(tool):
    path = ROOT / "tools" / f"{tool}.py"
    assert subprocess.run([sys.executable, str(path), "--check"]).returncode == 0


def test_every_result_is_in_a_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    in_readme = {*import_module("results_table").ROWS, "compare"}
    documents = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    in_docs = re.findall(r"<!-- ([^/ ]\S*) -->", documents)
    for path in (ROOT / "bench" / "results").glob("*.json"):
        is_shown = any(fnmatch(path.stem, name) for name in in_docs)
        assert is_shown or json.loads(path.read_text()).get("benchmark") in in_readme, path.name

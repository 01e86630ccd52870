"""Tables in README.md and docs/ are those that the result files give."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("tool", ["docs_tables", "results_table"])
def test_tables_are_made_from_the_results(tool):
    path = Path(__file__).parents[2] / "tools" / f"{tool}.py"
    assert subprocess.run([sys.executable, str(path), "--check"]).returncode == 0

"""Tables in docs/ are those that the result files give."""

import subprocess
import sys
from pathlib import Path


def test_tables_are_made_from_the_results():
    tool = Path(__file__).parents[2] / "tools" / "docs_tables.py"
    assert subprocess.run([sys.executable, str(tool), "--check"]).returncode == 0

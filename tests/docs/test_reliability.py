"""docs/reliability.md lists the tests that exist, for every complaint."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_COMPLAINTS = 18


def rows():
    """Number of the complaint -> node ids of its tests."""
    found = {}
    for line in (ROOT / "docs" / "reliability.md").read_text().splitlines():
        if match := re.match(r"\| (\d+) \| [^|]{20,} \| ([^|]+) \|$", line):
            found[int(match[1])] = re.findall(r"`([^`]+)`", match[2])
    return found


def names_of_tests(path):
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_complaint_has_tests_and_they_exist():
    table = rows()
    assert sorted(table) == list(range(1, NUM_COMPLAINTS + 1))
    for number, nodes in table.items():
        assert nodes, number
        for node in nodes:
            path, _, name = node.partition("::")
            assert name in names_of_tests(ROOT / path), node


def test_every_test_of_a_complaint_is_in_its_row():
    table = rows()
    found = 0
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in names_of_tests(path):
            if match := re.match(r"test_fault_(\d+)_", name):
                assert f"{path.relative_to(ROOT)}::{name}" in table[int(match[1])]
                found += 1
    assert found > NUM_COMPLAINTS

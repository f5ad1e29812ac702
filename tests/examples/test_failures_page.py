"""docs/failures.md names tests that exist, and something for every row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()


@cache
def names(file: str) -> set[str]:
    """Functions and classes of a test file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_row_is_held_by_tests_that_exist():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| reported |")]
    assert len(rows) > 60
    for row in rows:
        reported, held = row.strip("| ").split(" | ")
        named = re.findall(r"`([\w/.]+)::(\w+)`", held)
        assert named, reported
        for file, name in named:
            assert name in names(file), f"{file}::{name}"


def test_every_benchmark_and_stage_exists():
    for path in re.findall(r"`(examples/benchmarks/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists()
    stages = re.findall(r"`device/measure`, stage `(\w+)`", PAGE)
    assert stages
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "device" / "measure").glob("*.py"))
    assert all(f'"{stage}": Stage(' in sources for stage in stages)

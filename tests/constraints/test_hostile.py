"""Constraints made to exhaust a compiler end in a typed error or a grammar, within the work budget and 1 GiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from oracles.hostile import constraints

from ninfer.constraints.limits import MAX_WORK, Work
from ninfer.errors import ConstraintLimit

HEAVY = (
    "schema: wide below deep", "schema: schemas below deep", "schema: enum of numbers", "schema: enum against a union",
    "schema: patterns of names", "schema: a long repetition", "schema: denied numbers", "schema: many open objects",
    "schema: unproductive chain", "schema: many properties", "schema: length and pattern",
    "schema: exponential subsets", "schema: prefixes against prefixes", "schema: enums against enums",
    "schema: objects of many names, often",
    "regex: alternatives", "grammar: chain", "grammar: long alternatives",
)  # fmt: skip
SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from oracles.hostile import constraints
from ninfer.errors import ConstraintError
makers = constraints()
for name in sys.argv[1:]:
    try:
        makers[name]().check()
    except ConstraintError as error:
        assert len(str(error)) < 500, str(error)
    print("done:", name)
"""


def run(names):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, timeout=240,
        env={"PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "PATH": ""},
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"done: {name}" for name in names], done.stderr[-2000:]


def test_hostile_constraints():
    assert set(HEAVY) <= constraints().keys()
    run([name for name in constraints() if name not in HEAVY])


@pytest.mark.full
@pytest.mark.parametrize("name", HEAVY)
def test_heavy_hostile_constraints(name):
    run([name])


def test_the_work_budget():
    work = Work()
    work.spend(MAX_WORK)
    with pytest.raises(ConstraintLimit) as error:
        work.spend(1)
    assert error.value.limit == "work"

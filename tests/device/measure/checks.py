"""The tests that need a GPU, and those of the Ops, run on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .stage import ROOT, TESTS, Rows, Stage

LIMIT = 240
"""Seconds for the tests of ``tests/device``."""


def pytest(out: Path, limit: float, *paths: Path) -> Rows:
    """Run tests on the GPU for at most ``limit`` seconds; what they came to, and why the first ones failed."""
    name = paths[0].stem
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--timeout", "60", "-p", "no:cacheprovider"]
    environment = os.environ | {"NINFER_TEST_DEVICE": "cuda:0"}
    log = out / f"{name}.log"
    with log.open("w") as file:
        child = subprocess.Popen(
            [*command, *map(str, paths)], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    lines = log.read_text().strip().splitlines() or ["said nothing"]
    ended = lines[-1].strip("= ")
    if child.returncode < 0:
        results = [line for line in lines if "::" in line]
        passed = sum(" PASSED" in line for line in results)
        ended = f"stopped after {limit:.0f} s: {passed} passed, then {results[-1] if results else lines[-1]}"
    failed = [line[:150] for line in lines if line.startswith(("FAILED", "ERROR", "E  "))][:12]
    return [(name, ended), *((f"{name} {i}", line) for i, line in enumerate(failed))]


def kernels(out: Path) -> Rows:
    """Every Op against float64, a process a file: a fault in one leaves the others."""
    return [row for path in sorted((TESTS / "kernels").glob("test_*.py")) for row in pytest(out, 60, path)]


def tests(out: Path) -> Rows:
    """Those of ``tests/device``."""
    return pytest(out, LIMIT - 5, TESTS / "device" / "gpu")


STAGES = {"tests": Stage(LIMIT, tests, compares=True), "kernels": Stage(150, kernels)}

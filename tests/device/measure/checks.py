"""The tests that need a GPU, and those of the Ops, run on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .stage import ROOT, TESTS, Rows, Stage


def pytest(out: Path, *paths: Path) -> Rows:
    """Run tests on the GPU; what they came to, and why the first ones failed."""
    name = paths[0].stem
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--timeout", "60", "-p", "no:cacheprovider"]
    environment = os.environ | {"NINFER_TEST_DEVICE": "cuda:0"}
    done = subprocess.run([*command, *map(str, paths)], cwd=ROOT, env=environment, capture_output=True, text=True)
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    tail = done.stdout.strip().splitlines()
    failed = [line[:150] for line in tail if line.startswith(("FAILED", "ERROR", "E  "))][:12]
    return [
        (name, tail[-1] if tail else done.stderr[-300:]),
        *((f"{name} {i}", line) for i, line in enumerate(failed)),
    ]


def kernels(out: Path) -> Rows:
    """Every Op against float64, a process a file: a fault in one leaves the others."""
    return [row for path in sorted((TESTS / "kernels").glob("test_*.py")) for row in pytest(out, path)]


def tests(out: Path) -> Rows:
    """Those of ``tests/device``."""
    return pytest(out, TESTS / "device" / "gpu")


STAGES = {"tests": Stage(60, tests, compares=True), "kernels": Stage(70, kernels)}

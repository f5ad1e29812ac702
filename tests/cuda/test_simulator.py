"""Kernels written in Numba run without a GPU, in a process of their own that simulates CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("depth", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_kernels_under_the_simulator(depth: str) -> None:
    here = Path(__file__).parent
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        depth,
        str(here / "simulated_memory.py"),
        str(here / "simulated_sampler.py"),
        str(here / "simulated_select.py"),
    ]
    done = subprocess.run(command, env=environment, cwd=here.parents[1], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

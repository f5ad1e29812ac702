"""Instruction sets change the speed of a result and none of its bits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

AVX2 = "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3"


def fingerprint(tmp_path: Path, **told: str) -> list[str]:
    environment = {**os.environ, **told, "NINFER_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).with_name("fingerprint.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86-64 instruction sets")
def test_results_are_the_same_bits_for_every_instruction_set(tmp_path: Path) -> None:
    here = fingerprint(tmp_path)
    assert len(here) > 25
    for name, features in (("haswell", AVX2), ("generic", "+sse2")):
        other = fingerprint(tmp_path, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
        assert other[0] == "tile (1,)"
        assert other[1:] == here[1:], name

"""Functions compiled once per machine, wherever the package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer import kept
from ninfer.native import DiskCache

MODULE = """
from ninfer.native import jit

@jit(nogil=True)
def double(x):
    return 2 * x

if __name__ != "__main__":
    print(double(21), sum(double.stats.cache_hits.values()))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "kept.py").write_text(MODULE)

    def run(folder: Path) -> str:
        path = os.pathsep.join([str(tmp_path), *sys.path])
        environment = {**os.environ, "NINFER_CACHE_DIR": str(folder), "PYTHONPATH": path}
        command = [sys.executable, "-c", "import kept"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return run


def test_code_is_compiled_once(run, tmp_path):
    assert run(tmp_path / "cache") == "42 0"
    assert run(tmp_path / "cache") == "42 1"
    for file in (tmp_path / "cache").rglob("double.*"):
        file.write_bytes(b"damaged")
    assert run(tmp_path / "cache") == "42 0"
    assert run(tmp_path / "cache") == "42 1"


def test_other_source_is_other_code(run, tmp_path):
    assert run(tmp_path / "cache") == "42 0"
    (tmp_path / "kept.py").write_text(MODULE.replace("2 * x", "x + x"))
    assert run(tmp_path / "cache") == "42 0"


def test_code_that_is_used_no_more_goes(run, tmp_path):
    """As code of another source is compiled; what a process found in use stays."""
    cpu = tmp_path / "cache" / "cpu"
    run(cpu.parent)
    (old,) = cpu.iterdir()
    (tmp_path / "kept.py").write_text(MODULE.replace("2 * x", "x + x"))
    run(cpu.parent)
    (cpu / "notes").mkdir()
    for path in (old / "double.2.nbc", cpu / "notes" / "a.nbc"):
        with path.open("wb") as file:
            file.truncate(kept.BOUND)
    for path in cpu.rglob("*"):
        os.utime(path, (0, 0))
    assert run(cpu.parent) == "42 1"
    assert old.exists()
    (tmp_path / "kept.py").write_text(MODULE.replace("2 * x", "x * 2"))
    run(cpu.parent)
    assert not old.exists()
    assert (cpu / "notes" / "a.nbc").exists()
    (tmp_path / "kept.py").write_text(MODULE.replace("2 * x", "x + x"))
    assert run(cpu.parent) == "42 1"


def test_without_a_place_to_keep_it_code_is_compiled_each_time(run, tmp_path):
    (tmp_path / "file").write_text("where the folder should be")
    assert run(tmp_path / "file") == "42 0"
    assert run(tmp_path / "file") == "42 0"


def test_encoders_are_kept():
    """Numba would keep them beside the source, and refuse an installation where neither that nor a home is writable."""
    from ninfer.artifact import _encoders
    from ninfer.convert import _words

    functions = [f for module in (_encoders, _words) for f in vars(module).values() if hasattr(f, "py_func")]
    assert len(functions) > 8
    assert all(isinstance(function._cache, DiskCache) for function in functions)

"""The cache of compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer import native
from ninfer._cpu import kernel
from ninfer._cpu.kernels import rows

PROGRAM = """
import numpy as np
from ninfer._cpu import kernel
from ninfer._cpu.device import CpuDevice
from ninfer._cpu.kernels import rows
ready = rows.zero.ready
device = CpuDevice(threads=1)
buffer = device.arena(256).buffer(0, (4,), "f32")
device.upload(buffer, np.ones(4, np.float32))
device.zero(buffer)
out = np.ones(4, np.float32)
device.download(out, buffer)
assert not out.any()
print(ready, rows.zero._native.cache_hits)
"""


def run(folder: Path, code: str = PROGRAM) -> str:
    environment = {**os.environ, "NINFER_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == "False 0"
    assert run(tmp_path) == "True 1"
    files = list((tmp_path / "cpu").rglob("zero.*"))
    assert files
    for file in files:  # damaged entries are misses
        file.write_bytes(file.read_bytes()[:40])
    assert run(tmp_path) == "True 0"
    assert run(tmp_path) == "True 1"


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert run(blocked) == "False 0"


def test_the_folder_names_everything_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "ninfer._cpu.kernels.rows"
    native.source_key.cache_clear()
    before = native.source_key(module)
    monkeypatch.setattr(native, "_machine", lambda: "another machine")
    native.source_key.cache_clear()
    assert native.source_key(module) != before
    monkeypatch.undo()
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        return real(path) + (b"\n" if path.name == "simd.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", read)
    native.source_key.cache_clear()
    assert native.source_key(module) != before, "a module that the kernel's module imports"
    monkeypatch.undo()

    def other(path: Path) -> bytes:
        return real(path) + (b"\n" if path.name in ("gdn.py", "ops.py") else b"")

    monkeypatch.setattr(Path, "read_bytes", other)
    native.source_key.cache_clear()
    assert native.source_key(module) == before, "a module it does not import"
    monkeypatch.undo()
    native.source_key.cache_clear()
    assert rows.zero.name == "zero"


def test_compile_all_reports_what_was_missing() -> None:
    kernel.compile_all()
    told: list[tuple[int, int, str]] = []
    kernel.compile_all(lambda *progress: told.append(progress))
    assert told == []
    assert all(each.ready for each in kernel.kernels.values())


def test_importing_the_package_imports_no_compiler() -> None:
    code = "import sys, ninfer, ninfer._cpu; print(sorted({'numba', 'llvmlite'} & set(sys.modules)))"
    assert run(Path("."), code) == "[]"

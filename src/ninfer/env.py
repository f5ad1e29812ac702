"""Environment variables, all optional. None is needed for correctness."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder of compiled kernels: ``NINFER_CACHE_DIR``, else ``$XDG_CACHE_HOME/ninfer``, else ``~/.cache/ninfer``."""
    explicit = os.environ.get("NINFER_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ninfer"


def test_data() -> Path | None:
    """``NINFER_TEST_DATA``: a folder of public test files, or ``None``. Tests that need it skip visibly."""
    value = os.environ.get("NINFER_TEST_DATA")
    return Path(value) if value else None


def cpu_threads() -> int | None:
    """``NINFER_CPU_THREADS``: threads the CPU device uses, >= 1; ``None`` means one per usable core."""
    value = os.environ.get("NINFER_CPU_THREADS")
    return max(1, int(value)) if value else None

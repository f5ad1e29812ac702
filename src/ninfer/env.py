"""Environment variables, all optional. None is needed for correctness."""

from __future__ import annotations

import os
from pathlib import Path

from ninfer.errors import InvalidRequest


def cache_dir() -> Path:
    """Folder of compiled kernels: ``NINFER_CACHE_DIR``, else ``$XDG_CACHE_HOME/ninfer``, else ``~/.cache/ninfer``.

    It need not exist, nor be writable; what cannot be kept is compiled again. A user without a home gets ``/.cache``.
    It is kept to 256 MiB of machine code for CPUs and as much for GPUs, see ``kept``.
    """
    explicit = os.environ.get("NINFER_CACHE_DIR")
    if explicit:
        return Path(os.path.expanduser(explicit)).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")
        base = os.path.join(home if os.path.isabs(home) else "/", ".cache")
    return Path(base).absolute() / "ninfer"


def test_data() -> Path | None:
    """``NINFER_TEST_DATA``: a folder of public test files, or ``None``. Tests that need it skip visibly."""
    value = os.environ.get("NINFER_TEST_DATA")
    return Path(value) if value else None


def checks() -> bool:
    """``NINFER_CHECKS``: anything but empty or 0 checks every index before the device follows it. For debugging."""
    return os.environ.get("NINFER_CHECKS", "") not in ("", "0")


def cpu_threads() -> int | None:
    """``NINFER_CPU_THREADS``: threads the CPU device uses, 1..1024; ``None`` (unset, empty) means one per usable core.

    Raises InvalidRequest naming the variable.
    """
    value = os.environ.get("NINFER_CPU_THREADS", "").strip()
    if not value:
        return None
    if not (value.isdecimal() and len(value) <= 4 and 1 <= int(value) <= 1024):
        raise InvalidRequest(f"expected 1..1024, got {value!r}", field="NINFER_CPU_THREADS")
    return int(value)

"""Compiled code on disk stays within bounds: where there is too much of it, what was used least recently goes.

A file was last used when it was last modified: ``used`` says so, because few file systems keep times of access.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

BOUND = 256 << 20
"""Bytes that a folder may keep."""

GRACE = 24 * 3600
"""Seconds after its last use in which a file stays whatever the bound: who found it may not have read it yet."""


def used(path: Path) -> None:
    """Note that a file is in use, where that can be noted."""
    with suppress(OSError):
        os.utime(path)


def prune(folder: Path, ours: re.Pattern[str]) -> None:
    """Delete what was used least recently of the files in a folder beyond ``BOUND`` bytes.

    ours: matches the path inside the folder of every file that may be deleted. Those with the same first group are one
    entry: they count, and go, together. Other processes may use, write and delete entries meanwhile.
    """
    entries: defaultdict[str, list[Path]] = defaultdict(list)
    for base, _, names in os.walk(folder):
        for path in (Path(base, name) for name in names):
            match = ours.fullmatch(path.relative_to(folder).as_posix())
            if match and not path.is_symlink():
                entries[match[1]].append(path)
    measured = sorted((*_last_use_and_bytes(files), entry) for entry, files in entries.items())
    excess = sum(nbytes for _, nbytes, _ in measured) - BOUND
    for last, nbytes, entry in measured:
        if excess <= 0 or time.time() - last < GRACE:
            return
        if _last_use_and_bytes(entries[entry])[0] <= last:
            _delete(entries[entry], folder)
            excess -= nbytes


def _last_use_and_bytes(files: list[Path]) -> tuple[float, int]:
    """Of files of which some may be gone."""
    last, nbytes = 0.0, 0
    for path in files:
        with suppress(OSError):
            found = path.stat()
            last, nbytes = max(last, found.st_mtime), nbytes + found.st_size
    return last, nbytes


def _delete(files: list[Path], folder: Path) -> None:
    for path in files:
        with suppress(OSError):
            path.unlink()
    for inner in {path.parent for path in files} - {folder}:
        with suppress(OSError):  # it holds something else
            inner.rmdir()

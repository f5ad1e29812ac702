"""Compiled code on disk: what goes, what stays, whoever else is at it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from ninfer import kept

OURS = re.compile(r"(?:inner/)?(\w+)\.(?:code|sum)")
DAY = 24 * 3600


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BOUND", 1000)


def write(path: Path, nbytes: int, days: float) -> Path:
    """A file that was last used so many days ago."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(nbytes))
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_what_was_used_least_recently_goes(tmp_path: Path) -> None:
    for days, name in enumerate(("e", "c", "a", "d", "b"), 2):
        write(tmp_path / f"{name}.code", 300, days)
        write(tmp_path / f"{name}.sum", 30, 9)
    kept.prune(tmp_path, OURS)
    assert names(tmp_path) == {f"{name}.{kind}" for name in "eca" for kind in ("code", "sum")}
    kept.used(tmp_path / "a.code")
    write(tmp_path / "f.code", 100, 1.5)
    kept.prune(tmp_path, OURS)
    assert names(tmp_path) == {"e.code", "e.sum", "a.code", "a.sum", "f.code"}


def test_within_the_bound_everything_stays(tmp_path: Path) -> None:
    for name in "abcd":
        write(tmp_path / f"{name}.code", 250, 1000)
    kept.prune(tmp_path, OURS)
    assert len(names(tmp_path)) == 4


def test_what_is_in_use_stays_whatever_the_bound(tmp_path: Path) -> None:
    for name in "abcd":
        write(tmp_path / f"{name}.code", 2000, 0.9)
    write(tmp_path / "old.code", 10, 1.1)
    kept.prune(tmp_path, OURS)
    assert names(tmp_path) == {f"{name}.code" for name in "abcd"}


def test_what_others_wrote_stays_and_does_not_count(tmp_path: Path) -> None:
    for other in ("notes.txt", "a.code.txt", "a.sum.code", "deeper/b.code"):
        write(tmp_path / other, 5000, 90)
    (tmp_path / "link.code").symlink_to("notes.txt")
    (tmp_path / "folder.code").mkdir()
    before = names(tmp_path)
    write(tmp_path / "a.code", 900, 50)
    kept.prune(tmp_path, OURS)
    assert names(tmp_path) == before | {"a.code"}
    write(tmp_path / "b.code", 900, 40)
    kept.prune(tmp_path, OURS)
    assert names(tmp_path) == before | {"b.code"}
    assert (tmp_path / "folder.code").is_dir()


def test_a_folder_that_becomes_empty_goes_with_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    write(folder / "a.code", 800, 2)
    write(folder / "inner" / "b.code", 800, 3)
    kept.prune(folder, OURS)
    assert [path.name for path in folder.iterdir()] == ["a.code"]
    write(folder / "inner" / "other.txt", 800, 90)
    write(folder / "inner" / "b.code", 800, 3)
    kept.prune(folder, OURS)
    assert names(folder) == {"a.code", "inner/other.txt"}


def test_files_that_others_delete_or_use_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process prunes the same folder at once, and a third one finds an entry that was about to go."""
    for name in "abcde":
        write(tmp_path / f"{name}.code", 400, {"a": 9, "b": 8, "c": 7, "d": 6, "e": 5}[name])
    delete = kept._delete

    def first(files: list[Path], folder: Path) -> None:
        monkeypatch.setattr(kept, "_delete", delete)
        kept.used(tmp_path / "b.code")
        files[0].unlink()
        delete(files, folder)

    monkeypatch.setattr(kept, "_delete", first)
    kept.prune(tmp_path, OURS)
    assert names(tmp_path) == {"b.code", "e.code"}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    kept.prune(tmp_path / "none", OURS)
    kept.used(tmp_path / "none")
    assert not names(tmp_path)

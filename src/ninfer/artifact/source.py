"""Where an artifact's bytes come from: the interface, and its implementation over files.

A file source maps each file into memory; what is never viewed never becomes resident. Continuation files are
opened, and their headers checked, when a read first touches them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from ninfer.artifact.directory import Directory
from ninfer.artifact.framing import HEADER_BYTES, PAGE, PART_MAGIC, entry_header, pack_header, payload_start
from ninfer.artifact.jsontext import parse_json
from ninfer.artifact.layouts import Bytes
from ninfer.artifact.parsing import parse_directory
from ninfer.errors import ArtifactError


class ArtifactSource(Protocol):
    """A directory and the payload it describes. Offsets are bytes of the payload, as objects give them.

    ``read`` copies; ``view`` gives a read-only uint8 array and copies only when it must. Both raise ArtifactError for a
    range outside the payload, and may be called from any thread. Views stay valid after ``close``.
    """

    name: str
    directory: Directory

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def view(self, offset: int, nbytes: int) -> Bytes: ...

    def original(self, object_id: str) -> str:
        """An object that holds the same bytes, the same for all that do, where the source knows one; else itself."""
        ...

    def close(self) -> None: ...


def open_artifact(path: str | bytes | os.PathLike[Any], *, max_directory_bytes: int = 256 << 20) -> ArtifactFile:
    """Open an artifact by its entry file. The whole directory is checked, the payload is not touched.

    Raises ArtifactError (``path`` the file's name, ``where`` the place in it) for a file that cannot be read,
    is not a version 3 artifact, is malformed, or whose directory exceeds ``max_directory_bytes``.
    """
    return ArtifactFile(Path(os.fsdecode(path)), max_directory_bytes)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors leave as ArtifactError with the file's name."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(error.reason, path=path, where=error.where) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ArtifactError(getattr(error, "strerror", None) or str(error), path=path) from error


class _File:
    """An open regular file and its memory map; ``start`` is the file offset of its payload segment."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.start = PAGE
        self.mapped: Bytes | None = None
        # A FIFO would block a plain open.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError("not a regular file")
            self.size = status.st_size
        except BaseException:
            os.close(self.fd)
            raise

    def header(self) -> bytes:
        return self.read(0, min(self.size, HEADER_BYTES))

    def check_size(self, payload_bytes: int, index: int) -> None:
        if self.size != self.start + payload_bytes:
            raise ArtifactError(
                f"the file has {self.size} bytes, its directory says {self.start} + {payload_bytes}",
                where=f"files[{index}].payload_bytes",
            )

    def read(self, offset: int, nbytes: int) -> bytes:
        pieces, end = [], offset + nbytes
        while offset < end:
            piece = os.pread(self.fd, min(end - offset, 1 << 30), offset)
            if not piece:
                raise ArtifactError(f"the file ends at {offset}, before {end}")
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def view(self, offset: int, nbytes: int) -> Bytes:
        if self.mapped is None:
            self.mapped = np.frombuffer(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ), np.uint8)
        return self.mapped[offset : offset + nbytes]

    def close(self) -> None:
        self.mapped = None  # the last view unmaps
        os.close(self.fd)


class ArtifactFile:
    """An artifact on disk, as an :class:`ArtifactSource`; a context manager that closes itself."""

    def __init__(self, path: Path, max_directory_bytes: int) -> None:
        self.name = path.name
        self._folder = path.parent
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._closed = False
        with _named(self.name):
            entry = _File(path)
            try:
                self.directory = _read_directory(entry, max_directory_bytes)
            except BaseException:
                entry.close()
                raise
        self._files[0] = entry
        self._begins = list(accumulate((f.payload_bytes for f in self.directory.files), initial=0))

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of payload bytes ``[offset, offset + nbytes)``."""
        pieces = []
        for file, at, count in self._spans(offset, nbytes):
            with _named(file.name):
                pieces.append(file.read(at, count))
        return b"".join(pieces)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The same bytes as a read-only array over the mapped file; a copy where they straddle files.

        The files must not be truncated while mapped: reading a page that is gone kills the process.
        """
        spans = self._spans(offset, nbytes)
        if len(spans) == 1:
            file, at, count = spans[0]
            with _named(file.name):
                return file.view(at, count)
        return np.frombuffer(self.read(offset, nbytes), np.uint8)

    def original(self, object_id: str) -> str:
        """``object_id``: a file says nothing about equal bytes."""
        return object_id

    def close(self) -> None:
        """Close the files; views handed out stay valid. Idempotent."""
        with self._lock:
            self._closed = True
            while self._files:
                self._files.popitem()[1].close()

    def _spans(self, offset: int, nbytes: int) -> list[tuple[_File, int, int]]:
        """(file, offset in it, bytes) of each piece of a payload range."""
        if self._closed:
            raise ArtifactError("the artifact is closed", path=self.name)
        total = self._begins[-1]
        if offset < 0 or nbytes < 0 or offset + nbytes > total:
            raise ArtifactError(f"range {offset} + {nbytes} leaves the payload of {total} bytes", path=self.name)
        spans = []
        for index, (begin, end) in enumerate(pairwise(self._begins)):
            a, b = max(offset, begin), min(offset + nbytes, end)
            if a < b:
                file = self._file(index)
                spans.append((file, file.start + a - begin, b - a))
        return spans

    def _file(self, index: int) -> _File:
        with self._lock:
            if index not in self._files:
                self._files[index] = self._open_part(index)
            return self._files[index]

    def _open_part(self, index: int) -> _File:
        record = self.directory.files[index]
        assert record.path is not None
        with _named(record.path):
            file = _File(self._folder / record.path)
            try:
                header = file.header()
                expected = pack_header(PART_MAGIC, index, bytes.fromhex(self.directory.artifact_id))
                for field, begin, end in (("magic", 0, 8), ("part_index", 8, 16), ("artifact_id", 16, 32)):
                    if header[begin:end] != expected[begin:end]:
                        raise ArtifactError("not the continuation its entry file names", where=f"header.{field}")
                file.check_size(record.payload_bytes, index)
            except BaseException:
                file.close()
                raise
        return file

    def __enter__(self) -> ArtifactFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_directory(entry: _File, max_directory_bytes: int) -> Directory:
    json_bytes, artifact_id = entry_header(entry.header())
    if not 0 < json_bytes <= entry.size - HEADER_BYTES:
        raise ArtifactError(f"{json_bytes} bytes in a file of {entry.size}", where="header.json_bytes")
    if json_bytes > max_directory_bytes:
        raise ArtifactError(
            f"directory of {json_bytes} bytes exceeds the limit of {max_directory_bytes}", where="header.json_bytes"
        )
    try:
        root = parse_json(entry.read(HEADER_BYTES, json_bytes))
    except ValueError as error:
        raise ArtifactError(f"invalid JSON: {error}", where="directory") from None
    directory = parse_directory(root, entry_name=entry.name, artifact_id=artifact_id.hex())
    entry.start = payload_start(json_bytes)
    entry.check_size(directory.files[0].payload_bytes, 0)
    return directory

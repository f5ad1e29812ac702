"""Where an artifact's bytes come from: the interface, and its implementation over files.

A file source maps each file into memory; what is never viewed never becomes resident. Continuation files are
opened, and their headers checked, when a read first touches them.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from ninfer.artifact.directory import Directory
from ninfer.artifact.framing import HEADER_BYTES, PAGE, PART_MAGIC, entry_header, pack_header, payload_start
from ninfer.artifact.jsontext import parse_json
from ninfer.artifact.layouts import Bytes
from ninfer.artifact.parsing import parse_directory
from ninfer.errors import ArtifactError


class ArtifactSource(Protocol):
    """A directory and the payload it describes. Offsets are bytes of the payload, as objects give them.

    ``read`` copies; ``view`` gives a read-only uint8 array and copies only when it must. Both raise
             ArtifactError for
    a range outside the payload, and may be called from any thread. Views stay valid after ``close``.
    """

    name: str
    directory: Directory

    def read(self, offset: int, nbytes: int) -> bytes: ...

    def view(self, offset: int, nbytes: int) -> Bytes: ...

    def close(self) -> None: ...


def open_artifact(path: str | os.PathLike[str], *, max_directory_bytes: int = 256 << 20) -> ArtifactFile:
    """Open an artifact by its entry file. The whole directory is checked, the payload is not touched.

    Raises ArtifactError (``path`` the file's name, ``where`` the place in it) for a file that cannot be read,
    is not a version 3 artifact, is malformed, or whose directory exceeds ``max_directory_bytes``.
    """
    return ArtifactFile(Path(path), max_directory_bytes)


class _File:
    """An open regular file and its memory map; ``start`` is the file offset of its payload segment."""

    def __init__(self, path: Path) -> None:
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
        self.start = PAGE
        self.mapped: Bytes | None = None

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
        try:
            file = self._files[0] = _File(path)
            self.directory = self._open_entry(file, max_directory_bytes)
        except BaseException as error:
            self.close()
            raise self._named(error, self.name) from error
        self._begins = [0]
        for entry in self.directory.files:
            self._begins.append(self._begins[-1] + entry.payload_bytes)

    def _open_entry(self, file: _File, max_directory_bytes: int) -> Directory:
        json_bytes, artifact_id = entry_header(file.read(0, min(file.size, HEADER_BYTES)))
        if not 0 < json_bytes <= file.size - HEADER_BYTES:
            raise ArtifactError(f"{json_bytes} bytes in a file of {file.size}", where="header.json_bytes")
        if json_bytes > max_directory_bytes:
            raise ArtifactError(
                f"directory of {json_bytes} bytes exceeds the limit of {max_directory_bytes}",
                where="header.json_bytes",
            )
        try:
            root = parse_json(file.read(HEADER_BYTES, json_bytes))
        except ValueError as error:
            raise ArtifactError(f"invalid JSON: {error}", where="directory") from None
        directory = parse_directory(root, entry_name=self.name, artifact_id=artifact_id.hex())
        file.start = payload_start(json_bytes)
        self._check_size(file, directory.files[0].payload_bytes, "files[0].payload_bytes")
        return directory

    def _open_part(self, index: int) -> _File:
        entry = self.directory.files[index]
        assert entry.path is not None
        try:
            file = _File(self._folder / entry.path)
            try:
                expected = pack_header(PART_MAGIC, index, bytes.fromhex(self.directory.artifact_id))
                header = file.read(0, min(file.size, HEADER_BYTES))
                for place, span in (
                    ("magic", slice(0, 8)),
                    ("part_index", slice(8, 16)),
                    ("artifact_id", slice(16, 32)),
                ):
                    if header[span] != expected[span]:
                        raise ArtifactError("not the continuation its entry file names", where=f"header.{place}")
                self._check_size(file, entry.payload_bytes, f"files[{index}].payload_bytes")
            except BaseException:
                file.close()
                raise
        except BaseException as error:
            raise self._named(error, entry.path) from error
        return file

    @staticmethod
    def _check_size(file: _File, payload_bytes: int, where: str) -> None:
        if file.size != file.start + payload_bytes:
            raise ArtifactError(
                f"the file has {file.size} bytes, its directory says {file.start} + {payload_bytes}",
                where=where,
            )

    @staticmethod
    def _named(error: BaseException, path: str) -> BaseException:
        """The error with the file's name in it."""
        if isinstance(error, ArtifactError):
            return ArtifactError(error.reason, path=path, where=error.where)
        if isinstance(error, OSError):
            return ArtifactError(error.strerror or str(error), path=path)
        return error

    def _spans(self, offset: int, nbytes: int) -> list[tuple[_File, int, int]]:
        """(file, offset in it, bytes) of each piece of a payload range."""
        if self._closed:
            raise ArtifactError("the artifact is closed", path=self.name)
        total = self._begins[-1]
        if offset < 0 or nbytes < 0 or offset + nbytes > total:
            raise ArtifactError(f"range {offset} + {nbytes} leaves the payload of {total} bytes", path=self.name)
        spans = []
        for index, begin in enumerate(self._begins[:-1]):
            a, b = max(offset, begin), min(offset + nbytes, self._begins[index + 1])
            if a < b:
                file = self._file(index)
                spans.append((file, file.start + a - begin, b - a))
        return spans

    def _file(self, index: int) -> _File:
        with self._lock:
            if index not in self._files:
                self._files[index] = self._open_part(index)
            return self._files[index]

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of payload bytes ``[offset, offset + nbytes)``."""
        try:
            return b"".join(file.read(at, count) for file, at, count in self._spans(offset, nbytes))
        except OSError as error:
            raise self._named(error, self.name) from error

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The same bytes as a read-only array over the mapped file; a copy where they straddle files.

        The files must not be truncated while mapped: reading a page that is gone kills the process.
        """
        spans = self._spans(offset, nbytes)
        if len(spans) == 1:
            file, at, count = spans[0]
            return file.view(at, count)
        return np.frombuffer(self.read(offset, nbytes), np.uint8)

    def close(self) -> None:
        """Close the files; views handed out stay valid. Idempotent."""
        with self._lock:
            self._closed = True
            while self._files:
                self._files.popitem()[1].close()

    def __enter__(self) -> ArtifactFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A planned directory and a stream of object bytes become files: all of them, or none.

Files are written under temporary names beside the target, checked for completeness, synced, and renamed:
continuations first, the entry last, so that an entry that exists is complete. Nothing existing is replaced.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import numpy.typing as npt

from ninfer.artifact.directory import DIVISOR_ROLE, Directory, FileEntry, TensorObject, to_json
from ninfer.artifact.framing import (
    ENTRY_MAGIC,
    HEADER_BYTES,
    MAX_FILE_BYTES,
    PAGE,
    PART_MAGIC,
    pack_header,
    part_name,
    payload_start,
    split_payload,
)
from ninfer.artifact.jsontext import dump_json, parse_json
from ninfer.artifact.layouts import align_up, geometry
from ninfer.artifact.parsing import parse_directory
from ninfer.errors import ArtifactError

Buffer = bytes | memoryview | npt.NDArray[Any]
Chunk = tuple[int, Buffer]
"""(offset within the object, bytes)"""


def write_artifact(
    path: str | os.PathLike[str],
    directory: Directory,
    contents: Callable[[str], Iterable[Chunk]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    artifact_id: bytes | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Directory:
    """Write an artifact and return its directory as published.

    contents: called with each object's id in payload order, gives its bytes as chunks in any order; gaps
    between a tensor's planes may be left out. progress: called as (object id, bytes written, total bytes).
    Errors are those of :class:`ArtifactWriter`; on any exception, KeyboardInterrupt included, nothing is left
    behind.
    """
    with ArtifactWriter(path, directory, max_file_bytes=max_file_bytes, artifact_id=artifact_id) as writer:
        for record in directory.objects.values():
            for offset, data in contents(record.id):
                writer.write(record.id, offset, data)
            if progress is not None:
                progress(record.id, record.offset + record.nbytes, directory.payload_bytes)
        return writer.publish()


class ArtifactWriter:
    """Writes objects in any order, then publishes. Leaving the ``with`` block unpublished removes everything.

    max_file_bytes: no file of the set grows beyond it. artifact_id: 16 bytes, random when None. Raises
    ArtifactError when the directory is not what a reader would accept, a use lacks its policy, a 4-bit
    activation use of an nvfp4 weight lacks its divisor, or a target file exists; OSError as the file system does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        directory: Directory,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        artifact_id: bytes | None = None,
    ) -> None:
        target = Path(path)
        identity = uuid.uuid4().bytes if artifact_id is None else artifact_id
        text, self.directory = _serialise(directory, target.name, max_file_bytes, identity)
        _check_duties(self.directory)
        self._finals = [target.with_name(f.path or target.name) for f in self.directory.files]
        for final in self._finals:
            if os.path.lexists(final):
                raise ArtifactError("exists already and is not replaced", path=final.name)
        suffix = f".{uuid.uuid4().hex[:8]}.tmp"
        self._temporaries = [final.with_name(f".{final.name}{suffix}") for final in self._finals]
        self._fds: list[int] = []
        self._begins = [0]
        self._starts = [payload_start(len(text))] + [PAGE] * (len(self._finals) - 1)
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self.directory.objects}
        self._published = False
        try:
            for index, (name, entry) in enumerate(zip(self._temporaries, self.directory.files)):
                self._fds.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                header = pack_header(PART_MAGIC, index, identity)
                if index == 0:
                    header = pack_header(ENTRY_MAGIC, len(text), identity) + text
                _write_all(self._fds[index], header, 0)
                os.truncate(self._fds[index], self._starts[index] + entry.payload_bytes)
                self._begins.append(self._begins[-1] + entry.payload_bytes)
        except BaseException:
            self.abort()
            raise

    def write(self, object_id: str, offset: int, data: Buffer) -> None:
        """Put bytes at ``offset`` of an object. Raises ArtifactError outside the object."""
        record, view = self.directory.objects[object_id], _flat(data)
        if not 0 <= offset <= record.nbytes - view.nbytes:
            raise ArtifactError(
                f"bytes {offset} + {view.nbytes} leave its {record.nbytes}", where=f"objects[{object_id!r}]"
            )
        position, end = record.offset + offset, record.offset + offset + view.nbytes
        for fd, start, a, b in zip(self._fds, self._starts, self._begins, self._begins[1:]):
            low, high = max(position, a), min(end, b)
            if low < high:
                _write_all(fd, view[low - position : high - position], start + low - a)
        self._written[object_id].append((offset, offset + view.nbytes))

    def publish(self) -> Directory:
        """Check that every byte was written once, sync, and give the files their names."""
        for object_id in self.directory.objects:
            self._check_covered(object_id)
        for fd in self._fds:
            os.fsync(fd)
        for temporary, final in reversed(list(zip(self._temporaries, self._finals))):
            _link_new(temporary, final)
        for temporary in self._temporaries:
            temporary.unlink(missing_ok=True)
        folder = os.open(self._finals[0].parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._published = True
        return self.directory

    def abort(self) -> None:
        """Remove whatever was created. Harmless after :meth:`publish`."""
        if not self._published:
            for fd, final in zip(self._fds, self._finals):
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.lstat(final)):  # ours, not one that appeared meanwhile
                        final.unlink()
            for temporary in self._temporaries:
                temporary.unlink(missing_ok=True)
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _check_covered(self, object_id: str) -> None:
        record, where = self.directory.objects[object_id], f"objects[{object_id!r}]"
        needed = [(0, record.nbytes)]
        if isinstance(record, TensorObject):
            planes = geometry(record.format, record.layout, record.shape).planes()
            needed = [(plane.offset, plane.offset + plane.nbytes) for plane in planes]
        merged: list[list[int]] = []
        for begin, end in sorted(self._written[object_id]):
            if merged and begin < merged[-1][1]:
                raise ArtifactError(f"byte {begin} was written twice", where=where)
            if merged and begin == merged[-1][1]:
                merged[-1][1] = end
            else:
                merged.append([begin, end])
        for begin, end in needed:
            if not any(a <= begin and end <= b for a, b in merged):
                raise ArtifactError(f"bytes {begin}..{end} were not all written", where=where)


def _serialise(directory: Directory, name: str, limit: int, identity: bytes) -> tuple[bytes, Directory]:
    """The padded JSON text and the directory it describes, with the payload split into files.

    The table of files depends on where the entry's payload starts, which depends on the length of the JSON.
    """
    payload = directory.payload_bytes
    reserve = 0
    while True:
        files: tuple[FileEntry, ...] = (FileEntry(None, payload),)
        if reserve:
            segments = split_payload(payload, HEADER_BYTES + reserve, limit)
            files = tuple(FileEntry(part_name(name, i) if i else None, n) for i, n in enumerate(segments))
        try:
            text = dump_json(to_json(attrs.evolve(directory, files=files)))
        except (TypeError, ValueError) as error:  # in a config: a NaN, a lone surrogate, a set
            raise ArtifactError(str(error), where="directory") from None
        if reserve and len(text) <= reserve:
            padded = text.ljust(reserve)
            return padded, parse_directory(parse_json(padded), entry_name=name, artifact_id=identity.hex())
        reserve = align_up(max(HEADER_BYTES + len(text), HEADER_BYTES + reserve + 1), PAGE) - HEADER_BYTES


def _check_duties(directory: Directory) -> None:
    for i, use in enumerate(directory.uses.values()):
        if use.activation_policy is None:
            raise ArtifactError("a use needs its policy", where=f"uses[{i}].activation_policy")
        if use.activation_policy == "AllowA4" and DIVISOR_ROLE not in use.auxiliaries:
            for part in directory.bindings[use.parameter].parts:
                record = directory.objects[part.object]
                if isinstance(record, TensorObject) and record.format == "nvfp4":
                    raise ArtifactError(f"AllowA4 of {use.parameter!r} needs a divisor", where=f"uses[{i}].auxiliaries")


def _link_new(temporary: Path, final: Path) -> None:
    """Give a file its final name unless something has that name."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise ArtifactError("appeared meanwhile and is not replaced", path=final.name) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(final):
            raise ArtifactError("appeared meanwhile and is not replaced", path=final.name) from None
        os.rename(temporary, final)


def _flat(data: Buffer) -> memoryview:
    view = memoryview(data)  # type: ignore[arg-type]  # NumPy declares arrays as buffers only from Python 3.12
    return view.cast("B") if view.nbytes else memoryview(b"")


def _write_all(fd: int, data: Buffer, offset: int) -> None:
    view = _flat(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written

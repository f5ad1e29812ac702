"""The file set: headers, where each file's payload segment starts, and how a payload is cut into files."""

from __future__ import annotations

import struct

from ninfer.artifact.layouts import align_up
from ninfer.errors import ArtifactError

ENTRY_MAGIC = b"NINFER\x00\x03"
PART_MAGIC = b"NINPRT\x00\x03"
HEADER_BYTES = 32
PAGE = 4096
MAX_FILE_BYTES = 32_000_000_000
_HEADER = struct.Struct("<8sQ16s")


def pack_header(magic: bytes, number: int, artifact_id: bytes) -> bytes:
    """A 32-byte header; ``number`` is the JSON's length in the entry, the part's index in a continuation."""
    return _HEADER.pack(magic, number, artifact_id)


def entry_header(header: bytes) -> tuple[int, bytes]:
    """(JSON bytes, artifact id) from an entry file's first 32 bytes. Raises ArtifactError."""
    if len(header) < HEADER_BYTES:
        raise ArtifactError(f"{len(header)} bytes, shorter than the 32-byte header", where="header")
    magic, json_bytes, artifact_id = _HEADER.unpack(header)
    if magic == PART_MAGIC:
        raise ArtifactError("a continuation file; open the entry file instead", where="header.magic")
    if magic != ENTRY_MAGIC:
        if magic[:7] == ENTRY_MAGIC[:7] and magic[7] in (1, 2):
            raise ArtifactError(f"version {magic[7]} of the container; only version 3 is read", where="header.magic")
        raise ArtifactError("not a .ninfer artifact", where="header.magic")
    return json_bytes, artifact_id


def payload_start(json_bytes: int) -> int:
    """The entry file offset at which its payload segment begins."""
    return align_up(HEADER_BYTES + json_bytes, PAGE)


def part_name(entry: str, index: int) -> str:
    """The name the writer gives continuation ``index`` (>= 1)."""
    return f"{entry}.part-{index:04d}"


def split_payload(payload_bytes: int, entry_start: int, limit: int) -> list[int]:
    """Segment lengths when no file may exceed ``limit`` bytes; all but the last fill whole pages."""
    if entry_start + payload_bytes <= limit:
        return [payload_bytes]
    entry, part = (limit - entry_start) // PAGE * PAGE, (limit - PAGE) // PAGE * PAGE
    if entry <= 0 or part <= 0:
        raise ArtifactError(f"a limit of {limit} bytes per file leaves no room for payload", where="files")
    rest = payload_bytes - entry
    return [entry] + [part] * (rest // part) + ([rest % part] if rest % part else [])

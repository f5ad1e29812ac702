"""Where device buffers come from. The code that lays memory out runs twice over the same sequence of requests: over a
MeasureScope to plan, over an ArenaScope to build. Both place buffers with one cursor, so planned equals used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ninfer.device import ITEM_BYTES, Arena, Buffer, Shape
from ninfer.errors import InvariantError

ALIGNMENT = 256


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def extent(shape: Shape, dtype: str) -> int:
    """Bytes of an array in C order."""
    return math.prod(shape) * ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Field:
    """One typed array inside a packed block."""

    shape: Shape
    dtype: str


def field_offsets(fields: Sequence[Field]) -> tuple[list[int], int]:
    """Byte offsets of packed fields, each 256-byte aligned, and the bytes of the whole block."""
    offsets, end = [], 0
    for f in fields:
        offsets.append(end)
        end = align(end + extent(f.shape, f.dtype))
    return offsets, end


@dataclass(slots=True)
class Cursor:
    """The next free byte, and the bytes taken so far by component. Padding counts with the buffer it follows."""

    end: int = 0
    components: dict[str, int] = field(default_factory=dict)

    def take(self, name: str, nbytes: int) -> int:
        offset = self.end
        size = align(nbytes)
        self.end += size
        self.components[name] = self.components.get(name, 0) + size
        return offset


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer that has a shape and no memory."""

    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        return extent(self.shape, self.dtype)

    def head(self, *shape: int) -> PlannedBuffer:
        if math.prod(shape) > math.prod(self.shape):
            raise InvariantError(f"{shape} does not fit a buffer of {self.shape}")
        return PlannedBuffer(shape, self.dtype)

    def slice(self, begin: int, end: int) -> PlannedBuffer:
        return PlannedBuffer((end - begin, *self.shape[1:]), self.dtype)


class MeasureScope:
    """Counts what a layout needs and allocates nothing."""

    def __init__(self) -> None:
        self.cursor = Cursor()

    def buffer(self, name: str, shape: Shape, dtype: str) -> Buffer:
        self.cursor.take(name, extent(shape, dtype))
        return PlannedBuffer(shape, dtype)

    def packed(self, name: str, fields: Sequence[Field]) -> tuple[Buffer, tuple[Buffer, ...]]:
        """One u8 block, and the typed fields inside it at ``field_offsets``."""
        _, nbytes = field_offsets(fields)
        self.cursor.take(name, nbytes)
        return PlannedBuffer((nbytes,), "u8"), tuple(PlannedBuffer(f.shape, f.dtype) for f in fields)


class ArenaScope:
    """Carves one arena in the order a MeasureScope counted."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.cursor = Cursor()

    def buffer(self, name: str, shape: Shape, dtype: str) -> Buffer:
        return self.arena.buffer(self._take(name, extent(shape, dtype)), shape, dtype)

    def packed(self, name: str, fields: Sequence[Field]) -> tuple[Buffer, tuple[Buffer, ...]]:
        """One u8 block, and the typed fields inside it at ``field_offsets``."""
        offsets, nbytes = field_offsets(fields)
        base = self._take(name, nbytes)
        views = tuple(self.arena.buffer(base + at, f.shape, f.dtype) for at, f in zip(offsets, fields, strict=True))
        return self.arena.buffer(base, (nbytes,), "u8"), views

    def _take(self, name: str, nbytes: int) -> int:
        offset = self.cursor.take(name, nbytes)
        if self.cursor.end > self.arena.nbytes:
            raise InvariantError(f"component {name} overruns the planned {self.arena.nbytes} bytes")
        return offset


Scopes = MeasureScope | ArenaScope

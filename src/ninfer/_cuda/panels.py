"""Columns that the kernel whose result they are leaves in panels, the order in which products of 17 to 128 columns take
them (``kernels/wide.cuh``), and when the next product may rely on them.

What was left is good for whatever is submitted next and for nothing after it, so nothing can have written the columns,
or the place where they lie in panels, since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ninfer._cuda import wides
from ninfer._cuda.area import OPERANDS, Area
from ninfer._cuda.buffers import CudaBuffer

_HALF = OPERANDS // 2
"""Columns that a product takes lie in one half, those that it leaves in the other."""


@dataclass(frozen=True, slots=True)
class Left:
    """``x`` bf16 [columns, K] at ``at``, in panels of ``room`` columns; with a ``norm``, ``x * (1 + norm)``, and behind
    it f32 [room / 4, K / 16, 4], what the squares of ``x`` add up to by 16 features."""

    x: CudaBuffer
    norm: CudaBuffer | None
    room: int
    at: int

    @property
    def squares(self) -> int | None:
        return None if self.norm is None else self.at + 2 * self.x.shape[1] * self.room

    @property
    def nbytes(self) -> int:
        elements = self.x.shape[1] * self.room
        return 2 * elements + (0 if self.norm is None else elements // 4)


def panel_words(left: Left | None) -> tuple[int, int]:
    """Where a kernel leaves its result, and columns of panels there."""
    return (left.at, left.room) if left else (0, 0)


class Panels:
    """What was left last, over one device."""

    def __init__(self, device: Any, area: Area) -> None:
        self._device = device
        self._area = area
        self._left: Left | None = None
        self._entered = -1

    def find(self, x: CudaBuffer, norm: CudaBuffer | None, room: int) -> Left | None:
        """``x`` in panels of ``room`` columns, for the very next launch, to be normed where there is a ``norm``; None
        where they have to be made."""
        left, self._left = self._left, None
        if left is None or self._device.entered != self._entered:
            return None
        wanted = x.ptr, x.shape, norm and norm.ptr, room
        return left if wanted == (left.x.ptr, left.x.shape, left.norm and left.norm.ptr, left.room) else None

    def place(self, out: CudaBuffer, norm: CudaBuffer | None, room: int, taken: int, nbytes: int) -> Left | None:
        """Where a product may leave ``out``, for one that norms it so, while it reads ``nbytes`` at ``taken``; None
        where there is no room, or where there would be features to fill up with zeros."""
        base = self._area.room.ptr
        left = Left(out, norm, room, base + (_HALF if taken == base else 0))
        return None if out.shape[1] % 256 or max(nbytes, left.nbytes) > _HALF else left

    def offer(self, out: CudaBuffer) -> Left | None:
        """Where a kernel that reads no panels may leave ``out`` for the product that takes it; None where that takes
        no panels, and as ``place``."""
        room = wides.panel_columns(out.shape[0])
        return self.place(out, None, room, 0, 0) if room and self._area.in_use else None

    def leave(self, left: Left) -> None:
        """The launch that leaves ``left`` was the last thing that was submitted."""
        self._left, self._entered = left, self._device.entered

"""Columns that the kernel whose result they are leaves in panels, the order in which products of 17 to 128 columns take
them (``kernels/wide.cuh``), and when the next product may rely on them.

What was left is good for whatever is submitted next and for nothing after it, so nothing can have written the columns,
or the place where they lie in panels, since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ninfer._cuda.area import OPERANDS, Area
from ninfer._cuda.buffers import CudaBuffer

_HALF = OPERANDS // 2
"""Columns that a product takes lie in one half, those that it leaves in the other."""


@dataclass(frozen=True, slots=True)
class Left:
    """``x`` bf16 [columns, K] at ``at``, in panels of ``room`` columns."""

    x: CudaBuffer
    room: int
    at: int


class Panels:
    """What was left last, over one device."""

    def __init__(self, device: Any, area: Area) -> None:
        self._device = device
        self._area = area
        self._left: Left | None = None
        self._entered = -1

    def find(self, x: CudaBuffer, room: int) -> Left | None:
        """``x`` in panels of ``room`` columns, for the very next launch; None where they have to be made."""
        left, self._left = self._left, None
        if left is None or self._device.entered != self._entered:
            return None
        same = (left.x.ptr, left.x.shape, left.room) == (x.ptr, x.shape, room)
        return left if same else None

    def place(self, out: CudaBuffer, room: int, taken: int, nbytes: int) -> Left | None:
        """Where a product may leave ``out`` while it reads ``nbytes`` of panels at ``taken``; None where there is no
        room, or where there would be features to fill up with zeros."""
        features, base = out.shape[1], self._area.room.ptr
        if features % 256 or max(nbytes, 2 * features * room) > _HALF:
            return None
        return Left(out, room, base + (_HALF if taken == base else 0))

    def leave(self, left: Left) -> None:
        """The launch that leaves ``left`` was the last thing that was submitted."""
        self._left, self._entered = left, self._device.entered

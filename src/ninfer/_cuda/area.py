"""The memory that all Ops of a device work in, one after the other: whoever runs them lends it."""

from __future__ import annotations

from collections.abc import Callable

from ninfer._cuda.buffers import CudaBuffer
from ninfer.errors import InvariantError

ROOM = 128 << 20
"""Bytes shared by what never lives at once: partial sums; operands; decoded weights and their products."""

OPERANDS = 16 << 20
"""Bytes of it, at its start, for columns that are made ready."""

TICKETS = 1 << 16
WORKSPACE = 32 << 20
"""Bytes the library of matrix products is given, so that it allocates none while work is recorded."""

_SCORES = 8 << 20

NBYTES = WORKSPACE + ROOM + 4 * TICKETS + _SCORES


class Area:
    """What an area is cut into, while there is one; without one, every part is an InvariantError.

    workspace u8: the library's. room u8 [ROOM]. tickets i32 [TICKETS]: zeros, which kernels leave as zeros. scores f32:
    of a router.
    """

    def __init__(self) -> None:
        self._lent: CudaBuffer | None = None

    def use(self, lent: CudaBuffer, zero: Callable[[CudaBuffer], None]) -> None:
        """Work in ``lent`` until ``leave``. ``zero`` submits the filling of a buffer with zeros."""
        if self._lent is not None:
            raise InvariantError("the operations of this device work for another program already")
        if lent.nbytes < NBYTES:
            raise InvariantError(f"an area of {lent.nbytes} bytes, operations need {NBYTES}")
        self._lent = lent
        zero(self.tickets)

    def leave(self, lent: CudaBuffer) -> None:
        """Forget ``lent``; nothing where it is not the area in use."""
        if self._lent is not None and self._lent.ptr == lent.ptr:
            self._lent = None

    def require(self) -> CudaBuffer:
        """The area in use. Ops that launch something before they ask for a part call this first."""
        if self._lent is None:
            raise InvariantError("no memory for operations to work in: Ops.use has not been called")
        return self._lent

    @property
    def in_use(self) -> bool:
        return self._lent is not None

    @property
    def workspace(self) -> CudaBuffer:
        return self._part(0, WORKSPACE, "u8")

    @property
    def room(self) -> CudaBuffer:
        return self._part(WORKSPACE, ROOM, "u8")

    @property
    def tickets(self) -> CudaBuffer:
        return self._part(WORKSPACE + ROOM, TICKETS, "i32")

    @property
    def scores(self) -> CudaBuffer:
        return self._part(WORKSPACE + ROOM + 4 * TICKETS, _SCORES // 4, "f32")

    def _part(self, offset: int, count: int, dtype: str) -> CudaBuffer:
        return CudaBuffer(self.require().ptr + offset, (count,), dtype)

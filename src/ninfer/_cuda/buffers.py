"""Names of device memory: an address, a shape and an element type."""

from __future__ import annotations

import math

from ninfer.device import ITEM_BYTES, Shape
from ninfer.errors import InvariantError


class CudaBuffer:
    """A C-ordered device array at address ``ptr``. Holds no memory: an arena or a device does."""

    __slots__ = ("dtype", "nbytes", "ptr", "shape")

    def __init__(self, ptr: int, shape: Shape, dtype: str) -> None:
        self.ptr = ptr
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * ITEM_BYTES[dtype]

    def head(self, *shape: int) -> CudaBuffer:
        if math.prod(shape) * ITEM_BYTES[self.dtype] > self.nbytes:
            raise InvariantError(f"a view {shape} of a buffer {self.shape}")
        return CudaBuffer(self.ptr, shape, self.dtype)

    def slice(self, begin: int, end: int) -> CudaBuffer:
        if not 0 <= begin <= end <= self.shape[0]:
            raise InvariantError(f"rows [{begin}, {end}) of a buffer {self.shape}")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        return CudaBuffer(self.ptr + begin * row, (end - begin, *self.shape[1:]), self.dtype)

    def __repr__(self) -> str:
        return f"CudaBuffer({self.dtype}, {self.shape}, {self.ptr:#x})"

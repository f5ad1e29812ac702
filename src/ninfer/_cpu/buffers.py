"""Device memory that is host memory."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.device import ITEM_BYTES, Shape
from ninfer.errors import InvariantError

DTYPES = {
    "u8": np.uint8, "i8": np.int8, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u32": np.uint32,
    "f32": np.float32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip


_HUGE = 32 << 20
"""Bytes of an arena from which large pages are asked for."""


class CpuBuffer:
    """A C-ordered NumPy array and its address."""

    __slots__ = ("address", "array", "dtype")

    def __init__(self, array: npt.NDArray[Any], dtype: str) -> None:
        self.array = array
        self.dtype = dtype
        self.address: int = array.ctypes.data

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def head(self, *shape: int) -> CpuBuffer:
        size = int(np.prod(shape, dtype=np.int64))
        if size > self.array.size:
            raise InvariantError(f"a view {shape} of a buffer {self.shape}")
        return CpuBuffer(self.array.reshape(-1)[:size].reshape(shape), self.dtype)

    def slice(self, begin: int, end: int) -> CpuBuffer:
        if not 0 <= begin <= end <= self.array.shape[0]:
            raise InvariantError(f"rows [{begin}, {end}) of a buffer {self.shape}")
        return CpuBuffer(self.array[begin:end], self.dtype)

    def __repr__(self) -> str:
        return f"CpuBuffer({self.dtype}, {self.shape})"


class CpuArena:
    """Anonymous memory that goes back to the system on ``close``, whoever still holds a buffer of it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def buffer(self, offset: int, shape: Shape, dtype: str) -> CpuBuffer:
        nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
        if offset % 256 or offset < 0 or offset + nbytes > self.nbytes:
            raise InvariantError(f"{dtype} {shape} at {offset} of an arena of {self.nbytes} bytes")
        return CpuBuffer(self._bytes[offset : offset + nbytes].view(DTYPES[dtype]).reshape(shape), dtype)

    def close(self) -> None:
        if self.nbytes:
            self._map.madvise(mmap.MADV_DONTNEED)
            self.nbytes = 0

"""Weights on their way to the device: mapped file -> pinned memory -> device, every stage busy at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer._cuda import driver
from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.streams import NON_BLOCKING, ON_DEVICE, TO_DEVICE, CudaEvent
from ninfer.errors import InvariantError

SLAB, OWN = 64 << 20, 8 << 20
"""Bytes of an allocation that objects share, and from which on they have one of their own: memory comes in steps of
2 MiB, so little is lost either way."""

TABLES = 8 << 20
"""Bytes taken at the start for tables, which are made when all other memory has been planned: those of a model with 512
experts in each of 60 layers are 6 MB."""

CHUNK = 16 << 20
DEPTH = 4
"""Bytes of a pinned chunk, and how many there are: while the device reads some, the host fills another."""

COPIERS = 4
"""Threads that fill a chunk. One alone is held up by page faults of the mapped file."""

_ALIGN = 256


class Residency:
    """Read-only bytes made resident, packed into slabs.

    Copies go over a stream of their own, so bytes can also be added while the device's stream records. ``device`` gives
    memory, pinned arrays and events.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._slab = 0
        self._used = SLAB
        self._tables, self._tabled = int(device.allocate(TABLES)), 0
        self.stream = driver.call("streamCreateWithFlags", NON_BLOCKING)
        self._chunks: list[tuple[npt.NDArray[np.uint8], CudaEvent]] = []
        self._next = 0
        self._pool: ThreadPoolExecutor | None = None

    def add(self, data: npt.NDArray[np.uint8], *, table: bool = False) -> CudaBuffer:
        """Copy contiguous bytes [n] to the device; returns once the host has read them. A ``table`` goes into TABLES,
        while they hold it, and takes no more memory. Raises OutOfDeviceMemory."""
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvariantError("weights are contiguous bytes")
        if table and self._tabled + data.nbytes <= TABLES:
            ptr = self._tables + self._tabled
            self._tabled += -(-data.nbytes // _ALIGN) * _ALIGN
        else:
            ptr = self._place(data.nbytes)
        for begin in range(0, data.nbytes, CHUNK):
            self._send(ptr + begin, data[begin : begin + CHUNK])
        return CudaBuffer(ptr, (data.nbytes,), "u8")

    def copy(self, source: CudaBuffer) -> CudaBuffer:
        """Bytes that are resident, a second time. Raises OutOfDeviceMemory."""
        ptr = self._place(source.nbytes)
        driver.call("memcpyAsync", ptr, source.ptr, source.nbytes, ON_DEVICE, self.stream)
        return CudaBuffer(ptr, source.shape, source.dtype)

    def close(self) -> None:
        """End the threads and the stream. The memory is the device's."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        driver.call("streamDestroy", self.stream)

    def _place(self, nbytes: int) -> int:
        if nbytes >= OWN:
            return int(self._device.allocate(nbytes))
        if self._used + nbytes > SLAB:
            self._slab, self._used = int(self._device.allocate(SLAB)), 0
        ptr = self._slab + self._used
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return ptr

    def _send(self, ptr: int, data: npt.NDArray[np.uint8]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(COPIERS, "ninfer-load")
            self._chunks = [
                (self._device.host((CHUNK,), "u8"), CudaEvent(self._device, self.stream)) for _ in range(DEPTH)
            ]
        pinned, read = self._chunks[self._next]
        self._next = (self._next + 1) % DEPTH
        read.wait()
        step = max(1 << 20, -(-data.nbytes // COPIERS))
        parts = [slice(at, min(at + step, data.nbytes)) for at in range(0, data.nbytes, step)]
        if len(parts) == 1:
            pinned[parts[0]] = data
        else:
            list(self._pool.map(lambda part: np.copyto(pinned[part], data[part]), parts))
        driver.call("memcpyAsync", ptr, pinned.ctypes.data, data.nbytes, TO_DEVICE, self.stream)
        read.record()

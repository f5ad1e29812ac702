"""Starting kernels on a stream, in or outside a capture.

Arguments become eight-byte slots that the driver reads as far as each parameter is wide: an int fits any integer
parameter, a buffer is its address, a float is a C ``float`` (``numpy.float64`` is a ``double``), bytes are a structure
passed by value.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from ninfer._cuda import driver
from ninfer._cuda.buffers import CudaBuffer

MAX_ARGUMENTS = 64

Dim = int | tuple[int, ...]


class Packer:
    """Argument slots that are reused from launch to launch; the driver copies them before a launch returns."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * MAX_ARGUMENTS)()
        base = ctypes.addressof(self._words)
        self._floats = (ctypes.c_float * (2 * MAX_ARGUMENTS)).from_buffer(self._words)
        self._doubles = (ctypes.c_double * MAX_ARGUMENTS).from_buffer(self._words)
        self._slots = [base + 8 * i for i in range(MAX_ARGUMENTS)]
        self._pointers = (ctypes.c_void_p * MAX_ARGUMENTS)(*self._slots)
        self.address = ctypes.addressof(self._pointers)

    def pack(self, args: tuple[Any, ...]) -> list[Any]:
        """Fill the slots of ``args``; what is returned must live until the launch has been submitted."""
        words, keep = self._words, []
        if len(args) > MAX_ARGUMENTS:
            raise TypeError(f"{len(args)} arguments, at most {MAX_ARGUMENTS} fit")
        for i, value in enumerate(args):
            if isinstance(value, CudaBuffer):
                words[i] = value.ptr
            elif isinstance(value, int):
                words[i] = value
            elif isinstance(value, np.float64):
                self._doubles[i] = float(value)
            elif isinstance(value, float | np.float32):
                self._floats[2 * i] = float(value)
            elif isinstance(value, bytes):
                structure = ctypes.create_string_buffer(value, len(value))
                self._pointers[i] = ctypes.addressof(structure)
                keep.append((i, structure))
            elif isinstance(value, np.integer):
                words[i] = int(value)
            else:
                raise TypeError(f"argument {i}: {type(value).__name__} cannot be passed to a kernel")
        return keep

    def release(self, keep: list[Any]) -> None:
        """Point the slots of structures at their words again."""
        for i, _ in keep:
            self._pointers[i] = self._slots[i]


class Launcher:
    """Launches on one stream of the current context. ``dependent`` lets a kernel start while its predecessor ends: it
    must wait (``griddepcontrol.wait``) before it reads what that one writes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._packer = Packer()
        self._lock = threading.Lock()
        self._driver = driver.bindings()
        self._ok = self._driver.CUresult.CUDA_SUCCESS
        self._attribute = self._driver.CUlaunchAttribute()
        kinds = self._driver.CUlaunchAttributeID
        self._attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._attribute.value.programmaticStreamSerializationAllowed = 1

    def __call__(
        self, function: Any, grid: Dim, block: Dim, *args: Any, shared: int = 0, dependent: bool = False
    ) -> None:
        """Submit ``function`` over ``grid`` blocks of ``block`` threads with ``shared`` bytes of dynamic memory."""
        gx, gy, gz = _dims(grid)
        bx, by, bz = _dims(block)
        if not gx * gy * gz:
            return
        with self._lock:
            keep = self._packer.pack(args)
            try:
                if dependent:
                    config = self._driver.CUlaunchConfig()
                    config.gridDimX, config.gridDimY, config.gridDimZ = gx, gy, gz
                    config.blockDimX, config.blockDimY, config.blockDimZ = bx, by, bz
                    config.sharedMemBytes, config.hStream = shared, self._stream
                    config.attrs, config.numAttrs = [self._attribute], 1
                    (status,) = self._driver.cuLaunchKernelEx(config, function, self._packer.address, 0)
                else:
                    (status,) = self._driver.cuLaunchKernel(
                        function, gx, gy, gz, bx, by, bz, shared, self._stream, self._packer.address, 0
                    )
            finally:
                self._packer.release(keep)
        if status != self._ok:
            driver.fail("cuLaunchKernel", status)


def _dims(value: Dim) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, 1, 1
    x, y, z = (*value, 1, 1)[:3]
    return x, y, z

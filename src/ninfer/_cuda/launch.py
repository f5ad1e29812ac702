"""Kernels: loaded from machine code, and started on a stream, in or outside a capture.

Arguments become eight-byte slots that the driver reads as far as each parameter is wide: an int fits any integer
parameter, a buffer is its address, a float is a C ``float`` (``numpy.float64`` is a ``double``), bytes are a structure
passed by value.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
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


class Module:
    """A cubin, loaded when the first of its kernels is asked for; CuPy keeps it as long as the process. ``again`` makes
    its file where it is gone by then."""

    def __init__(self, path: Path, again: Callable[[], Path]) -> None:
        self._path, self._again = path, again
        self._module: Any = None
        self._kernels: dict[str, Any] = {}
        self._pointers: dict[str, int] = {}
        self._shared: dict[str, int] = {}

    def function(self, symbol: str, shared: int = 0) -> int:
        """The kernel ``symbol`` (extern "C"), allowed at least ``shared`` bytes of dynamic shared memory a block."""
        if self._module is None:
            path = self._path if self._path.exists() else self._again()
            self._module = driver.cupy().RawModule(path=str(path))
        if symbol not in self._pointers:
            kernel = self._kernels[symbol] = self._module.get_function(symbol)
            # one split of a multiprocessor's memory for all, or it drains between two kernels to change it
            driver.checked(symbol, setattr, kernel, "preferred_shared_memory_carveout", 100)
            self._pointers[symbol] = driver.checked(symbol, lambda: kernel.kernel.ptr)
        if shared > self._shared.get(symbol, 48 << 10):  # one limit a kernel: what was allowed once stays allowed
            driver.checked(symbol, setattr, self._kernels[symbol], "max_dynamic_shared_size_bytes", shared)
            self._shared[symbol] = shared
        return self._pointers[symbol]


class Launcher:
    """Launches on one stream of the current GPU. CuPy's own launches cannot be ``dependent``: a dependent kernel may
    start while its predecessor ends, and must wait (``griddepcontrol.wait``) before it reads what that one writes."""

    def __init__(self, stream: int) -> None:
        self._packer = Packer()
        self._lock = threading.Lock()
        self._driver = driver.bindings()
        kinds = self._driver.CUlaunchAttributeID
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._plain, self._dependent = self._driver.CUlaunchConfig(), self._driver.CUlaunchConfig()
        self._plain.hStream = self._dependent.hStream = self._driver.CUstream(stream)
        self._dependent.attrs, self._dependent.numAttrs = [attribute], 1

    def __call__(
        self, function: int, grid: Dim, block: Dim, *args: Any, shared: int = 0, dependent: bool = False
    ) -> None:
        """Submit ``function`` over ``grid`` blocks of ``block`` threads with ``shared`` bytes of dynamic memory."""
        gx, gy, gz = _dims(grid)
        bx, by, bz = _dims(block)
        if not gx * gy * gz:
            return
        with self._lock:
            config = self._dependent if dependent else self._plain
            config.gridDimX, config.gridDimY, config.gridDimZ = gx, gy, gz
            config.blockDimX, config.blockDimY, config.blockDimZ = bx, by, bz
            config.sharedMemBytes = shared
            keep = self._packer.pack(args)
            try:
                (status,) = self._driver.cuLaunchKernelEx(config, function, self._packer.address, 0)
            finally:
                self._packer.release(keep)
        if status:
            raise driver.failure("cuLaunchKernelEx", int(status), status.name)


def _dims(value: Dim) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, 1, 1
    x, y, z = (*value, 1, 1)[:3]
    return x, y, z

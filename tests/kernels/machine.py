"""A device whose memory is the host's and whose kernels are emulated: what CudaOps needs, no more."""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.compile import KERNELS
from ninfer.artifact.formats import bf16_to_f32, f32_to_bf16
from ninfer.device import ITEM_BYTES, DeviceMemory

HERE = Path(__file__).parent / "emulator"
DTYPES = {
    "u8": np.uint8, "i8": np.int8, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u32": np.uint32,
    "f32": np.float32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip
PAGE = mmap.PAGESIZE
SEEN = 4 << 20
"""Bytes of an arena, at most, whose past is kept: what operations work in is larger, and nobody's to read early."""


class _Memory:
    """Zeros that end where a page without access begins."""

    def __init__(self, nbytes: int) -> None:
        room = -(-nbytes // 16) * 16
        size = -(-max(room, 1) // PAGE) * PAGE
        self._map = mmap.mmap(-1, size + PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if _libc.mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(PAGE), 0):
            raise OSError("mprotect")
        self.ptr = base + size - room


_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = _Memory(nbytes)

    def buffer(self, offset: int, shape: tuple[int, ...], dtype: str) -> CudaBuffer:
        assert offset + math.prod(shape) * ITEM_BYTES[dtype] <= self.nbytes
        return CudaBuffer(self.memory.ptr + offset, shape, dtype)

    def close(self) -> None:
        pass


def _differences(old: bytes, new: bytes) -> list[tuple[int, int]]:
    """Runs of 16 bytes that are not the same."""
    differ = (np.frombuffer(old, np.uint64) != np.frombuffer(new, np.uint64)).reshape(-1, 2).any(1)
    edges = np.flatnonzero(np.diff(np.r_[False, differ, False].astype(np.int8)))
    return [(16 * int(a), 16 * int(b)) for a, b in edges.reshape(-1, 2)]


class Event:
    def record(self) -> None: ...

    def done(self) -> bool:
        return True

    def wait(self) -> None: ...


def gemm(c: int, c_stride: int, c_type: str, a: int, b: int, m: int, n: int, k: int, add: bool) -> None:
    """c [n, m] (+)= b [n, k] a[m, k]^T over bf16, like ``ninfer._cuda.blas.Blas``."""

    def array(ptr: int, shape: tuple[int, ...], dtype: Any) -> Any:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(ptr), dtype).reshape(shape)

    left, right = (bf16_to_f32(array(p, (rows, k), np.uint16)).astype(np.float64) for p, rows in ((b, n), (a, m)))
    sums = left @ right.T
    kind = np.uint16 if c_type == "bf16" else np.float32
    for row in range(n):
        out = array(c + row * c_stride * np.dtype(kind).itemsize, (m,), kind)
        total = sums[row] + ((bf16_to_f32(out) if c_type == "bf16" else out) if add else 0)
        out[:] = f32_to_bf16(total.astype(np.float32)) if c_type == "bf16" else total


class EmulatedDevice:
    """``order`` 1 runs threads and blocks from the last to the first. So many blocks run ``together``, by turns where
    they wait for each other. Processes may compile in one ``folder``.

    ``overlaps``: every kernel starts as early as it may, which is when the last product has let it in: what it reads
    before it waits for the kernels before it is from before that product.
    """

    kind = "cuda"
    name = "emulated"
    activation = "bf16"
    multiprocessors = 3
    pairs = 1000

    def __init__(self, folder: Path) -> None:
        from ninfer._cuda.ops import CudaOps

        self.folder = folder
        self.order = 0
        self.together = 1
        self.shared_limit = 227 << 10
        self.overlaps = False
        self.launches: list[str] = []
        self.entered = 0
        self._past: list[bytes] | None = None  # of the arenas, or all that came before has ended
        self._modules: dict[str, Any] = {}
        self._memory: list[_Memory] = []
        self._arenas: list[Arena] = []
        self.ops: Any = CudaOps(self, self._gemm)

    def close(self) -> None:
        self._memory.clear()

    # -- Device

    def arena(self, nbytes: int) -> Arena:
        self.entered += 1
        arena = Arena(nbytes)
        self._memory.append(arena.memory)
        self._arenas.append(arena)
        self._past = None
        return arena

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1 << 40, 1 << 40)

    def host(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, DTYPES[dtype])

    def weights(self, data: Any) -> CudaBuffer:
        memory = _Memory(data.nbytes)
        self._memory.append(memory)
        buffer = CudaBuffer(memory.ptr, data.shape, "u8")
        self.upload(buffer, data)
        return buffer

    def upload(self, dst: CudaBuffer, src: Any) -> None:
        self.entered += 1
        self._past = None
        assert src.nbytes == dst.nbytes
        assert src.flags.c_contiguous
        ctypes.memmove(dst.ptr, src.ctypes.data, dst.nbytes)

    def download(self, dst: Any, src: CudaBuffer) -> None:
        self.entered += 1
        assert dst.nbytes == src.nbytes
        assert dst.flags.c_contiguous
        ctypes.memmove(dst.ctypes.data, src.ptr, src.nbytes)

    def zero(self, dst: CudaBuffer) -> None:
        self.entered += 1
        self._past = None
        ctypes.memset(dst.ptr, 0, dst.nbytes)

    def event(self) -> Event:
        return Event()

    # -- what CudaOps asks for

    def table(self, words: list[int]) -> CudaBuffer:
        return self.weights(np.array(words, np.int64).view(np.uint8))

    def function(self, module: str, symbol: str, shared: int = 0) -> Any:
        assert shared <= self.shared_limit
        if not (KERNELS / f"{module}.cu").exists():
            return None  # a Numba kernel; those run in the CUDA simulator
        library = self._modules.get(module)
        if library is None:
            library = self._modules[module] = self._compile(module)
        return library, symbol

    def launch(
        self, function: Any, grid: Any, block: int, *args: Any, shared: int = 0, dependent: bool = False
    ) -> None:
        self.entered += 1
        library, symbol = function
        self.launches.append(symbol)
        (packed,) = args
        dims = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        assert block % 32 == 0
        together = max(self.together, 2 if hasattr(library, f"{symbol}_of_pairs") else 1)
        before = self._go_back(library, symbol) if self.overlaps else None
        library.emulator_launch.restype = ctypes.c_char_p
        error = library.emulator_launch(
            ctypes.cast(getattr(library, symbol), ctypes.c_void_p), (ctypes.c_int * 3)(*dims), block, shared, packed,
            self.order, together,
        )  # fmt: skip
        assert error is None, f"{symbol}: {error.decode()}"
        if before is not None:
            library.emulator_past(0, None, None, None)
            self._past = before

    def _go_back(self, library: ctypes.CDLL, symbol: str) -> list[bytes]:
        """Show the next launch the past, where it was another; the past of the launches after it."""
        spans = [(arena.memory.ptr, min(arena.nbytes, SEEN) // 16 * 16) for arena in self._arenas]
        now = [ctypes.string_at(*span) for span in spans]
        past = self._past = self._past or now
        regions = [
            (ptr + first, old[first:end], end - first)
            for (ptr, _), old, new in zip(spans, past, now)
            if old is not new and old != new
            for first, end in _differences(old, new)
        ]
        at, olds, sizes = zip(*regions) if regions else ((), (), ())
        n = len(regions)
        self._kept = (ctypes.c_void_p * n)(*at), (ctypes.c_char_p * n)(*olds), (ctypes.c_long * n)(*sizes)
        library.emulator_past(n, *self._kept)
        return now if symbol.startswith(("stream", "wide")) else past

    def _gemm(self, *arguments: Any) -> None:
        self.entered += 1
        gemm(*arguments)
        self._past = None  # not ours, and so not early

    def _compile(self, module: str) -> ctypes.CDLL:
        self.folder.mkdir(exist_ok=True)
        library = self.folder / f"{module}.so"
        with open(self.folder / f"{module}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                self._build(module, library)
        return ctypes.CDLL(str(library))

    def _build(self, module: str, library: Path) -> None:
        source, made = self.folder / f"{module}.source", library.with_suffix(".made")
        shutil.copytree(KERNELS, source, dirs_exist_ok=True)
        shutil.copytree(HERE, source, dirs_exist_ok=True)  # its ptx.cuh replaces the kernels' own
        unit = source / f"{module}.cpp"
        unit.write_text(f'#include "emulator.cpp"\n#include "{module}.cu"\n')
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{source}", "-o", str(made), str(unit)]
        subprocess.run(["g++", *flags], check=True)
        os.replace(made, library)

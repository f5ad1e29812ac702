"""A CUDA GPU as a device: one stream for its work, memory by address, recordings as CUDA Graphs."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ninfer._cuda import compile as compiler
from ninfer._cuda import driver
from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.launch import Dim, Launcher, Module
from ninfer._cuda.products import pack
from ninfer._cuda.residency import Residency
from ninfer._cuda.streams import (
    DISABLE_TIMING,
    HOST_DTYPES,
    NON_BLOCKING,
    ON_DEVICE,
    TO_DEVICE,
    TO_HOST,
    CudaCopies,
    CudaEvent,
    CudaGraph,
    copy,
)
from ninfer.device import ITEM_BYTES, Buffer, DeviceMemory, Shape
from ninfer.errors import DeviceError, InvariantError, OutOfDeviceMemory
from ninfer.ops import Ops

_ROW_BLOCKS = 8
"""Blocks that copy a row of one plane."""

_RELAXED = 2
"""Capture mode: what an Op prepares when it is first used may allocate and copy, on another stream."""


class CudaArena:
    """One device allocation."""

    def __init__(self, device: CudaDevice, ptr: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.ptr = ptr
        self._device = device

    def buffer(self, offset: int, shape: Shape, dtype: str) -> CudaBuffer:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if offset % 256 or offset < 0 or offset + nbytes > self.nbytes:
            raise InvariantError(f"{dtype} {shape} at {offset} of an arena of {self.nbytes} bytes")
        return CudaBuffer(self.ptr + offset, shape, dtype)

    def close(self) -> None:
        """Return the memory once submitted work has finished. Idempotent."""
        if self.ptr:
            ptr, self.ptr, self.nbytes = self.ptr, 0, 0
            self._device.free(ptr)


class CudaDevice:
    """GPU number ``index`` of those visible to the process.

    Any thread may use a device, one at a time. Raises DeviceError, saying what is missing or too old, where there is no
    GPU, driver or CUDA package that serves. ``progress(done, total, name)`` follows the compilation of kernels that the
    machine's cache does not have.
    """

    kind = "cuda"
    activation = "bf16"
    asynchronous = True
    recording_bytes = 8 << 20  # some 12 KiB a launch were measured, up to 800 launches a pass
    ops: Ops

    def __init__(self, index: int = 0, progress: compiler.Progress | None = None) -> None:
        from ninfer._cuda.ops import CudaOps

        count = driver.check_machine(compiler.compiler_major)
        if not 0 <= index < count:
            raise DeviceError(f"cuda:{index}: {count} GPU{'s' if count != 1 else ''} visible to this process")
        facts = driver.call("getDeviceProperties", index)
        name = facts["name"].decode()
        self.capability = (facts["major"], facts["minor"])
        driver.check_capability(name, self.capability)
        self.name = f"cuda:{index} ({name})"
        self.arch = compiler.architecture(self.capability)
        self.multiprocessors: int = facts["multiProcessorCount"]
        self.pairs = self.multiprocessors // 2 if self.capability >= (9, 0) else 0
        """Pairs of blocks that reach each other's shared memory, as many as find a multiprocessor for each block."""
        self.shared_limit: int = facts["sharedMemPerBlockOptin"]
        self.asked: Counter[str] = Counter()
        """How often each kernel was asked for, by module and symbol."""
        self.entered = 0
        """How often anything was asked of the device: whatever is submitted or recorded enters it first."""
        self._index = index
        self._allocations: dict[int, int] = {}
        self._pinned: list[int] = []
        self._graphs: set[CudaGraph] = set()
        self._events: list[int] = []
        self._copies: CudaCopies | None = None
        self._row_tables: dict[tuple[tuple[int, int, int], ...], CudaBuffer] = {}
        self._capturing = self._closed = False
        sources = kernel_sources()
        cubins = compiler.compile_all(sources, self.arch, progress)
        with ExitStack() as opened:  # closed from the last to the first: graphs go before the memory they name
            self.enter()
            self.stream: int = driver.call("streamCreateWithFlags", NON_BLOCKING)
            opened.callback(driver.call, "streamDestroy", self.stream)
            opened.callback(self._free_all)
            self._launcher = Launcher(self.stream)
            self._modules = {
                source.name: Module(path, partial(compiler.cubin, source, self.arch))
                for source, path in zip(sources, cubins, strict=True)
            }
            self._residency = Residency(self)
            opened.callback(self._residency.close)
            self._loaded = CudaEvent(self, self._residency.stream)
            ops = CudaOps(self)
            self.ops = cast(Ops, ops)
            opened.callback(ops.close)
            opened.callback(self._close_streams)
            opened.callback(driver.call, "streamSynchronize", self.stream)
            self._opened = opened.pop_all()

    # -- memory

    def memory(self) -> DeviceMemory:
        self.enter()
        free, total = driver.call("memGetInfo")
        return DeviceMemory(int(total), int(free))

    def taken(self) -> Mapping[str, int]:
        return {"weights": sum(self._allocations.values())}

    def read_bandwidth(self) -> float:
        """Bytes a second of a large read, the best of several."""
        blocks, rounds, tile = 2 * self.multiprocessors, 4, 512 * 8 * 16
        size = min(1 << 30, self.memory().free // 2) // tile * tile
        arena = self.arena(size + 4 * blocks * 512)
        try:
            words = pack(arena.ptr + size, arena.ptr, size // tile, rounds)
            sweep = self.function("sweep", "sweep")
            return rounds * size / min(self.seconds(lambda: self.launch(sweep, blocks, 512, words)) for _ in range(5))
        finally:
            arena.close()

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that the device spends on what ``work`` submits; waits for it."""
        self.enter()
        marks = [driver.call("eventCreate") for _ in range(2)]
        try:
            driver.call("eventRecord", marks[0], self.stream)
            work()
            driver.call("eventRecord", marks[1], self.stream)
            driver.call("eventSynchronize", marks[1])
            return 1e-3 * float(driver.call("eventElapsedTime", *marks))
        finally:
            for mark in marks:
                driver.call("eventDestroy", mark)

    def arena(self, nbytes: int) -> CudaArena:
        ptr = self.allocate(nbytes)
        driver.call("memsetAsync", ptr, 0, nbytes, self.stream)
        return CudaArena(self, ptr, nbytes)

    def host(self, shape: Shape, dtype: str) -> npt.NDArray[Any]:
        self.enter()
        count, word = math.prod(shape), ITEM_BYTES[dtype]
        ptr = int(driver.call("hostAlloc", max(1, count * word), 0))
        self._pinned.append(ptr)
        ctypes.memset(ptr, 0, count * word)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (count * word)).from_address(ptr))
        return memory.view(HOST_DTYPES[dtype]).reshape(shape)

    def weights(self, data: npt.NDArray[np.uint8]) -> CudaBuffer:
        return self._resident(lambda: self._residency.add(data))

    def duplicate(self, weights: Buffer) -> CudaBuffer:
        return self._resident(lambda: self._residency.copy(cast(CudaBuffer, weights)))

    def table(self, words: Sequence[int]) -> CudaBuffer:
        """Addresses and other 64-bit words as i64 [n], resident as long as the device. Also while work is recorded."""
        self.enter()
        data = np.array(words, np.int64)
        buffer = self._residency.add(data.view(np.uint8), table=True)
        driver.call("streamSynchronize", self._residency.stream)
        return CudaBuffer(buffer.ptr, data.shape, "i64")

    def _resident(self, load: Callable[[], CudaBuffer]) -> CudaBuffer:
        """What ``load`` gives, for work that is submitted from now on."""
        self.enter()
        buffer = load()
        self._loaded.record()
        self._loaded.hold(self.stream)
        return buffer

    # -- copies

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None:
        copy(self, dst, src, TO_DEVICE, self.stream)

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None:
        copy(self, src, dst, TO_HOST, self.stream)

    def copy(self, dst: Buffer, src: Buffer) -> None:
        if dst.nbytes != src.nbytes:
            raise InvariantError(f"copy of {src.nbytes} bytes into {dst.nbytes}")
        self.enter()
        driver.call("memcpyAsync", _ptr(dst), _ptr(src), dst.nbytes, ON_DEVICE, self.stream)

    def copy_rows(self, planes: Sequence[Buffer], source: int, target: int) -> None:
        buffers = cast(Sequence[CudaBuffer], planes)
        table = self._rows_of(buffers)
        if not all(0 <= row < buffer.shape[0] for row in (source, target) for buffer in buffers):
            raise InvariantError(f"rows {source} and {target} of {[buffer.shape for buffer in buffers]}")
        copy_rows = self.function("copy_rows", "copy_rows")
        self.launch(copy_rows, (_ROW_BLOCKS, len(buffers)), 256, buffers[0], table, source, target)

    def zero(self, dst: Buffer) -> None:
        self.enter()
        driver.call("memsetAsync", _ptr(dst), 0, dst.nbytes, self.stream)

    # -- work

    def event(self) -> CudaEvent:
        return CudaEvent(self, self.stream)

    def copies(self) -> CudaCopies:
        """The device's second stream, for copies; made when first asked for."""
        if self._copies is None:
            self.enter()
            self._copies = CudaCopies(self)
        return self._copies

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        if self._capturing:
            raise InvariantError("a recording inside a recording")
        self.enter()
        driver.call("streamBeginCapture", self.stream, _RELAXED)
        self._capturing = True
        try:
            work()
        except BaseException:
            with suppress(DeviceError):  # what the work raised says more than a broken capture
                driver.call("graphDestroy", driver.call("streamEndCapture", self.stream))
            raise
        finally:
            self._capturing = False
            self.entered += 1  # nothing of it has run
        recorded = driver.call("streamEndCapture", self.stream)
        try:
            graph = CudaGraph(self, recorded)
        finally:
            driver.call("graphDestroy", recorded)
        self._graphs.add(graph)
        return graph

    def function(self, module: str, symbol: str, shared: int = 0) -> Any:
        """A kernel of ``kernels/<module>.cu`` or of a Numba module, for ``launch``; see ``launch.Module``."""
        self.enter()
        self.asked[f"{module}.{symbol}"] += 1
        return self._modules[module].function(symbol, shared)

    def launch(
        self, function: Any, grid: Dim, block: Dim, *args: Any, shared: int = 0, dependent: bool = False
    ) -> None:
        """Submit a kernel, or record it; see ``launch.Launcher``."""
        self.enter()
        self._launcher(function, grid, block, *args, shared=shared, dependent=dependent)

    def enter(self) -> None:
        """Make this GPU the calling thread's."""
        if self._closed:
            raise DeviceError(f"{self.name} is closed")
        driver.call("setDevice", self._index)
        self.entered += 1

    # -- for arenas, weights, events and graphs

    def new_event(self) -> int:
        """A CUDA event that lives as long as the device."""
        self.enter()
        event: int = driver.call("eventCreateWithFlags", DISABLE_TIMING)
        self._events.append(event)
        return event

    def allocate(self, nbytes: int) -> int:
        """Address of device memory that lives until ``free`` or as long as the device. Raises OutOfDeviceMemory."""
        self.enter()
        try:
            ptr = int(driver.call("malloc", max(nbytes, 1)))
        except OutOfDeviceMemory as error:
            free = self.memory().free
            raise OutOfDeviceMemory(f"{nbytes} bytes needed, {free} free on {self.name}", free=free) from error
        self._allocations[ptr] = nbytes
        return ptr

    def free(self, ptr: int) -> None:
        """Free an arena's memory; nothing once the device is closed, which frees it all."""
        if ptr in self._allocations:
            self.enter()
            del self._allocations[ptr]
            driver.call("free", ptr)

    def forget(self, graph: CudaGraph) -> None:
        """A graph that was closed."""
        self._graphs.discard(graph)

    # -- end

    def close(self) -> None:
        if not self._closed:
            with suppress(DeviceError):
                self.enter()
            with suppress(DeviceError):  # after a fault every call fails; whoever waited for the work was told
                self._opened.close()
            self._closed = True

    def _rows_of(self, planes: Sequence[CudaBuffer]) -> CudaBuffer:
        """Where the rows of planes are, for ``copy_rows``; made when these planes are first copied in."""
        key = tuple([(plane.ptr, plane.nbytes, plane.shape[0]) for plane in planes])
        table = self._row_tables.get(key)
        if table is None:
            words: list[int] = []
            for plane in planes:
                row = plane.nbytes // plane.shape[0]
                offset = plane.ptr - planes[0].ptr
                if row % 8 or offset % 8:
                    raise InvariantError(f"rows of {row} bytes of {plane}")
                words += [offset // 8, row // 8]
            table = self._row_tables[key] = self.table(words)
        return table

    def _close_streams(self) -> None:
        for graph in list(self._graphs):
            graph.close()
        if self._copies is not None:
            driver.call("streamSynchronize", self._copies.stream)
            self._copies.close()

    def _free_all(self) -> None:
        for event in self._events:
            driver.call("eventDestroy", event)
        for ptr in self._allocations:
            driver.call("free", ptr)
        for ptr in self._pinned:
            driver.call("freeHost", ptr)
        self._allocations.clear()


def kernel_sources() -> list[compiler.Source]:
    """Everything that a device compiles at start."""
    from ninfer._cuda import numba_kernels

    return [*map(compiler.cuda_source, compiler.kernel_names()), *numba_kernels.sources()]


def _ptr(buffer: Buffer) -> int:
    return cast(CudaBuffer, buffer).ptr

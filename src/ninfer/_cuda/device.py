"""A CUDA GPU as a device: one stream of the GPU's primary context, memory by address, recordings as CUDA Graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ninfer._cuda import compile as compiler
from ninfer._cuda import driver
from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.copies import CudaCopies
from ninfer._cuda.launch import Dim, Launcher
from ninfer._cuda.residency import Residency
from ninfer.contract import ITEM_BYTES, Buffer, DeviceMemory, Shape
from ninfer.errors import DeviceError, InvariantError, OutOfDeviceMemory
from ninfer.ops import Ops

HOST_DTYPES = {
    "u8": np.uint8, "i8": np.int8, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u32": np.uint32,
    "f32": np.float32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip


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


class CudaEvent:
    """A point in a stream."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._event = device.new_event()

    def record(self) -> None:
        self._device.enter()
        driver.call("cuEventRecord", self._event, self._stream)

    def done(self) -> bool:
        self._device.enter()
        statuses = driver.bindings().CUresult
        status = driver.bindings().cuEventQuery(self._event)[0]
        if status not in (statuses.CUDA_SUCCESS, statuses.CUDA_ERROR_NOT_READY):
            driver.fail("cuEventQuery", status)
        return bool(status == statuses.CUDA_SUCCESS)

    def wait(self) -> None:
        self._device.enter()
        driver.call("cuEventSynchronize", self._event)


class CudaGraph:
    """A recording: one launch submits all of it."""

    def __init__(self, device: CudaDevice, executable: Any) -> None:
        self._device = device
        self._executable = executable

    def launch(self) -> None:
        if self._executable is None:
            raise InvariantError("a closed graph was launched")
        self._device.enter()
        driver.call("cuGraphLaunch", self._executable, self._device.stream)

    def close(self) -> None:
        executable, self._executable = self._executable, None
        if executable is not None:
            self._device.forget(self)
            driver.call("cuGraphExecDestroy", executable)


class CudaDevice:
    """GPU number ``index`` of those visible to the process.

    Any thread may use a device, one at a time. Raises DeviceError, saying what is missing or too old, where there is no
    GPU, driver or CUDA package that serves. ``progress(done, total, name)`` follows the compilation of kernels that the
    machine's cache does not have.
    """

    kind = "cuda"
    activation = "bf16"
    asynchronous = True
    ops: Ops

    def __init__(self, index: int = 0, progress: compiler.Progress | None = None) -> None:
        from ninfer._cuda.ops import CudaOps

        attributes = driver.bindings().CUdevice_attribute
        driver.check_driver(driver.driver_version(), compiler.compiler_major())
        count = driver.call("cuDeviceGetCount")
        if not 0 <= index < count:
            raise DeviceError(f"cuda:{index}: {count} GPU{'s' if count != 1 else ''} visible to this process")
        self._device = driver.call("cuDeviceGet", index)

        def attribute(name: str) -> int:
            return int(driver.call("cuDeviceGetAttribute", getattr(attributes, name), self._device))

        name = driver.call("cuDeviceGetName", 128, self._device).split(b"\0")[0].decode()
        self.capability = (
            attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
            attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        )
        driver.check_capability(name, self.capability)
        self.name = f"cuda:{index} ({name})"
        self.arch = compiler.architecture(self.capability)
        self.multiprocessors = attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
        self.shared_limit = attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._allocations: set[int] = set()
        self._pinned: list[int] = []
        self._graphs: set[CudaGraph] = set()
        self._events: list[Any] = []
        self._capturing = self._closed = False
        sources = kernel_sources()
        cubins = compiler.compile_all(sources, self.arch, progress)
        with ExitStack() as opened:  # closed from the last to the first: graphs go before the memory they name
            self._context = driver.call("cuDevicePrimaryCtxRetain", self._device)
            opened.callback(driver.call, "cuDevicePrimaryCtxRelease", self._device)
            self.enter()
            nonblocking = driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
            self.stream = driver.call("cuStreamCreate", nonblocking)
            opened.callback(driver.call, "cuStreamDestroy", self.stream)
            self._copy_stream = driver.call("cuStreamCreate", nonblocking)
            opened.callback(driver.call, "cuStreamDestroy", self._copy_stream)
            opened.callback(self._free_all)
            self._launcher = Launcher(self.stream)
            self._modules: dict[str, compiler.Module] = {}
            for source, code in zip(sources, cubins, strict=True):
                self._modules[source.name] = compiler.Module(code)
                opened.callback(self._modules[source.name].close)
            self._residency = Residency(self)
            opened.callback(self._residency.close)
            self._loaded = self.new_event()
            ops = CudaOps(self)
            self.ops = cast(Ops, ops)
            opened.callback(ops.close)
            opened.callback(self._close_graphs)
            opened.callback(driver.call, "cuCtxSynchronize")
            self._opened = opened.pop_all()

    # -- memory

    def memory(self) -> DeviceMemory:
        self.enter()
        free, total = driver.call("cuMemGetInfo")
        return DeviceMemory(int(total), int(free))

    def read_bandwidth(self) -> float:
        """Bytes a second of a large read, the best of several."""
        blocks, threads = 16 * self.multiprocessors, 256
        words = min(512 << 20, self.memory().free // 2) // 8 // (4 * blocks * threads) * (4 * blocks * threads)
        flags = driver.bindings().CUevent_flags.CU_EVENT_DEFAULT
        begin, end = (driver.call("cuEventCreate", flags) for _ in range(2))
        arena = self.arena(8 * words + 8 * blocks * threads)
        try:
            data, out = CudaBuffer(arena.ptr, (words,), "u64"), arena.ptr + 8 * words
            best = math.inf
            for _ in range(8):
                driver.call("cuEventRecord", begin, self.stream)
                self.launch(self.function("sweep", "sweep"), blocks, threads, out, data, words)
                driver.call("cuEventRecord", end, self.stream)
                driver.call("cuEventSynchronize", end)
                best = min(best, driver.call("cuEventElapsedTime", begin, end))
            return data.nbytes / (1e-3 * best)
        finally:
            arena.close()
            for event in (begin, end):
                driver.call("cuEventDestroy", event)

    def arena(self, nbytes: int) -> CudaArena:
        ptr = self.allocate(nbytes)
        driver.call("cuMemsetD8Async", ptr, 0, nbytes, self.stream)
        return CudaArena(self, ptr, nbytes)

    def host(self, shape: Shape, dtype: str) -> npt.NDArray[Any]:
        self.enter()
        count, word = math.prod(shape), ITEM_BYTES[dtype]
        ptr = int(driver.call("cuMemHostAlloc", max(1, count * word), 0))
        self._pinned.append(ptr)
        ctypes.memset(ptr, 0, count * word)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (count * word)).from_address(ptr))
        return memory.view(HOST_DTYPES[dtype]).reshape(shape)

    def weights(self, data: npt.NDArray[np.uint8]) -> CudaBuffer:
        self.enter()
        buffer = self._residency.add(data)
        driver.call("cuEventRecord", self._loaded, self._residency.stream)
        driver.call("cuStreamWaitEvent", self.stream, self._loaded, 0)
        return buffer

    def table(self, words: Sequence[int]) -> CudaBuffer:
        """Addresses and other 64-bit words as i64 [n], resident as long as the device. Also while work is recorded."""
        self.enter()
        data = np.array(words, np.int64)
        buffer = self._residency.add(data.view(np.uint8))
        driver.call("cuStreamSynchronize", self._residency.stream)
        return CudaBuffer(buffer.ptr, data.shape, "i64")

    # -- copies

    def upload(self, dst: Buffer, src: npt.NDArray[Any], stream: Any = None) -> None:
        """In the device's stream, or another."""
        self._copy_check(dst, src)
        driver.call("cuMemcpyHtoDAsync", _ptr(dst), src.ctypes.data, src.nbytes, stream or self.stream)

    def download(self, dst: npt.NDArray[Any], src: Buffer, stream: Any = None) -> None:
        """In the device's stream, or another."""
        self._copy_check(src, dst)
        driver.call("cuMemcpyDtoHAsync", dst.ctypes.data, _ptr(src), dst.nbytes, stream or self.stream)

    def copy(self, dst: Buffer, src: Buffer) -> None:
        if dst.nbytes != src.nbytes:
            raise InvariantError(f"copy of {src.nbytes} bytes into {dst.nbytes}")
        self.enter()
        driver.call("cuMemcpyDtoDAsync", _ptr(dst), _ptr(src), dst.nbytes, self.stream)

    def zero(self, dst: Buffer) -> None:
        self.enter()
        driver.call("cuMemsetD8Async", _ptr(dst), 0, dst.nbytes, self.stream)

    # -- work

    def event(self, stream: Any = None) -> CudaEvent:
        """A point in the device's stream, or another."""
        return CudaEvent(self, stream or self.stream)

    def copies(self) -> CudaCopies:
        return CudaCopies(self, self._copy_stream)

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        if self._capturing:
            raise InvariantError("a recording inside a recording")
        self.enter()
        # Relaxed: what an Op prepares when it is first used may allocate and copy, on another stream.
        mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        driver.call("cuStreamBeginCapture", self.stream, mode)
        self._capturing = True
        try:
            work()
        except BaseException:
            with suppress(DeviceError):  # what the work raised says more than a broken capture
                driver.call("cuGraphDestroy", driver.call("cuStreamEndCapture", self.stream))
            raise
        finally:
            self._capturing = False
        recorded = driver.call("cuStreamEndCapture", self.stream)
        try:
            executable = driver.call("cuGraphInstantiate", recorded, 0)
        finally:
            driver.call("cuGraphDestroy", recorded)
        driver.call("cuGraphUpload", executable, self.stream)
        graph = CudaGraph(self, executable)
        self._graphs.add(graph)
        return graph

    def function(self, module: str, symbol: str, shared: int = 0) -> Any:
        """A kernel of ``kernels/<module>.cu`` or of a Numba module, for ``launch``; see ``compile.Module.function``."""
        self.enter()
        return self._modules[module].function(symbol, shared)

    def launch(
        self, function: Any, grid: Dim, block: Dim, *args: Any, shared: int = 0, dependent: bool = False
    ) -> None:
        """Submit a kernel, or record it; see ``launch.Launcher``."""
        self.enter()
        self._launcher(function, grid, block, *args, shared=shared, dependent=dependent)

    def enter(self) -> None:
        """Make the GPU's context the calling thread's."""
        if self._closed:
            raise DeviceError(f"{self.name} is closed")
        driver.call("cuCtxSetCurrent", self._context)

    # -- for arenas, weights, events and graphs

    def new_event(self) -> Any:
        """A driver event that lives as long as the device."""
        self.enter()
        event = driver.call("cuEventCreate", driver.bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._events.append(event)
        return event

    def allocate(self, nbytes: int) -> int:
        """Address of device memory that lives until ``free`` or as long as the device. Raises OutOfDeviceMemory."""
        self.enter()
        try:
            ptr = int(driver.call("cuMemAlloc", max(nbytes, 1)))
        except OutOfDeviceMemory as error:
            free = self.memory().free
            raise OutOfDeviceMemory(f"{nbytes} bytes needed, {free} free on {self.name}", free=free) from error
        self._allocations.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        """Free an arena's memory; nothing once the device is closed, which frees it all."""
        if ptr in self._allocations:
            self.enter()
            self._allocations.discard(ptr)
            driver.call("cuMemFree", ptr)

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

    def _close_graphs(self) -> None:
        for graph in list(self._graphs):
            graph.close()

    def _free_all(self) -> None:
        for event in self._events:
            driver.call("cuEventDestroy", event)
        for ptr in self._allocations:
            driver.call("cuMemFree", ptr)
        for ptr in self._pinned:
            driver.call("cuMemFreeHost", ptr)
        self._allocations.clear()

    def _copy_check(self, buffer: Buffer, array: npt.NDArray[Any]) -> None:
        if not array.flags.c_contiguous or array.dtype != HOST_DTYPES[buffer.dtype] or array.nbytes != buffer.nbytes:
            raise InvariantError(f"host array {array.dtype} {array.shape} for a buffer {buffer.dtype} {buffer.shape}")
        self.enter()


def kernel_sources() -> list[compiler.Source]:
    """Everything that a device compiles at start."""
    from ninfer._cuda import numba_kernels

    return [*map(compiler.cuda_source, compiler.kernel_names()), *numba_kernels.sources()]


def _ptr(buffer: Buffer) -> int:
    return cast(CudaBuffer, buffer).ptr

"""A CUDA driver without a GPU: device memory is host memory, work happens when it or its graph is launched, and every
handle is accounted for. Any call can be made to fail."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


OK = CUresult.CUDA_SUCCESS
ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
}


class FakeDriver:
    """``live`` counts the handles of each kind; ``order`` lists what was destroyed; ``fail`` names calls to fail."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(**{name: name for name in ATTRIBUTES})
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_DEFAULT=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchConfig = SimpleNamespace

    def __init__(self, version: int = 13000, memory: int = 1 << 30) -> None:
        self.version, self.total, self.used = version, memory, 0
        self.attributes = dict(ATTRIBUTES)
        self.memory: dict[int, np.ndarray] = {}
        self.live: Counter[str] = Counter()
        self.order: list[str] = []
        self.fail: dict[str, CUresult] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.calls: Counter[str] = Counter()
        self._tape: list[Callable[[], None]] = []
        self._captured: Any = None
        self._made = 0

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu") or not callable(value):
            return value

        def call(*args: Any) -> Any:
            self.calls[name] += 1
            failure = self.fail.get(name, OK)
            return (failure, None) if failure else value(*args)

        return call

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:
        return SimpleNamespace(id=None, value=SimpleNamespace(programmaticStreamSerializationAllowed=0))

    def cuGetErrorString(self, status: CUresult) -> Any:
        return OK, status.name.lower().encode()

    # the machine
    def cuDriverGetVersion(self) -> Any:
        return OK, self.version

    def cuDeviceGetCount(self) -> Any:
        return OK, 1

    def cuDeviceGet(self, index: int) -> Any:
        return OK, index

    def cuDeviceGetAttribute(self, name: str, device: int) -> Any:
        return OK, self.attributes[name]

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, b"Fake GPU\0\0"

    def cuMemGetInfo(self) -> Any:
        return OK, self.total - self.used, self.total

    # contexts and handles
    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return self._make("context")

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        return self._drop("context")

    def cuCtxSetCurrent(self, context: Any) -> Any:
        return (OK,)

    def cuCtxSynchronize(self) -> Any:
        return (OK,)

    def cuStreamCreate(self, flags: int) -> Any:
        return self._make("stream")

    def cuStreamDestroy(self, stream: Any) -> Any:
        return self._drop("stream")

    def cuEventCreate(self, flags: int) -> Any:
        return self._make("event")

    def cuEventDestroy(self, event: Any) -> Any:
        return self._drop("event")

    def cuEventRecord(self, event: Any, stream: Any) -> Any:
        return (OK,)

    def cuEventQuery(self, event: Any) -> Any:
        return (OK,)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> Any:
        assert stream != self._captured, "recorded work cannot wait for work that is not"
        return (OK,)

    def cuStreamSynchronize(self, stream: Any) -> Any:
        assert stream != self._captured
        return (OK,)

    def cuEventElapsedTime(self, begin: Any, end: Any) -> Any:
        return OK, 0.25

    def cuEventSynchronize(self, event: Any) -> Any:
        return (OK,)

    def cuModuleLoadData(self, code: bytes) -> Any:
        return self._make("module")

    def cuModuleUnload(self, module: Any) -> Any:
        return self._drop("module")

    def cuModuleGetFunction(self, module: Any, symbol: bytes) -> Any:
        return OK, symbol.decode()

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> Any:
        return (OK,)

    # memory
    def cuMemAlloc(self, nbytes: int) -> Any:
        if nbytes > self.total - self.used:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.used += nbytes
        return OK, self._allocate("memory", nbytes)

    def cuMemFree(self, ptr: int) -> Any:
        self.used -= self.memory[ptr].nbytes - 256
        del self.memory[ptr]
        return self._drop("memory")

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        return OK, self._allocate("pinned", nbytes)

    def cuMemFreeHost(self, ptr: int) -> Any:
        del self.memory[ptr]
        return self._drop("pinned")

    def cuMemsetD8Async(self, ptr: int, value: int, nbytes: int, stream: Any) -> Any:
        return self._do(lambda: ctypes.memset(ptr, value, nbytes), stream)

    def cuMemcpyHtoDAsync(self, dst: int, src: int, nbytes: int, stream: Any) -> Any:
        return self._do(lambda: ctypes.memmove(dst, src, nbytes), stream)

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    # work
    def cuLaunchKernel(self, function: Any, *rest: Any) -> Any:
        grid, block, shared, stream, address = rest[:3], rest[3:6], *rest[6:9]
        words = list((ctypes.c_void_p * 64).from_address(address))
        slots = [ctypes.c_int64.from_address(word).value for word in words]
        return self._do(lambda: self.launches.append((function, grid, block, shared, slots)), stream)

    def cuLaunchKernelEx(self, config: Any, function: Any, address: int, extra: int) -> Any:
        c = config
        grid, block = (c.gridDimX, c.gridDimY, c.gridDimZ), (c.blockDimX, c.blockDimY, c.blockDimZ)
        assert c.attrs[0].value.programmaticStreamSerializationAllowed == c.numAttrs == 1
        return self.cuLaunchKernel(function, *grid, *block, c.sharedMemBytes, c.hStream, address, extra)

    def cuStreamBeginCapture(self, stream: Any, mode: int) -> Any:
        self._tape, self._captured = [], stream
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> Any:
        self._captured = None
        self.live["recorded"] += 1
        return OK, self._tape

    def cuGraphDestroy(self, recorded: Any) -> Any:
        return self._drop("recorded")

    def cuGraphInstantiate(self, recorded: Any, flags: int) -> Any:
        self.live["graph"] += 1
        return OK, list(recorded)

    def cuGraphUpload(self, graph: Any, stream: Any) -> Any:
        return (OK,)

    def cuGraphLaunch(self, graph: Any, stream: Any) -> Any:
        for work in graph:
            work()
        return (OK,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:
        return self._drop("graph")

    # own
    def _make(self, kind: str) -> Any:
        self.live[kind] += 1
        self._made += 1
        return OK, f"{kind} {self._made}"

    def _drop(self, kind: str) -> Any:
        self.live[kind] -= 1
        self.order.append(kind)
        return (OK,)

    def _allocate(self, kind: str, nbytes: int) -> int:
        memory = np.full(nbytes + 256, 0xCD, np.uint8)
        self.live[kind] += 1
        ptr = -(-memory.ctypes.data // 256) * 256
        self.memory[ptr] = memory
        return ptr

    def _do(self, work: Callable[[], Any], stream: Any) -> Any:
        if stream == self._captured:
            self._tape.append(work)
        else:
            work()
        return (OK,)

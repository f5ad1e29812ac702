"""CuPy without a GPU: device memory is host memory, work happens when it or its graph is launched, and every handle is
accounted for. Any call can be made to fail."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

OUT_OF_MEMORY, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 2, 400, 600, 700
NAMES = {
    OUT_OF_MEMORY: "cudaErrorMemoryAllocation", INVALID_HANDLE: "cudaErrorInvalidResourceHandle",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress",
}  # fmt: skip
PROPERTIES = {
    "name": b"Fake GPU", "major": 9, "minor": 0, "multiProcessorCount": 132, "sharedMemPerBlockOptin": 232448,
}  # fmt: skip


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"{NAMES.get(status, status)}: what it says")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    pass


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_ILLEGAL_ADDRESS = ILLEGAL_ADDRESS


class FakeDriver:
    """``cupy`` and ``bindings`` stand for the packages. ``live`` counts the handles of each kind; ``order`` lists what
    was destroyed; ``fail`` names calls to fail and their status."""

    def __init__(self, version: int = 13000, memory: int = 1 << 30) -> None:
        self.version, self.total, self.used = version, memory, 0
        self.properties = dict(PROPERTIES)
        self.memory: dict[int, np.ndarray] = {}
        self.live: Counter[str] = Counter()
        self.order: list[str] = []
        self.fail: dict[str, int] = {}
        self.launches: list[tuple[Any, ...]] = []
        self.calls: Counter[str] = Counter()
        self.loaded: list[str] = []
        self.nodes: list[int] = []
        """Of every recording, in order."""
        self.cupy = SimpleNamespace(
            RawModule=lambda path: _Module(self, path),
            cuda=SimpleNamespace(runtime=_Runtime(self), driver=SimpleNamespace(CUDADriverError=CUDADriverError)),
        )
        self.bindings = SimpleNamespace(
            CUlaunchAttributeID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
            CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace(programmaticStreamSerializationAllowed=0)),
            CUlaunchConfig=SimpleNamespace,
            CUstream=lambda stream: stream,
            cuLaunchKernelEx=self._launch,
        )
        self.tape: list[Callable[[], None]] = []
        self.captured: Any = None
        self.made = 0

    def enter(self, name: str, error: type[CUDARuntimeError] = CUDARuntimeError) -> None:
        """Count a call, and fail it if it is to fail."""
        self.calls[name] += 1
        if name in self.fail:
            raise error(self.fail[name])

    def do(self, work: Callable[[], Any], stream: Any) -> None:
        if stream == self.captured:
            self.tape.append(work)
        else:
            work()

    def _launch(self, config: Any, function: Any, address: int, extra: int) -> Any:
        c = config
        self.calls["cuLaunchKernelEx"] += 1
        if "cuLaunchKernelEx" in self.fail:
            return (CUresult(self.fail["cuLaunchKernelEx"]),)
        if hasattr(c, "attrs"):
            assert c.attrs[0].value.programmaticStreamSerializationAllowed == c.numAttrs == 1
        grid, block = (c.gridDimX, c.gridDimY, c.gridDimZ), (c.blockDimX, c.blockDimY, c.blockDimZ)
        words, shared = list((ctypes.c_void_p * 64).from_address(address)), c.sharedMemBytes
        slots = [ctypes.c_int64.from_address(word).value for word in words]
        self.do(lambda: self.launches.append((function, grid, block, shared, slots)), c.hStream)
        return (CUresult.CUDA_SUCCESS,)


class _Module:
    """A loaded file of machine code; a kernel's handle is its name."""

    def __init__(self, fake: FakeDriver, path: str) -> None:
        self._fake, self._path = fake, path

    def get_function(self, symbol: str) -> Any:
        return _Kernel(self._fake, self._path, symbol)


class _Kernel:
    max_dynamic_shared_size_bytes = 0

    def __init__(self, fake: FakeDriver, path: str, symbol: str) -> None:
        self._fake, self._path, self._symbol = fake, path, symbol

    @property
    def kernel(self) -> SimpleNamespace:
        self._fake.enter("load", CUDADriverError)
        self._fake.loaded.append(self._path)
        return SimpleNamespace(ptr=self._symbol)


class _Runtime:
    """``cupy.cuda.runtime``."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name == "CUDARuntimeError":
            return object.__getattribute__(self, name)
        function, fake = object.__getattribute__(self, name), self._fake

        def call(*args: Any) -> Any:
            if name == "eventQuery":  # CuPy hands its status through
                return fake.fail.get(name, 0)
            fake.enter(name)
            return function(*args)

        return call

    # the machine
    def driverGetVersion(self) -> int:
        return self._fake.version

    def getDeviceCount(self) -> int:
        return 1

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return self._fake.properties

    def setDevice(self, index: int) -> None: ...

    def memGetInfo(self) -> tuple[int, int]:
        return self._fake.total - self._fake.used, self._fake.total

    # streams and events
    def streamCreateWithFlags(self, flags: int) -> str:
        return self._make("stream")

    def streamDestroy(self, stream: Any) -> None:
        self._drop("stream")

    def streamSynchronize(self, stream: Any) -> None:
        assert stream != self._fake.captured

    def streamWaitEvent(self, stream: Any, event: Any) -> None:
        assert stream != self._fake.captured, "recorded work cannot wait for work that is not"

    def eventCreate(self) -> str:
        return self._make("event")

    def eventCreateWithFlags(self, flags: int) -> str:
        return self._make("event")

    def eventDestroy(self, event: Any) -> None:
        self._drop("event")

    def eventRecord(self, event: Any, stream: Any) -> None: ...

    def eventQuery(self, event: Any) -> int: ...

    def eventElapsedTime(self, begin: Any, end: Any) -> float:
        return 0.25

    def eventSynchronize(self, event: Any) -> None: ...

    # memory
    def malloc(self, nbytes: int) -> int:
        if nbytes > self._fake.total - self._fake.used:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        self._fake.used += nbytes
        return self._allocate("memory", nbytes)

    def free(self, ptr: int) -> None:
        self._fake.used -= self._fake.memory[ptr].nbytes - 256
        del self._fake.memory[ptr]
        self._drop("memory")

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        return self._allocate("pinned", nbytes)

    def freeHost(self, ptr: int) -> None:
        del self._fake.memory[ptr]
        self._drop("pinned")

    def memsetAsync(self, ptr: int, value: int, nbytes: int, stream: Any) -> None:
        self._fake.do(lambda: ctypes.memset(ptr, value, nbytes), stream)

    def memcpyAsync(self, dst: int, src: int, nbytes: int, direction: int, stream: Any) -> None:
        assert direction in (1, 2, 3)
        self._fake.calls["memcpyAsync", direction] += 1
        self._fake.do(lambda: ctypes.memmove(dst, src, nbytes), stream)

    # recordings
    def streamBeginCapture(self, stream: Any, mode: int) -> None:
        self._fake.tape, self._fake.captured = [], stream

    def streamEndCapture(self, stream: Any) -> Any:
        self._fake.captured = None
        self._fake.live["recorded"] += 1
        return self._fake.tape

    def graphDestroy(self, recorded: Any) -> None:
        self._drop("recorded")

    def graphInstantiate(self, recorded: Any) -> Any:
        self._fake.live["graph"] += 1
        self._fake.nodes.append(len(recorded))
        return [lambda: None, *recorded]

    def graphUpload(self, graph: Any, stream: Any) -> None: ...

    def graphLaunch(self, graph: Any, stream: Any) -> None:
        for work in graph:
            work()

    def graphExecDestroy(self, graph: Any) -> None:
        self._drop("graph")

    # own
    def _make(self, kind: str) -> str:
        self._fake.live[kind] += 1
        self._fake.made += 1
        return f"{kind} {self._fake.made}"

    def _drop(self, kind: str) -> None:
        self._fake.live[kind] -= 1
        self._fake.order.append(kind)

    def _allocate(self, kind: str, nbytes: int) -> int:
        memory = np.full(nbytes + 256, 0xCD, np.uint8)
        self._fake.live[kind] += 1
        ptr = -(-memory.ctypes.data // 256) * 256
        self._fake.memory[ptr] = memory
        return ptr

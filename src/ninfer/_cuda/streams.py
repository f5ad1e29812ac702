"""Work on a stream: points in it, recordings of it, and a second stream for copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer._cuda import driver
from ninfer.device import Buffer
from ninfer.errors import InvariantError

NON_BLOCKING, DISABLE_TIMING = 1, 2
"""Flags of a stream that ignores the default one, and of an event that keeps no time."""

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""Directions of a copy, as CUDA numbers them."""


class CudaEvent:
    """A point in a stream of a device."""

    def __init__(self, device: Any, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._event = device.new_event()

    def record(self) -> None:
        self._device.enter()
        driver.call("eventRecord", self._event, self._stream)

    def done(self) -> bool:
        self._device.enter()
        status = driver.call("eventQuery", self._event)
        if status not in (0, driver.NOT_READY):
            raise driver.failure("eventQuery", status, f"CUDA error {status}")
        return bool(status == 0)

    def wait(self) -> None:
        self._device.enter()
        driver.call("eventSynchronize", self._event)

    def hold(self, stream: int) -> None:
        """Let ``stream`` go on only once this point has been reached."""
        driver.call("streamWaitEvent", stream, self._event)


class CudaGraph:
    """A recording: one launch submits all of it."""

    def __init__(self, device: Any, recorded: int) -> None:
        self._device = device
        self._executable = driver.call("graphInstantiate", recorded)
        driver.call("graphUpload", self._executable, device.stream)

    def launch(self) -> None:
        if not self._executable:
            raise InvariantError("a closed graph was launched")
        self._device.enter()
        driver.call("graphLaunch", self._executable, self._device.stream)

    def close(self) -> None:
        executable, self._executable = self._executable, 0
        if executable:
            self._device.forget(self)
            driver.call("graphExecDestroy", executable)


class CudaCopies:
    """Copies on a stream of their own, beside the work of the device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.stream = driver.call("streamCreateWithFlags", NON_BLOCKING)
        self._mark = CudaEvent(device, device.stream)

    def follow(self) -> None:
        self._mark.record()
        self._mark.hold(self.stream)

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None:
        copy(self._device, dst, src, TO_DEVICE, self.stream)

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None:
        copy(self._device, src, dst, TO_HOST, self.stream)

    def event(self) -> CudaEvent:
        return CudaEvent(self._device, self.stream)

    def close(self) -> None:
        driver.call("streamDestroy", self.stream)


HOST_DTYPES = {
    "u8": np.uint8, "i8": np.int8, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "u32": np.uint32,
    "f32": np.float32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip


def copy(device: Any, buffer: Any, array: npt.NDArray[Any], direction: int, stream: int) -> None:
    """Submit a copy between a device buffer and a host array of the same bytes."""
    if not array.flags.c_contiguous or array.dtype != HOST_DTYPES[buffer.dtype] or array.nbytes != buffer.nbytes:
        raise InvariantError(f"host array {array.dtype} {array.shape} for a buffer {buffer.dtype} {buffer.shape}")
    device.enter()
    ends = (buffer.ptr, array.ctypes.data)
    driver.call("memcpyAsync", *(ends if direction == TO_DEVICE else ends[::-1]), array.nbytes, direction, stream)

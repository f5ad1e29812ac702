"""A device that does nothing until it is waited for, over one that does everything at once.

Every upload, download, copy, Op and graph launch is put off until an event recorded after it is waited for (or polled
twice). Meanwhile a download's destination holds garbage, and an upload's source is read only when its turn comes, so
code that reads a result or reuses a host array too early computes something else than it would on the host device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.device import Arena, Buffer, Device, DeviceMemory, Event, Graph, Shape

_GARBAGE = 0xA7
"""Every byte of an unfinished download: NaN-like floats, huge negative integers."""

_IMMEDIATE = {"matrix", "shared_bytes", "use", "leave"}
"""What is no Op that submits work, with those that end in ``_scratch``."""


class AsyncDevice:
    """``real``, delayed. ``submitted`` and ``finished`` count operations; ``waits`` counts blocking waits.

    ``fail(error)`` makes the next operation raise when its turn comes, and everything after it.
    """

    def __init__(self, real: Device) -> None:
        self.real = real
        self.kind, self.name, self.activation = real.kind, f"delayed {real.name}", real.activation
        self.asynchronous, self.recording_bytes = True, real.recording_bytes
        self.ops: Any = _DelayedOps(self, real.ops)
        self.submitted = self.finished = self.waits = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._capturing = False
        self._error: BaseException | None = None

    def memory(self) -> DeviceMemory:
        return self.real.memory()

    def taken(self) -> Mapping[str, int]:
        return self.real.taken()

    def read_bandwidth(self) -> float:
        return self.real.read_bandwidth()

    def arena(self, nbytes: int) -> Arena:
        return _GuardedArena(self, self.real.arena(nbytes))

    def host(self, shape: Shape, dtype: str) -> npt.NDArray[Any]:
        return self.real.host(shape, dtype)

    def weights(self, data: npt.NDArray[np.uint8]) -> Buffer:
        return self.real.weights(data)

    def duplicate(self, weights: Buffer) -> Buffer:
        return self.real.duplicate(weights)

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None:
        self.submit(lambda: self.real.upload(dst, src))

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None:
        if not self._capturing:
            dst.view(np.uint8)[...] = _GARBAGE
        self.submit(lambda: self.real.download(dst, src))

    def copy(self, dst: Buffer, src: Buffer) -> None:
        self.submit(lambda: self.real.copy(dst, src))

    def copy_rows(self, planes: Sequence[Buffer], source: int, target: int) -> None:
        self.submit(lambda: self.real.copy_rows(planes, source, target))

    def zero(self, dst: Buffer) -> None:
        self.submit(lambda: self.real.zero(dst))

    def event(self) -> Event:
        return _Event(self)

    def copies(self) -> AsyncDevice:
        """One queue for everything: an order that a device with two may have too."""
        return self

    def follow(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Graph:
        self._capturing = True
        try:
            return _DelayedGraph(self, self.real.capture(work))
        finally:
            self._capturing = False

    def close(self) -> None:
        try:
            self.drain(self.submitted)
        finally:
            self._queue.clear()
            self.real.close()

    # -- of the fake

    @property
    def pending(self) -> int:
        """Operations put off so far."""
        return len(self._queue)

    def fail(self, error: BaseException) -> None:
        """Let the operations from the next one on raise ``error``."""
        self._error = error

    def submit(self, work: Callable[[], None]) -> None:
        if self._capturing:
            work()
            return
        self._queue.append(work)
        self.submitted += 1

    def drain(self, until: int) -> None:
        """Do everything submitted before the count ``until``."""
        while self.finished < until and self._queue:
            if self._error is not None:
                raise self._error
            self._queue.popleft()()
            self.finished += 1


class _DelayedOps:
    def __init__(self, device: AsyncDevice, ops: Any) -> None:
        self._device = device
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if name == "block":
            return _DelayedOps(self._device, op)
        if name in _IMMEDIATE or name.endswith("_scratch"):
            return op
        return lambda *args, **kwargs: self._device.submit(lambda: op(*args, **kwargs))


class _Event:
    """``done`` says no once after the work could have finished."""

    def __init__(self, device: AsyncDevice) -> None:
        self._device = device
        self._until = 0
        self._polled = False

    def record(self) -> None:
        self._until, self._polled = self._device.submitted, False

    def done(self) -> bool:
        if self._device.finished >= self._until:
            return True
        if not self._polled:
            self._polled = True
            return False
        self._device.drain(self._until)
        return True

    def wait(self) -> None:
        self._device.waits += 1
        self._device.drain(self._until)


class _DelayedGraph:
    def __init__(self, device: AsyncDevice, real: Graph) -> None:
        self._device, self._real = device, real
        self._last = 0

    def launch(self) -> None:
        self._device.submit(self._real.launch)
        self._last = self._device.submitted

    def close(self) -> None:
        assert self._device.finished >= self._last, "a graph was closed before its last launch finished"
        self._real.close()


class _GuardedArena:
    def __init__(self, device: AsyncDevice, real: Arena) -> None:
        self._device, self._real = device, real
        self.nbytes = real.nbytes

    def buffer(self, offset: int, shape: Shape, dtype: str) -> Buffer:
        return self._real.buffer(offset, shape, dtype)

    def close(self) -> None:
        assert not self._device.pending, "memory was returned under submitted work"
        self._real.close()

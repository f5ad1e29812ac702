"""What a device is to the rest: memory, an ordered stream of work, recordings. Operations are in ``ops``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ninfer.ops import Ops

ITEM_BYTES: Mapping[str, int] = {
    "u8": 1, "i8": 1, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4, "i64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
"""Element types of device buffers and their bytes. bf16 is a 16-bit word with fp32's exponent."""

Shape = tuple[int, ...]


class Buffer(Protocol):
    """An opaque device array in C order. Its contents are never read on the host; only a Device moves bytes."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> str:
        """A key of ITEM_BYTES."""
        ...

    @property
    def nbytes(self) -> int: ...

    def head(self, *shape: int) -> Buffer:
        """A view of the first ``prod(shape)`` elements, reshaped; InvariantError when the buffer is smaller."""
        ...

    def slice(self, begin: int, end: int) -> Buffer:
        """A view of ``[begin, end)`` along the first axis."""
        ...


class Event(Protocol):
    """A point in the device's stream."""

    def record(self) -> None:
        """Mark the work submitted so far."""
        ...

    def done(self) -> bool:
        """Whether the marked work has finished. Never blocks."""
        ...

    def wait(self) -> None:
        """Block until the marked work has finished. The only host wait. Raises DeviceError if it failed."""
        ...


class Graph(Protocol):
    """A recorded sequence of device work whose buffers stay alive with it."""

    def launch(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device: all, and what a new arena may take."""

    total: int
    free: int


class Arena(Protocol):
    """One large allocation, carved by offset. ``close`` returns it."""

    nbytes: int

    def buffer(self, offset: int, shape: Shape, dtype: str) -> Buffer:
        """The buffer at a byte ``offset`` (a multiple of 256)."""
        ...

    def close(self) -> None: ...


class Copies(Protocol):
    """A second queue of a device, for copies beside its work. Host arrays come from ``Device.host``."""

    def follow(self) -> None:
        """What is submitted here from now on starts after all work the device has been given so far."""
        ...

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None: ...

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None: ...

    def event(self) -> Event:
        """A point in this queue."""
        ...


class Device(Protocol):
    """One accelerator or the host. All work is stream-ordered: a call may return before it has happened.

    Host arrays handed to ``upload`` or ``download`` belong to the device until an event recorded afterwards is done.
    """

    kind: str
    name: str
    activation: str
    asynchronous: bool
    """Whether submitted work runs beside the host; else a call returns when its work is done."""
    recording_bytes: int
    """Device memory to set aside for one recording of a pass."""
    ops: Ops

    def memory(self) -> DeviceMemory: ...

    def taken(self) -> Mapping[str, int]:
        """Bytes of device memory taken before a Program plans its own, by component: weights, where they are copied."""
        ...

    def read_bandwidth(self) -> float:
        """Bytes a second that a large read of device memory reaches, measured now, in less than a second."""
        ...

    def arena(self, nbytes: int) -> Arena:
        """Zero-filled device memory. Raises OutOfDeviceMemory."""
        ...

    def host(self, shape: Shape, dtype: str) -> npt.NDArray[Any]:
        """A zero-filled host array the device can copy from and to (pinned where that matters). bf16 is uint16."""
        ...

    def weights(self, data: npt.NDArray[np.uint8]) -> Buffer:
        """Make read-only bytes resident and return them as u8 [n]; zero-copy where the host is the device."""
        ...

    def duplicate(self, weights: Buffer) -> Buffer:
        """Another resident copy of what ``weights`` returned."""
        ...

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None: ...

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None: ...

    def copy(self, dst: Buffer, src: Buffer) -> None: ...

    def copy_rows(self, planes: Sequence[Buffer], source: int, target: int) -> None:
        """Entry ``source`` along the first axis of every buffer becomes its entry ``target``."""
        ...

    def zero(self, dst: Buffer) -> None: ...

    def event(self) -> Event: ...

    def copies(self) -> Copies: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` submits, without running it."""
        ...

    def close(self) -> None:
        """Finish submitted work and free everything. Idempotent."""
        ...


@contextmanager
def working(device: Device) -> Iterator[None]:
    """Let a device's Ops work inside the block although no Program plans memory for them."""
    arena = device.arena(device.ops.shared_bytes)
    area = arena.buffer(0, (device.ops.shared_bytes,), "u8")
    try:
        device.ops.use(area)
        yield
    finally:
        device.ops.leave(area)
        arena.close()


class Scope(Protocol):
    """Where buffers come from. The same code runs over a measuring scope to plan and an allocating one to build."""

    def buffer(self, name: str, shape: Shape, dtype: str) -> Buffer:
        """A buffer of its own, 256-byte aligned, counted under the component ``name``."""
        ...

"""The host as a device: work runs when it is submitted, or is recorded and replayed."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ninfer._cpu.buffers import DTYPES, CpuArena, CpuBuffer
from ninfer._cpu.kernel import Kernel
from ninfer._cpu.threads import Pool, count
from ninfer.device import Buffer, DeviceMemory, Shape
from ninfer.errors import InvariantError, OutOfDeviceMemory
from ninfer.ops import Ops

_GROUP = Path("/sys/fs/cgroup")


class CpuEvent:
    """Work has happened when a call returns, so an event is always done."""

    def record(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuCopies:
    """There is nothing beside the host's own work: a copy has happened when its call returns."""

    def __init__(self, device: CpuDevice) -> None:
        self.upload = device.upload
        self.download = device.download
        self.event = device.event

    def follow(self) -> None:
        pass


class CpuGraph:
    """A recording: one native call runs all of it."""

    def __init__(self, device: CpuDevice, tape: Tape) -> None:
        self._device = device
        self._tape: Tape | None = tape
        self._entries = np.array(tape.entries, np.int64).reshape(-1, 4)

    def launch(self) -> None:
        if self._tape is None:
            raise InvariantError("a closed graph was launched")
        self._device.run(self._entries)

    def close(self) -> None:
        self._tape = None


class Tape:
    """Launches in order, and everything they point to."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int, int]] = []
        self.owners: list[Any] = []


class CpuDevice:
    """The host. ``threads`` workers share a launch; results do not depend on how many there are.

    Any thread may use a device, one at a time. After a fork it raises EngineClosed.
    """

    kind = "cpu"
    activation = "f32"
    asynchronous = False
    recording_bytes = 0
    ops: Ops

    def __init__(self, threads: int | None = None) -> None:
        """Start the threads; see ``ninfer._cpu.threads.count`` for how many."""
        from ninfer._cpu.kernels.products import WS_BYTES
        from ninfer._cpu.ops import CpuOps

        self.threads = count(threads)
        self.name = f"cpu ({self.threads} thread{'s' if self.threads > 1 else ''})"
        self._pool = Pool(self.threads, WS_BYTES)
        self._tape: Tape | None = None
        self._cpu_ops = CpuOps(self)
        self.ops = cast(Ops, self._cpu_ops)

    def memory(self) -> DeviceMemory:
        fields = {}
        with open("/proc/meminfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                fields[name] = int(value.split()[0]) << 10
        total, free = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
        limit = _group_memory()
        return DeviceMemory(total, free) if limit is None else DeviceMemory(min(total, limit[0]), min(free, limit[1]))

    def taken(self) -> Mapping[str, int]:
        return {}

    def read_bandwidth(self) -> float:
        from ninfer._cpu.kernels import probe

        blocks = 1024
        arena = CpuArena(blocks * probe.BLOCK * 4 + blocks * 4)
        try:
            source = arena.buffer(0, (blocks, probe.BLOCK), "f32")
            out = arena.buffer(source.nbytes, (blocks,), "f32")
            source.array[:] = 1.0  # untouched pages would all be one
            best = math.inf
            for _ in range(8):
                begin = time.perf_counter()
                self.submit(probe.read, blocks, source, out)
                best = min(best, time.perf_counter() - begin)
            return source.nbytes / best
        finally:
            arena.close()

    def arena(self, nbytes: int) -> CpuArena:
        free = self.memory().free
        if nbytes > free:
            raise OutOfDeviceMemory(f"{nbytes} bytes needed, {free} available", free=free)
        try:
            return CpuArena(nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfDeviceMemory(f"{nbytes} bytes cannot be mapped: {error}", free=free) from error

    def host(self, shape: Shape, dtype: str) -> npt.NDArray[Any]:
        return np.zeros(shape, DTYPES[dtype])

    def weights(self, data: npt.NDArray[np.uint8]) -> CpuBuffer:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvariantError("weights are contiguous bytes")
        return CpuBuffer(data, "u8")

    def duplicate(self, weights: Buffer) -> CpuBuffer:
        return CpuBuffer(cast(CpuBuffer, weights).array.copy(), "u8")

    def upload(self, dst: Buffer, src: npt.NDArray[Any]) -> None:
        self._check_host(dst, src)
        self._copy(dst, src)

    def download(self, dst: npt.NDArray[Any], src: Buffer) -> None:
        self._check_host(src, dst)
        self._copy(dst, src)

    def copy(self, dst: Buffer, src: Buffer) -> None:
        if dst.nbytes != src.nbytes:
            raise InvariantError(f"copy of {src.nbytes} bytes into {dst.nbytes}")
        self._copy(dst, src)

    def copy_rows(self, planes: Sequence[Buffer], source: int, target: int) -> None:
        for plane in planes:
            self.copy(plane.slice(target, target + 1), plane.slice(source, source + 1))

    def zero(self, dst: Buffer) -> None:
        from ninfer._cpu.kernels.rows import zero

        self.submit(zero, 1, dst, dst.nbytes)

    def event(self) -> CpuEvent:
        return CpuEvent()

    def copies(self) -> CpuCopies:
        return CpuCopies(self)

    def capture(self, work: Callable[[], None]) -> CpuGraph:
        if self._tape is not None:
            raise InvariantError("a recording inside a recording")
        self._tape = Tape()
        try:
            work()
            return CpuGraph(self, self._tape)
        finally:
            self._tape = None

    def close(self) -> None:
        self._pool.close()
        self._cpu_ops.close()

    # -- for Ops

    def submit(self, kernel: Kernel, tasks: int, *words: Any, grain: int = 1) -> None:
        """Run ``kernel`` over ``tasks``, or record it. Words: buffers and arrays (their addresses), ints, floats.

        ``grain`` tasks are taken at a time; a launch of no more than that runs on the calling thread alone.
        """
        packed = np.array([_word(w) for w in words], np.int64)
        entry = (kernel.address, packed.ctypes.data, tasks, grain)
        if self._tape is not None:
            self._tape.entries.append(entry)
            self._tape.owners.append((packed, words))
        else:
            self.run(np.array([entry], np.int64))

    def run(self, entries: npt.NDArray[np.int64]) -> None:
        """Launch int64 [n, 4] entries in order and return when they are done."""
        self._pool.run(entries)

    # -- own

    def _copy(self, dst: Any, src: Any) -> None:
        from ninfer._cpu.kernels.rows import copy

        self.submit(copy, 1, dst, src, dst.nbytes)

    @staticmethod
    def _check_host(buffer: Buffer, array: npt.NDArray[Any]) -> None:
        if not array.flags.c_contiguous or array.dtype != DTYPES[buffer.dtype] or array.nbytes != buffer.nbytes:
            raise InvariantError(f"host array {array.dtype} {array.shape} for a buffer {buffer.dtype} {buffer.shape}")


def _group_memory() -> tuple[int, int] | None:
    """(limit, what is left of it) of this process's control group, bytes; None where it has no limit."""
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        cached = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit, max(0, limit - used + int(cached.get("inactive_file", 0)))


def _word(value: Any) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    return int(value.address)

"""The host tier's memory: taken from the system in superblocks and images, ahead of the copies that will need it.

Page-locked memory comes slowly, a gigabyte in more than a second, and a copy to it would make its request wait as long.
So a thread beside takes, up to what the tier may have, as much as everything on the device would fill. It does so only
while the device rests: what is submitted meanwhile waits in the driver.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy.typing as npt

from ninfer.device import Device
from ninfer.errors import DeviceError

Bytes = npt.NDArray[Any]
Kind = Literal["superblock", "image"]

REST = 0.2
"""Seconds without work on the device after which it is taken to rest."""


class HostMemory:
    """Byte arrays by kind and number. sizes: bytes of one of a kind. ahead: whether ``expect`` does anything."""

    def __init__(
        self, device: Device, sizes: Mapping[Kind, int], ahead: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device = device
        self._clock = clock
        self._sizes = sizes
        self._taken: dict[tuple[Kind, int], Bytes] = {}
        self._lock = threading.Lock()
        self._wanted: dict[Kind, int] = dict.fromkeys(sizes, 0)
        self._changed = threading.Condition()
        self._ahead = ahead
        self._thread: threading.Thread | None = None
        self._closed = False
        self._used = -math.inf

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in list(self._taken.values()))

    def get(self, kind: Kind, number: int) -> Bytes:
        """One of a kind, taken now if it has not been. Raises DeviceError."""
        found = self._taken.get((kind, number))
        if found is None:
            with self._lock:
                found = self._taken.get((kind, number))
                if found is None:
                    found = self._taken[kind, number] = self._device.host((self._sizes[kind],), "u8")
        return found

    def expect(self, counts: Mapping[Kind, int]) -> None:
        """The first so many of each kind may be needed soon. Returns at once."""
        if not self._ahead or all(counts[kind] <= self._wanted[kind] for kind in counts):
            return
        with self._changed:
            for kind, count in counts.items():
                self._wanted[kind] = max(self._wanted[kind], count)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ninfer-host-memory", daemon=True)
            self._thread.start()

    def used(self) -> None:
        """The device gets work now."""
        self._used = self._clock()

    def close(self) -> None:
        """Stop taking. What has been taken is the device's to give back."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _missing(self) -> tuple[Kind, int] | None:
        for kind, count in self._wanted.items():
            for number in range(count):
                if (kind, number) not in self._taken:
                    return kind, number
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._missing() is not None)
                while not self._closed and (left := self._used + REST - self._clock()) > 0:
                    self._changed.wait(left)
                missing = self._missing()
                if self._closed or missing is None:
                    return
            try:
                self.get(*missing)
            except (DeviceError, MemoryError):  # whoever needs it will hear of it
                return

"""Host memory that is taken ahead of its use."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ninfer.errors import DeviceError
from ninfer.program import hosting
from ninfer.program.hosting import HostMemory


class Slow:
    """A device whose host memory comes when it is let through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.taken: list[int] = []
        self.threads: set[str] = set()
        self.broken = False

    def host(self, shape, dtype):
        assert self.gate.wait(10)
        if self.broken:
            raise DeviceError("no more")
        self.taken.append(shape[0])
        self.threads.add(threading.current_thread().name)
        return np.zeros(shape, np.uint8)


def until(holds) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_memory_is_taken_beside_the_caller_up_to_what_is_expected() -> None:
    device = Slow()
    memory = HostMemory(device, {"superblock": 8, "image": 3}, ahead=True)
    memory.expect({"superblock": 2, "image": 1})
    assert memory.nbytes == 0, "nobody waits"
    device.gate.set()
    until(lambda: memory.nbytes == 2 * 8 + 3)
    memory.expect({"superblock": 1, "image": 0})
    memory.expect({"superblock": 3, "image": 1})
    until(lambda: memory.nbytes == 3 * 8 + 3)
    assert device.threads == {"ninfer-host-memory"}
    assert memory.get("superblock", 1) is memory.get("superblock", 1)
    assert memory.get("image", 4).nbytes == 3, "what nobody expected is taken when it is needed"
    memory.close()
    assert device.taken == [8, 8, 3, 8, 3]


def test_nothing_is_taken_beside_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(hosting, "REST", 0.05)
    device = Slow()
    device.gate.set()
    memory = HostMemory(device, {"superblock": 8, "image": 3}, ahead=True, clock=lambda: clock[0])
    memory.used()
    memory.expect({"superblock": 1, "image": 0})
    assert memory.get("image", 0).nbytes == 3, "what is needed is taken at any time"
    time.sleep(0.2)
    assert device.taken == [3]
    clock[0] = 1.0
    until(lambda: memory.nbytes == 3 + 8)
    assert device.taken == [3, 8]
    memory.close()


def test_one_that_is_being_taken_is_waited_for_and_not_taken_twice() -> None:
    device = Slow()
    memory = HostMemory(device, {"superblock": 8, "image": 3}, ahead=True)
    memory.expect({"superblock": 1, "image": 0})
    got: list[np.ndarray] = []
    caller = threading.Thread(target=lambda: got.append(memory.get("superblock", 0)))
    caller.start()
    device.gate.set()
    caller.join(10)
    until(lambda: memory.nbytes == 8)
    memory.close()
    assert device.taken == [8]
    assert got[0] is memory.get("superblock", 0)


def test_a_refusal_comes_to_whoever_needs_the_memory() -> None:
    device = Slow()
    device.broken = True
    device.gate.set()
    memory = HostMemory(device, {"superblock": 8, "image": 3}, ahead=True)
    memory.expect({"superblock": 2, "image": 0})
    with pytest.raises(DeviceError):
        memory.get("superblock", 0)
    memory.close()


def test_without_leave_nothing_is_taken_ahead() -> None:
    device = Slow()
    device.gate.set()
    memory = HostMemory(device, {"superblock": 8, "image": 3}, ahead=False)
    memory.expect({"superblock": 2, "image": 2})
    assert memory._thread is None
    assert memory.get("image", 0).nbytes == 3
    memory.close()

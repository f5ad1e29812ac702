"""The threads of a device.

They are the device's own and not Numba's: a parallel region of Numba's layers is joined by every thread of a pool that
the whole process shares, which costs milliseconds where cores are busy, and OpenMP's aborts the child of a fork.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from ninfer import env
from ninfer._cpu import launch
from ninfer.errors import EngineClosed


def count(wanted: int | None) -> int:
    """Threads of a device: ``wanted``, else NINFER_CPU_THREADS, else one per usable core."""
    if launch.SYS_FUTEX is None:
        return 1
    return wanted or env.cpu_threads() or len(os.sched_getaffinity(0))


class Pool:
    """``threads`` threads, the calling one among them, each with ``stride`` bytes of workspace from ``workspace`` on.

    One thread at a time runs work; several pools of a process know nothing of each other. After a fork every call
    raises EngineClosed: threads do not survive it.
    """

    def __init__(self, threads: int, workspace: int, stride: int) -> None:
        self.threads = threads
        self._pid = os.getpid()
        self._turn = threading.Lock()
        self._closed = False
        self._workspace = workspace
        self._memory = np.zeros(launch.SHARED + 64, np.uint8)
        self._shared: int = -(-self._memory.ctypes.data // 64) * 64
        self._workers = [
            threading.Thread(target=launch.work, args=(self._shared, place), name="ninfer-cpu", daemon=True)
            for place in range(workspace + stride, workspace + threads * stride, stride)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, entries: npt.NDArray[np.int64]) -> None:
        """Launch int64 [n, 4] entries in order; returns when all their work is done."""
        if self._pid != os.getpid():
            raise EngineClosed(f"opened in process {self._pid}, used in its fork {os.getpid()}")
        with self._turn:
            if self._closed:
                raise EngineClosed("the device is closed")
            launch.run(entries.ctypes.data, len(entries), self._shared, self.threads, self._workspace)

    def close(self) -> None:
        """End the workers. Idempotent; in a fork there are none to end."""
        if self._pid != os.getpid():
            return
        with self._turn:
            if self._closed:
                return
            self._closed = True
            launch.stop(self._shared, self.threads)
        for worker in self._workers:
            worker.join()

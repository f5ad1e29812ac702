"""The threads of a device.

They are the device's own and not Numba's: a parallel region of Numba's layers is joined by every thread of a pool that
the whole process shares, which costs milliseconds where cores are busy, and OpenMP's aborts the child of a fork.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ninfer import env
from ninfer._cpu import launch
from ninfer._cpu.buffers import CpuArena
from ninfer.errors import EngineClosed

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def count(wanted: int | None) -> int:
    """Threads of a device: ``wanted``, else NINFER_CPU_THREADS, else one per core that this process may use.

    A container's CPU quota bounds the last. Machines whose futex call is not known have one thread.
    """
    if launch.SYS_FUTEX is None:
        return 1
    return wanted or env.cpu_threads() or min(len(os.sched_getaffinity(0)), _quota())


def _quota() -> int:
    """Cores that the control group grants, rounded up; very many where it does not say."""
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1 << 20


class Pool:
    """``threads`` threads, the calling one among them, each with ``stride`` bytes of workspace.

    One thread at a time runs work; several pools of a process know nothing of each other. After a fork every call
    raises EngineClosed: threads do not survive it.
    """

    def __init__(self, threads: int, stride: int) -> None:
        self.threads = threads
        self._pid = os.getpid()
        self._turn = threading.Lock()
        workspace = CpuArena(stride * threads)
        self._workspace = workspace.buffer(0, (stride * threads,), "u8").address
        memory = np.zeros(launch.SHARED + 64, np.uint8)
        self._shared: int = -(-memory.ctypes.data // 64) * 64
        owners = (workspace, memory)  # the workers' for as long as they live
        workers = [
            threading.Thread(target=_work, args=(self._shared, place, owners), name="ninfer-cpu", daemon=True)
            for place in range(self._workspace + stride, self._workspace + threads * stride, stride)
        ]
        for worker in workers:
            worker.start()
        # also when a pool is dropped without a close, and at the end of the process
        self._end = weakref.finalize(self, _end, self._pid, self._shared, workers, owners)

    def run(self, entries: npt.NDArray[np.int64]) -> None:
        """Launch int64 [n, 4] entries in order; returns when all their work is done."""
        if self._pid != os.getpid():
            raise EngineClosed(f"opened in process {self._pid}, used in its fork {os.getpid()}")
        with self._turn:
            if not self._end.alive:
                raise EngineClosed("the device is closed")
            launch.run(entries.ctypes.data, len(entries), self._shared, self.threads, self._workspace)

    def close(self) -> None:
        """End the workers and return their memory. Idempotent; in a fork there are none to end."""
        if self._pid == os.getpid():
            with self._turn:
                self._end()


def _work(shared: int, workspace: int, owners: object) -> None:
    launch.work(shared, workspace)


def _end(pid: int, shared: int, workers: list[threading.Thread], owners: tuple[CpuArena, object]) -> None:
    if pid == os.getpid():
        launch.stop(shared, len(workers) + 1)
        for worker in workers:
            worker.join()
        owners[0].close()

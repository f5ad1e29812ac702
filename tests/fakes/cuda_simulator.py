"""A device whose memory is the host's and whose kernels run under Numba's CUDA simulator, for the sampler's Ops.

Import it only in a process started with NUMBA_ENABLE_CUDASIM=1. Kernels are the product's own with few threads a block.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.simulator.kernel import BlockManager, BlockThread
from numba.cuda.simulator.kernelapi import FakeCUDAShared

from ninfer._cuda import sampler_kernels as kernels
from ninfer._cuda import sampler_whole, sampling
from ninfer._cuda.buffers import CudaBuffer
from ninfer.device import ITEM_BYTES

sys.setswitchinterval(2e-5)  # so that simulated threads interleave

DTYPES = {
    "u8": np.uint8, "i32": np.int32, "u32": np.uint32, "f32": np.float32, "i64": np.int64, "u64": np.uint64,
    "f64": np.float64,
}  # fmt: skip
SURVEY_THREADS = 4

_making = threading.Lock()


def _shared_array(shared: Any, shape: int, dtype: Any) -> np.ndarray:
    """The block's array of one line of code, first filled with what is wrong everywhere.

    In place of the simulator's own, which asks whether there is one and then makes it: of two threads that come there
    together, each could get an array to itself.
    """
    caller = sys._getframe(1)
    place = caller.f_code, caller.f_lineno
    with _making:
        if place not in shared._allocations:
            array = np.empty(shape, dtype)
            array.view(np.uint8)[:] = 0xFF  # NaN; of keys, one that is broken
            shared._allocations[place] = array
        return shared._allocations[place]


FakeCUDAShared.array = _shared_array


class _Barrier:
    """Where the threads of a block wait for those that have not returned."""

    def __init__(self, threads: int) -> None:
        self._live, self._waiting, self._round = threads, 0, 0
        self._moved = threading.Condition()
        self.error: BaseException | None = None

    def wait(self) -> None:
        with self._moved:
            here, self._waiting = self._round, self._waiting + 1
            self._open()
            self._moved.wait_for(lambda: self._round != here or self.error)
            if self.error:
                raise RuntimeError("another thread of the block failed")

    def leave(self, error: BaseException | None) -> None:
        with self._moved:
            self._live -= 1
            if error and not self.error:
                self.error = error
                self._moved.notify_all()
            self._open()

    def _open(self) -> None:
        if self._waiting == self._live:
            self._waiting, self._round = 0, self._round + 1
            self._moved.notify_all()


def _run_block(manager: BlockManager, block: Any, *args: Any) -> None:
    """In place of the simulator's own, which asks every thread in a loop whether it waits, and takes their time."""
    barrier = manager.barrier = _Barrier(int(np.prod(manager._block_dim)))

    def run() -> None:
        error = None
        try:
            manager._f(*args)
        except BaseException as caught:
            error = caught
        barrier.leave(error)

    threads = [BlockThread(run, manager, block, thread, manager._debug) for thread in np.ndindex(*manager._block_dim)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if barrier.error:
        raise barrier.error


BlockManager.run = _run_block
BlockThread.syncthreads = lambda thread: thread._manager.barrier.wait()


def flat(buffer: CudaBuffer) -> np.ndarray:
    """The buffer's memory as a flat array."""
    return np.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr), DTYPES[buffer.dtype])


class SimulatedDevice:
    """``threads`` of a block of ``decide``, fewer than there are listed ids, or enough to narrow them, with
    the ``capacity`` that these need, and at most ``groups``."""

    def __init__(self, threads: int, groups: int = 16, capacity: int = 512) -> None:
        sampling.SHIFT, sampling.WHOLE_BLOCKS = 5, 3
        self._memory: list[np.ndarray] = []
        self._kernels = {
            "survey": (cuda.jit(kernels.make_survey(SURVEY_THREADS, 1 << sampling.SHIFT)), SURVEY_THREADS),
            "decide": (cuda.jit(kernels.make_decide(threads, groups, capacity)), threads),
            "chain": (cuda.jit(kernels.chain), None),
            "tally": (cuda.jit(sampler_whole.make_tally(4)), 4),
            "collect": (cuda.jit(sampler_whole.make_collect(4)), 4),
            "settle": (cuda.jit(sampler_whole.make_settle(threads)), threads),
            "finish": (cuda.jit(sampler_whole.make_finish(threads)), threads),
            "count": (cuda.jit(kernels.count), None),
        }
        self.ops = sampling.Sampler(self)
        self.ops.sample_scratch = self.ops.scratch

    def function(self, module: str, symbol: str) -> Any:
        return symbol, *self._kernels[symbol]

    def launch(self, function: Any, grid: Any, block: int, *args: Any) -> None:
        symbol, kernel, threads = function
        types = kernels.KERNELS[symbol][1].split()
        assert len(args) == len(types)
        given = []
        for value, kind in zip(args, types):
            if kind.endswith("*"):
                assert value == 0 or value.dtype == kind[:-1], (value, kind)
                given.append(flat(value) if value != 0 else np.zeros(0, DTYPES[kind[:-1]]))
            else:
                given.append(DTYPES[kind](value))
        kernel[grid, threads or block](*given)

    def arena(self, nbytes: int) -> Any:
        memory = np.zeros(nbytes + 256, np.uint8)
        self._memory.append(memory)
        base = -(-memory.ctypes.data // 256) * 256
        return SimpleNamespace(buffer=lambda offset, shape, dtype: CudaBuffer(base + offset, shape, dtype))

    def host(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        assert math.prod(shape) * ITEM_BYTES[dtype] >= 0
        return np.zeros(shape, DTYPES[dtype])

    def upload(self, dst: CudaBuffer, src: np.ndarray) -> None:
        flat(dst)[:] = src.reshape(-1)

    def download(self, dst: np.ndarray, src: CudaBuffer) -> None:
        dst.reshape(-1)[:] = flat(src)

    def event(self) -> Any:
        return SimpleNamespace(record=lambda: None, wait=lambda: None)

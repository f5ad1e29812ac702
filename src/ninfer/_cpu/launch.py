"""Run recorded kernels on the device's threads: one native call per recording."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from ninfer._cpu.kernel import DiskCache
from ninfer._cpu.kernels.simd import call4

ENTRY = 4
"""int64 words of a recorded launch: kernel address, address of its argument words, tasks, tasks taken at a time."""


@intrinsic
def _take(typingctx, counter, n):
    """Add n to counter[0] at once and return what it was."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, args[1], "monotonic")

    return types.int64(counter, types.int64), codegen


def _run(tape, threads, ws, stride):
    """Launch ``tape`` int64 [n, ENTRY] in order. Workspaces: ``threads`` of ``stride`` bytes at address ``ws``."""
    counter = np.zeros(8, np.int64)
    for i in range(tape.shape[0]):
        fn, words, tasks, grain = tape[i, 0], tape[i, 1], tape[i, 2], tape[i, 3]
        if tasks <= grain or threads == 1:
            call4(fn, words, 0, tasks, ws)
        else:
            counter[0] = 0
            for thread in prange(threads):
                while True:
                    begin = _take(counter, grain)
                    if begin >= tasks:
                        break
                    call4(fn, words, begin, min(begin + grain, tasks), ws + thread * stride)


@cache
def launcher() -> Any:
    """The compiled ``_run``. The threading layer must have been chosen."""
    run = njit(parallel=True, nogil=True, error_model="numpy")(_run)
    run._cache = DiskCache(_run, "launch")
    signature = types.void(types.int64[:, ::1], types.int64, types.int64, types.int64)
    run.compile(signature)
    run.disable_compile()
    return run

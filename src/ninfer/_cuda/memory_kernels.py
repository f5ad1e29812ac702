"""Kernels that only move memory, in Numba."""

from __future__ import annotations

import numpy as np
from numba import cuda


def sweep(out, data, words):
    """Read ``words`` u64 (a multiple of four times the threads) once; every thread leaves what it saw in ``out``."""
    tid, stride = cuda.grid(1), cuda.gridsize(1)
    a = b = c = d = np.uint64(0)
    for i in range(tid, words, 4 * stride):
        a ^= data[i]
        b ^= data[i + stride]
        c ^= data[i + 2 * stride]
        d ^= data[i + 3 * stride]
    out[tid] = a ^ b ^ c ^ d


def copy_rows(base, planes, source, target):
    """Row ``source`` of every plane becomes its row ``target``; a plane is blockIdx.y. ``planes``: of each the words
    from ``base`` to its row 0, and the words of a row."""
    first, words = planes[2 * cuda.blockIdx.y], planes[2 * cuda.blockIdx.y + 1]
    read, write = first + source * words, first + target * words
    for i in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, words, cuda.gridDim.x * cuda.blockDim.x):
        base[write + i] = base[read + i]


KERNELS = {"sweep": (sweep, "u64* u64* i64"), "copy_rows": (copy_rows, "u64* i64* i64 i64")}
"""Every kernel: its function and the types of its arguments."""

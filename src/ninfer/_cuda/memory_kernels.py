"""Kernels that only move memory, in Numba."""

from __future__ import annotations

from numba import cuda


def copy_rows(base, planes, source, target):
    """Row ``source`` of every plane becomes its row ``target``; a plane is blockIdx.y. ``planes``: of each the words
    from ``base`` to its row 0, and the words of a row."""
    first, words = planes[2 * cuda.blockIdx.y], planes[2 * cuda.blockIdx.y + 1]
    read, write = first + source * words, first + target * words
    for i in range(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, words, cuda.gridDim.x * cuda.blockDim.x):
        base[write + i] = base[read + i]


KERNELS = {"copy_rows": (copy_rows, "u64* i64* i64 i64")}
"""Every kernel: its function and the types of its arguments."""

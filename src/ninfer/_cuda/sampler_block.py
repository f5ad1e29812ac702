"""What the threads of a block do together: sums in a fixed order, and sorting."""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from ninfer._cuda.sampler_keys import NONE, thread, value_of
from ninfer._cuda.sampling import SPAN


@cuda.jit(device=True)
def tree_sum(value, sums):
    """Sum of every thread's float64 ``value``, for all of them. The block has a power of two of threads."""
    tid, stride = cuda.threadIdx.x, cuda.blockDim.x >> 1
    cuda.syncthreads()
    sums[tid] = value
    cuda.syncthreads()
    while stride > 0:
        if tid < stride:
            sums[tid] += sums[tid + stride]
        cuda.syncthreads()
        stride >>= 1
    return sums[0]


@cuda.jit(device=True)
def best_of_groups(parts, threads):
    """Of each of SPAN groups, the largest of ``parts[group * threads :]``, one of each thread, at its beginning."""
    tid, n = thread(), threads
    while n > 1:
        cuda.syncthreads()
        step = max(n >> 2, 1)
        if tid < SPAN * step:
            i, first = tid % step, tid // step * threads + tid % step
            best = parts[first]
            for k in range(1, 4):
                if i + k * step < n:
                    best = max(best, parts[first + k * step])
            parts[first] = best
        n = step
    cuda.syncthreads()


@cuda.jit(device=True)
def sum_groups(parts, threads):
    """As ``best_of_groups``, float64 sums, in the order of ``tree_sum``."""
    tid, n = thread(), threads
    while n > 1:
        cuda.syncthreads()
        step = max(n >> 2, 1)
        if tid < SPAN * step:
            first = tid // step * threads + tid % step
            if n == 2:
                parts[first] += parts[first + 1]
            else:
                even = parts[first] + parts[first + 2 * step]
                parts[first] = even + (parts[first + step] + parts[first + 3 * step])
        n = step
    cuda.syncthreads()


@cuda.jit(device=True)
def _sort(keys, n):
    """Bitonic sort of ``keys[:n]``, descending; n is a power of two."""
    cuda.syncthreads()
    size = 2
    while size <= n:
        stride = size >> 1
        while stride > 0:
            i = cuda.threadIdx.x
            while i < n >> 1:
                low = 2 * i - (i & (stride - 1))
                x, y = keys[low], keys[low + stride]
                if (x < y) == ((low & size) == 0):
                    keys[low] = y
                    keys[low + stride] = x
                i += cuda.blockDim.x
            cuda.syncthreads()
            stride >>= 1
        size <<= 1


@cuda.jit(device=True)
def fill_and_sort(keys, filled):
    """Sort ``keys[:filled]``, descending, zeros after it."""
    n = 2
    while n < filled:
        n <<= 1
    i = filled + cuda.threadIdx.x
    while i < n:
        keys[i] = NONE
        i += cuda.blockDim.x
    _sort(keys, n)


@cuda.jit(device=True)
def sum_of_groups(parts, scale, top, groups, heads, at, sums):
    """Sum over all ids of exp((z - top) / scale), from each group's sum relative to its head."""
    total = np.float64(0.0)
    g = cuda.threadIdx.x
    while g < groups:
        head = heads[at.p * groups + g]
        if head != NONE:
            total += np.float64(parts[at.p * groups + g]) * math.exp(
                np.float64(value_of(head) - top) / np.float64(scale)
            )
        g += cuda.blockDim.x
    return tree_sum(total, sums)

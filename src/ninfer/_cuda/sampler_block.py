"""What the threads of a block do together: sums in a fixed order, sorting, and looking through the best groups."""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from ninfer._cuda.sampler_keys import NONE, key_of, token_of, value_of


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
def best_of(keys, first, n, thread_best):
    """The largest of ``keys[first : first + n]``, for all threads, of which there is a power of two."""
    tid, half = cuda.threadIdx.x, cuda.blockDim.x >> 1
    mine = NONE
    i = tid
    while i < n:
        mine = max(mine, keys[first + i])
        i += cuda.blockDim.x
    thread_best[tid] = mine
    cuda.syncthreads()
    while half > 0:
        if tid < half:
            thread_best[tid] = max(thread_best[tid], thread_best[tid + half])
        cuda.syncthreads()
        half >>= 1
    best = thread_best[0]
    cuda.syncthreads()
    return best


@cuda.jit(device=True)
def gather(listed, want, groups, shift, heads, top_keys, thread_best, filled, at):
    """Sort into ``listed`` the ids that can be among the ``want`` best, those and perhaps more; their number, and
    whether ids were left out. ``top_keys`` are the sorted heads."""
    tid, threads = cuda.threadIdx.x, cuda.blockDim.x
    scanned = 0
    while scanned < min(want, groups) and top_keys[scanned] != NONE:
        scanned += 1
    elements, ids = scanned << shift, (1 << shift) - 1
    # No worse than the want-th best of what each thread has seen.
    mine = NONE
    i = tid
    while i < elements:
        v = (token_of(top_keys[i >> shift]) & ~ids) + (i & ids)
        if v < at.V:
            mine = max(mine, key_of(v, at))
        i += threads
    thread_best[tid] = mine
    if tid == 0:
        filled[0] = 0
    _sort(thread_best, threads)
    floor = thread_best[want - 1] if want <= threads else NONE
    i = tid
    while i < elements:
        v = (token_of(top_keys[i >> shift]) & ~ids) + (i & ids)
        if v < at.V:
            key = key_of(v, at)
            if key != NONE and key >= floor:
                listed[cuda.atomic.add(filled, 0, 1)] = key
        i += threads
    cuda.syncthreads()
    gathered = filled[0]
    fill_and_sort(listed, gathered)
    return gathered, floor != NONE


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

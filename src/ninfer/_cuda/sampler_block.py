"""What the threads of a block do together: sums in a fixed order, sorting, and the search for a key among all ids."""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from ninfer._cuda.sampler_keys import BROKEN, NONE, key_of, token_of, value_of, weight_of
from ninfer._cuda.sampling import ALTERNATIVES


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
            for i in range(cuda.threadIdx.x, n >> 1, cuda.blockDim.x):
                low = 2 * i - (i & (stride - 1))
                x, y = keys[low], keys[low + stride]
                if (x < y) == ((low & size) == 0):
                    keys[low] = y
                    keys[low + stride] = x
            cuda.syncthreads()
            stride >>= 1
        size <<= 1


@cuda.jit(device=True)
def fill_and_sort(keys, filled):
    """Sort ``keys[:filled]``, descending, zeros after it."""
    n = 2
    while n < filled:
        n <<= 1
    for i in range(filled + cuda.threadIdx.x, n, cuda.blockDim.x):
        keys[i] = NONE
    _sort(keys, n)


@cuda.jit(device=True)
def tally(begin, end, top, at, sums):
    """Sum of the weights of the ids whose key is in ``[begin, end)``, ``begin`` > 0."""
    total = np.float64(0.0)
    for v in range(cuda.threadIdx.x, at.V, cuda.blockDim.x):
        key = key_of(v, at)
        if begin <= key and key < end:
            total += np.float64(weight_of(key, top, at.temperature))
    return tree_sum(total, sums)


@cuda.jit(device=True)
def search(goal, strict, removed_keys, removed, top, at, sums):
    """Key of the id at which the running sum of weights, less what is ``removed`` from some, reaches (strict: passes)
    ``goal``. Four bits of the key a pass, from the top."""
    digits = cuda.local.array(16, np.float64)
    found, end, above = NONE, BROKEN, np.float64(0.0)  # the key is in [found, end); above: the sum of keys from end on
    for shift in range(60, -1, -4):
        if shift < 32 and (1 << shift) >= at.V:  # every id's key has these bits
            found |= np.uint64(15) << np.uint64(shift)
            continue
        for digit in range(16):
            digits[digit] = 0.0
        for v in range(cuda.threadIdx.x, at.V, cuda.blockDim.x):
            key = key_of(v, at)
            if found <= key and key < end:
                digits[(key >> np.uint64(shift)) & np.uint64(15)] += np.float64(weight_of(key, top, at.temperature))
        digit, reached = 15, False
        while digit > 0 and not reached:
            total = above + tree_sum(digits[digit], sums)
            probe = found | (np.uint64(digit) << np.uint64(shift))
            left = total
            for c in range(ALTERNATIVES):
                if removed_keys[c] >= probe:
                    left -= np.float64(removed[c])
            if left > goal or (left == goal and not strict):
                reached = True
            else:
                above = total
                end = probe
                digit -= 1
        found |= np.uint64(digit) << np.uint64(shift)
    return found


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
    for i in range(tid, elements, threads):
        v = (token_of(top_keys[i >> shift]) & ~ids) + (i & ids)
        if v < at.V:
            mine = max(mine, key_of(v, at))
    thread_best[tid] = mine
    if tid == 0:
        filled[0] = 0
    _sort(thread_best, threads)
    floor = thread_best[want - 1] if want <= threads else NONE
    for i in range(tid, elements, threads):
        v = (token_of(top_keys[i >> shift]) & ~ids) + (i & ids)
        if v < at.V:
            key = key_of(v, at)
            if key != NONE and key >= floor:
                listed[cuda.atomic.add(filled, 0, 1)] = key
    cuda.syncthreads()
    gathered = filled[0]
    fill_and_sort(listed, gathered)
    return gathered, floor != NONE


@cuda.jit(device=True)
def sum_of_groups(parts, scale, top, groups, heads, at, sums):
    """Sum over all ids of exp((z - top) / scale), from each group's sum relative to its head."""
    total = np.float64(0.0)
    for g in range(cuda.threadIdx.x, groups, cuda.blockDim.x):
        head = heads[at.p * groups + g]
        if head != NONE:
            total += np.float64(parts[at.p * groups + g]) * math.exp(
                np.float64(value_of(head) - top) / np.float64(scale)
            )
    return tree_sum(total, sums)

"""The best ids of a position, found by one block without sorting many keys.

The k best ids lie in the k groups with the best heads, and none is worse than the least of these heads. ``gather``
finds a bound that the k best heads reach by bisection, takes the ids of their groups that reach it, which are seldom
many more than k, and ``rank`` puts those in order. Where ids next to each other are the likely ones there may be too
many; then a bound that is closer is found among them, and they are looked through again.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from ninfer._cuda.sampler_keys import NONE, look_up, order_key, rounds, thread
from ninfer._cuda.sampling import LISTED, RANKED

_AHEAD = 5
_ONE = np.uint64(1)
_CHOSEN = LISTED + 1
_OWN = 64  # as many keys as a thread may have; registers, and no more than it has


@cuda.jit(device=True)
def best_of(mine, keys, first, threads):
    """The largest key ``mine`` of all threads, and a bound that LISTED threads reach, or NONE. ``keys[first:]`` is room
    for a key of each thread, of which there is a power of eight."""
    lows = cuda.shared.array(8, np.uint64)
    tid, n = thread(), threads
    if tid < 8:
        lows[tid] = NONE
    keys[first + tid] = mine
    while n > 1:
        cuda.syncthreads()
        step = n >> 3
        if tid < step:
            high = low = keys[first + tid]
            for k in range(1, 8):
                key = keys[first + tid + k * step]
                high, low = max(high, key), min(low, key)
            keys[first + tid] = high
            if n == LISTED:
                lows[tid] = low
        n = step
    cuda.syncthreads()
    low = lows[0]
    for k in range(1, 8):
        low = min(low, lows[k])
    return keys[first], low


@cuda.jit(device=True)
def _threshold(keys, first, n, most, want, low, best, threads):
    """A bound that ``want`` of ``keys[first : first + n]`` reach, and how many do: fewer where only those reach
    ``low``. ``want`` of them reach ``low``, unless it is NONE; ``best`` is the largest. n <= most."""
    own = cuda.local.array(_OWN, np.uint64)
    for k in range(rounds(most, threads)):
        i = k * threads + thread()
        own[k] = keys[first + i] if i < n else NONE
    low, high = max(low, _ONE), best + _ONE
    probe = low
    while True:
        reached = 0
        for k in range(rounds(most, threads)):
            if k * threads < n:
                reached += cuda.syncthreads_count(1 if own[k] >= probe else 0)
        if reached >= want:
            low = probe
        else:
            high = probe
        if reached == want or high - low <= _ONE:
            return probe, reached
        probe = low + ((high - low) >> _ONE)


@cuda.jit(device=True)
def _sift(keys, capacity, floor, elements, shift, chosen, filled, threads, at):
    """Put the keys of the chosen groups' ids that reach ``floor`` into ``keys[:capacity]``, and count on beyond it. The
    best key that this thread has seen."""
    values = cuda.local.array(_AHEAD, np.float32)
    ids = cuda.local.array(_AHEAD, np.int32)
    mine, inside = NONE, (1 << shift) - 1
    i = thread()
    while i < elements:
        for k in range(_AHEAD):
            ids[k] = (chosen[min(i >> shift, LISTED)] << shift) + (i & inside)
            i += threads
        look_up(ids, _AHEAD, values, at)
        for k in range(_AHEAD):
            if values[k] == values[k]:
                key = order_key(values[k], ids[k])
                mine = max(mine, key)
                if key >= floor:
                    place = cuda.atomic.add(filled, 0, 1)
                    if place < capacity:
                        keys[place] = key
    return mine


@cuda.jit(device=True)
def gather(keys, capacity, most_groups, want, groups, shift, low, best, threads, at):
    """Make ``keys[:n]`` those of ids that can be among the ``want`` best, in no order; n, up to RANKED, and whether ids
    may have been left out.

    keys: the heads in ``[:groups]``, of which ``want`` reach ``low`` unless it is NONE; ``best`` is the largest. Behind
    ``capacity`` is room for a key of each thread.
    """
    chosen = cuda.shared.array(_CHOSEN, np.int32)
    taken = cuda.shared.array(1, np.int32)
    filled = cuda.shared.array(1, np.int32)
    tid, first, n, scanned = thread(), 0, groups, 0
    if tid == 0:
        taken[0] = 0
    for k in range(rounds(_CHOSEN, threads)):
        if tid + k * threads < _CHOSEN:
            chosen[tid + k * threads] = groups  # which has no ids
    while True:
        floor, reached = _threshold(keys, first, n, capacity, want, low, best, threads)
        narrowed = scanned > 0 or reached == want
        if scanned == 0:
            scanned = reached
            for k in range(rounds(most_groups, threads)):
                g = tid + k * threads
                if g < groups and keys[g] >= floor:
                    chosen[cuda.atomic.add(taken, 0, 1)] = g
        if tid == 0:
            filled[0] = 0
        cuda.syncthreads()
        mine = _sift(keys, capacity, floor, scanned << shift, shift, chosen, filled, threads, at)
        keys[capacity + tid] = mine
        cuda.syncthreads()
        n = filled[0]
        if n <= RANKED:
            return n, narrowed
        first, low = 0, floor
        if n > capacity:
            # At most ``want`` threads have seen a key that reaches the bound found next, so their keys have room.
            first, n = capacity, threads


@cuda.jit(device=True)
def rank(keys, n, listed, threads):
    """Put the LISTED best of ``keys[:n]``, which are all different, into ``listed``, descending. n <= RANKED."""
    for k in range(rounds(RANKED, threads)):
        i = thread() + k * threads
        if i < n:
            key, place = keys[i], 0
            for j in range(n):
                place += 1 if keys[j] > key else 0
            if place < LISTED:
                listed[place] = key
    cuda.syncthreads()

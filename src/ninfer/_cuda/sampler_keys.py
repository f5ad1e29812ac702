"""What the sampler knows of one id at one position: its key, its weight, the random numbers. Device functions.

An id's key orders by value, then by lower id, and is unique; 0 is an id that is not legal.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
from numba import cuda

BROKEN = np.uint64(0xFFFFFFFFFFFFFFFF)
NONE = np.uint64(0)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SIGN = np.uint64(0x80000000)
_BYTE = np.uint32(8)
_BITS = np.uint32(31)
_ONE = np.uint32(1)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
F0, F1 = np.float32(0.0), np.float32(1.0)
_UNIT = np.float32(2.0**-24)
_NAN, _INFINITY = np.float32(math.nan), np.float32(math.inf)
AT_ONCE = 32
"""Ids that ``look_up`` takes, at most; those of one thread, whose registers they are."""

Position = namedtuple(
    "Position", "p b w before V logits masks counts lane masked presence frequency temperature drafts first_draft"
)
"""One position ``p``, column ``w`` of row ``b``: where its logits and mask are, how they are penalised, and the
``before`` drafts of its row from ``drafts[first_draft]`` on that precede it."""


@cuda.jit(device=True)
def uniform(seed_low, seed_high, index, purpose):
    """fp32 in [0, 1): word 0 of Philox4x32-10 (Salmon et al., 2011) at counter (index, purpose, 0), key seed."""
    i = np.uint64(index)
    x0, x1, x2, x3 = i & _LOW, i >> _HALF, np.uint64(purpose), np.uint64(0)
    y0, y1 = np.uint64(seed_low), np.uint64(seed_high)
    for _ in range(10):
        p0 = _M0 * x0
        p1 = _M1 * x2
        x0, x1, x2, x3 = (p1 >> _HALF) ^ x1 ^ y0, p1 & _LOW, (p0 >> _HALF) ^ x3 ^ y1, p0 & _LOW
        y0 = (y0 + _W0) & _LOW
        y1 = (y1 + _W1) & _LOW
    return np.float32(np.uint32(x0) >> _BYTE) * _UNIT


@cuda.jit(device=True)
def order_key(value, token):
    bits = np.uint64(np.float32(value + F0).view(np.uint32))
    flipped = (bits ^ _LOW) if bits & _SIGN else (bits | _SIGN)
    return (flipped << _HALF) | (_LOW - np.uint64(token))


@cuda.jit(device=True)
def token_of(key):
    return np.int32(_LOW - (key & _LOW))


@cuda.jit(device=True)
def value_of(key):
    flipped = key >> _HALF
    bits = (flipped ^ _SIGN) if flipped & _SIGN else (flipped ^ _LOW)
    return np.uint32(bits).view(np.float32)


@cuda.jit(device=True)
def exp(x):
    return np.float32(math.exp(np.float32(x)))


@cuda.jit(device=True)
def weight_of(key, top, temperature):
    return exp((value_of(key) - top) / temperature)


@cuda.jit(device=True)
def penalised(z, n, at):
    """Logit of an id that has been seen ``n`` times."""
    if n > 0:  # in float64 the product is exact, so that no machine can round it differently
        z = z - np.float32(np.float64(at.presence) + np.float64(at.frequency) * np.float64(n))
    return z


@cuda.jit(device=True)
def key_of(v, at):
    """Key of id ``v`` at a position: 0 if it is not legal, BROKEN if not finite."""
    if at.masked and not (at.masks[at.p * ((at.V + 31) >> 5) + (v >> 5)] >> (np.uint32(v) & _BITS)) & _ONE:
        return NONE
    z = at.logits[at.p * at.V + v]
    if not math.isfinite(z):
        return BROKEN
    if at.presence != F0 or at.frequency != F0:
        n = at.counts[at.lane * at.V + v]
        for j in range(at.before):
            if at.drafts[at.first_draft + j] == v:
                n += 1
        z = penalised(z, n, at)
    return order_key(z, v)


@cuda.jit(device=True)
def look_up(ids, n, values, at):
    """``values[:n]`` of ``ids[:n]``: their penalised logits, NaN where the id is not legal or beyond the vocabulary,
    infinity where the logit is not finite. All are on their way at once: one at a time would wait for each."""
    seen = cuda.local.array(AT_ONCE, np.int32)
    for k in range(n):
        values[k] = at.logits[at.p * at.V + min(ids[k], at.V - 1)]
    for k in range(n):
        if not math.isfinite(values[k]):
            values[k] = _INFINITY
    if at.masked:
        for k in range(n):
            v = min(ids[k], at.V - 1)
            word = at.masks[at.p * ((at.V + 31) >> 5) + (v >> 5)]
            values[k] = values[k] if (word >> (np.uint32(v) & _BITS)) & _ONE else _NAN
    if at.presence != F0 or at.frequency != F0:
        for k in range(n):
            seen[k] = at.counts[at.lane * at.V + min(ids[k], at.V - 1)]
        for j in range(at.before):
            draft = at.drafts[at.first_draft + j]
            for k in range(n):
                seen[k] += 1 if draft == ids[k] else 0
        for k in range(n):
            values[k] = penalised(values[k], seen[k], at)
    for k in range(n):
        if ids[k] >= at.V:
            values[k] = _NAN


@cuda.jit(device=True)
def position(p, W, V, columns, logits, masks, counts, real, whole, drafts):
    b = np.int32(np.uint32(p) // np.uint32(W))  # of 32 bits: a division of 64 is a hundred instructions
    w = p - b * W
    before = w if columns else 0
    return Position(
        p, b, w, before, V, logits, masks, counts, whole[4 * b + 3], whole[4 * b + 2] != 0, real[5 * b + 3],
        real[5 * b + 4], real[5 * b], drafts, columns * b,
    )  # fmt: skip


@cuda.jit(device=True)
def thread():
    """Number of the thread, known to be no negative index: Numba would look whether it counts from an array's end."""
    return np.int64(np.uint32(cuda.threadIdx.x))


@cuda.jit(device=True)
def rounds(n, threads):
    """How often ``threads`` go over up to ``n`` things. Loops over a number that the compiler knows do not become code
    for four rounds and for the rest, which is fetched to be executed once."""
    return (n + threads - 1) // threads

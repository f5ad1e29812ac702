"""Rows of cached keys and values as a plane stores them: fp32, bf16, or int8 with an fp16 scale for 64 features."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from ninfer._cpu.kernels.scales import half
from ninfer._cpu.kernels.simd import f32, fill, load_bf16, load_i8, load_part, store_bf16, store_part, u8, u16

F32, BF16, INT8 = range(3)
"""How a plane is stored."""

CODES = {"f32": F32, "bf16": BF16, "i8": INT8}

SCALED = 64
"""Features of a head that share a scale."""

_LARGEST_HALF = 0x7BFF


@njit
def _half_word(x):
    """The fp16 word of a number >= 0, to nearest even, at most the largest finite one."""
    if x == 0.0:
        return 0
    _, exponent = math.frexp(x)
    exponent = max(exponent - 1, -14)
    steps = types.int64(np.rint(math.ldexp(x, 10 - exponent)))  # of 2^-10 of the binade, in which a half counts
    return min(((exponent + 14) << 10) + steps, _LARGEST_HALF)


@njit
def put_row(plane, scales, row, x, hd, storage, room):
    """Row number ``row`` of a plane <- x [hd]. ``room``: hd bf16 words to work in."""
    place = row * hd
    if storage == F32:
        for i in range(0, hd, 16):
            store_part(f32(plane), place + i, load_part(x, i, hd - i), hd - i)
        return
    words = u16(plane + 2 * place if storage == BF16 else room)
    for i in range(0, hd, 16):
        store_bf16(words, i, load_part(x, i, hd - i), hd - i)
    if storage == BF16:
        return
    groups = (hd + SCALED - 1) // SCALED
    for i in range(0, hd, 16):  # what bf16 keeps of it
        store_part(x, i, load_bf16(u16(room), i, hd - i), hd - i)
    for g in range(groups):
        first, last = g * SCALED, min((g + 1) * SCALED, hd)
        peak = types.float32(0.0)
        for i in range(first, last):
            peak = max(peak, abs(x[i]))
        word = _half_word(types.float64(peak / types.float32(127.0)))
        u16(scales)[row * groups + g] = types.uint16(word)
        scale = half(types.uint16(word))
        inverse = types.float32(0.0) if scale == 0.0 else types.float32(1.0) / scale
        for i in range(first, last):
            code = min(max(np.rint(types.float32(x[i] * inverse)), -127.0), 127.0)
            u8(plane)[place + i] = types.uint8(types.int64(code) & 255)


@njit
def get_row(out, plane, scales, row, hd, storage):
    """out [hd, padded with zeros to 16] <- row number ``row`` of a plane."""
    place, groups = row * hd, (hd + SCALED - 1) // SCALED
    for i in range(0, (hd + 15) // 16 * 16, 16):
        if storage == BF16:
            x = load_bf16(u16(plane), place + i, hd - i)
        elif storage == F32:
            x = load_part(f32(plane), place + i, hd - i)
        else:
            x = load_i8(u8(plane), place + i, hd - i) * fill(half(u16(scales)[row * groups + i // SCALED]))
        store_part(out, i, x, 16)

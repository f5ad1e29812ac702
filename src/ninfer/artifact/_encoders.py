"""Encoder loops, compiled by Numba, parallel over rows; imported by :mod:`encoding` when first needed.

Every arithmetic step is a binary32 operation rounded to nearest even; there is no fast-math, so results are
the same bits everywhere. Magnitudes are compared as integers (the order of positive floats is that of their
bits), which also finds infinities and NaNs and lets the compiler vectorise. ``status[row]`` becomes nonzero
where the input is not finite or its scale would not be.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import numba as nb
import numpy as np

from ninfer.native import jit

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_TASK = 16  # rows one thread takes at a time
_jit = jit(error_model="numpy", nogil=True)
_parallel = jit(error_model="numpy", parallel=True)


@_jit
def _bits(value):
    return np.float32(value).view(np.uint32)


@_jit
def _float(bits):
    return np.uint32(bits).view(np.float32)


@_jit
def _largest(bits):
    """The largest magnitude, as float bits."""
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = np.uint32(max(largest, bits[i] & _MAGNITUDE))
    return largest


@_jit
def _round_bits(bits, drop):
    """Positive float bits rounded to nearest even at bit ``drop``, shifted down."""
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    return np.uint32((bits + half + ((bits >> drop) & np.uint32(1))) >> drop)


@_jit
def _f16_word(value):
    """The binary16 word of a positive float32; 0x7C00 when it rounds beyond the largest finite one."""
    bits = _bits(value)
    if bits >= np.uint32(0x477FF000):
        return np.uint32(0x7C00)
    if bits < np.uint32(0x38800000):
        return np.uint32(np.rint(np.float32(value) * np.float32(16777216.0)))
    return np.uint32(_round_bits(bits, np.uint32(13)) - np.uint32(112 << 10))


@_jit
def _f16_value(word):
    """The value of a positive finite binary16 word."""
    if word < np.uint32(0x400):
        return np.float32(np.float32(word) * np.float32(2.0**-24))
    return _float((word + np.uint32(112 << 10)) << np.uint32(13))


@_jit
def _e4m3_word(bits):
    """The E4M3FN byte, without sign, of the float magnitude in ``bits``, which must not exceed 448."""
    small = np.uint32(np.rint(_float(bits) * np.float32(512.0)))  # below 2**-6: steps of 2**-9
    large = np.uint32(_round_bits(bits, np.uint32(20)) - np.uint32(120 << 3))
    return small if bits < np.uint32(0x3C800000) else large


@_jit
def _group_codes(values, inverse, qmin, qmax, lanes):
    for i in range(values.size):
        code = np.rint(values[i] * inverse)
        lanes[i] = np.int8(min(max(code, np.float32(qmin)), np.float32(qmax)))


@_jit
def _pack(lanes, width, codes, high):
    """One group's codes (int8) into its low-bit bytes and, for 5 and 6 bits, its high-bit bytes."""
    if width == 8:
        for i in range(32):
            codes[i] = np.uint8(lanes[i])
        return
    for i in range(32):
        codes[i] = np.uint8((lanes[2 * i] & 15) | (lanes[2 * i + 1] << 4))
    if width == 5:
        for i in range(8):
            byte = 0
            for j in range(8):
                byte |= ((lanes[8 * i + j] >> 4) & 1) << j
            high[i] = np.uint8(byte)
    elif width == 6:
        for i in range(16):
            byte = 0
            for j in range(4):
                byte |= ((lanes[4 * i + j] >> 4) & 3) << (2 * j)
            high[i] = np.uint8(byte)


@_jit
def _grouped_rows(first, last, values, bits, codes, high, scales, status, width, group, qmin, qmax):
    columns, groups = values.shape[1], -(-values.shape[1] // group)
    high_bytes = high.shape[1] // scales.shape[1]
    lanes = np.zeros(group, np.int8)
    for row in range(first, last):
        for g in range(groups):
            begin, end = g * group, min((g + 1) * group, columns)
            largest = _largest(bits[row, begin:end])
            if largest >= _INFINITY:
                status[row] = 1
            if largest == np.uint32(0) or largest >= _INFINITY:
                continue  # the planes are zero already
            word = max(_f16_word(_float(largest) / np.float32(qmax)), np.uint32(1))
            if word == np.uint32(0x7C00):
                status[row] = 1
            scales[row, g] = np.uint16(word)
            lanes[end - begin :] = 0
            _group_codes(values[row, begin:end], np.float32(1.0) / _f16_value(word), qmin, qmax, lanes)
            upper = high[row, g * high_bytes : (g + 1) * high_bytes]
            _pack(lanes, width, codes[row, g * 32 : (g + 1) * 32], upper)


@_jit
def _fp8_rows(first, last, values, bits, codes, scales, status):
    columns = values.shape[1]
    words = np.empty(columns, np.uint32)
    scaled = words.view(np.float32)
    for row in range(first, last):
        for i in range(columns):  # the input is bfloat16, expanded
            words[i] = _round_bits(bits[row, i], np.uint32(16)) << np.uint32(16)
        largest = _largest(words)
        if largest >= _INFINITY or _largest(bits[row]) >= _INFINITY:
            status[row] = 1
            continue
        if largest == np.uint32(0):
            continue
        raw = np.float32(_float(largest) / np.float32(448.0))
        word = max(_round_bits(_bits(raw), np.uint32(16)), np.uint32(1))
        scales[row, 0] = np.uint16(word)
        scale = _float(word << np.uint32(16))
        inverse = np.float32(1.0) / scale
        if _bits(inverse) == _INFINITY:  # a scale below 2**-128 has no binary32 reciprocal
            for i in range(columns):
                scaled[i] /= scale
        else:
            for i in range(columns):
                scaled[i] *= inverse
        for i in range(columns):
            scaled[i] = min(max(scaled[i], np.float32(-448.0)), np.float32(448.0))
        for i in range(columns):
            sign = (words[i] >> np.uint32(24)) & np.uint32(128)
            codes[row, i] = np.uint8(_e4m3_word(words[i] & _MAGNITUDE) | sign)


@_jit
def _nvfp4_rows(first, last, values, bits, codes, scales, status, divisor, e4m3):
    nibbles = np.empty(16, np.uint8)
    for row in range(first, last):
        for g in range(scales.shape[1]):
            x, x_bits = values[row, g * 16 : g * 16 + 16], bits[row, g * 16 : g * 16 + 16]
            largest = _largest(x_bits)
            if largest >= _INFINITY:
                status[row] = 1
            if largest == np.uint32(0) or largest >= _INFINITY:
                continue
            ratio = np.float32(np.float32(_float(largest) * divisor) / np.float32(6.0))
            word = max(_e4m3_word(_bits(min(ratio, np.float32(448.0)))), np.uint32(1))
            scales[row, g] = np.uint8(word)
            scale = e4m3[word]
            for i in range(16):
                v = abs(np.float32(np.float32(x[i] * divisor) / scale))
                code = (v > 0.25) + (v >= 0.75) + (v > 1.25) + (v >= 1.75)  # ties to the even word
                code += (v > 2.5) + (v >= 3.5) + (v > 5.0)
                nibbles[i] = np.uint8(code | ((x_bits[i] >> np.uint32(28)) & np.uint32(8)))
            for i in range(8):
                codes[row, g * 8 + i] = np.uint8(nibbles[2 * i] | (nibbles[2 * i + 1] << 4))


@_parallel
def grouped(values, bits, codes, high, scales, status, width, group, qmin, qmax):
    """values float32 [m, K], bits the same as uint32; codes, high uint8 [m, .]; scales uint16 [m, groups].

    The outputs arrive zeroed.
    """
    rows = values.shape[0]
    for b in nb.prange(-(-rows // _TASK)):
        first, last = b * _TASK, min(rows, (b + 1) * _TASK)
        _grouped_rows(first, last, values, bits, codes, high, scales, status, width, group, qmin, qmax)


@_parallel
def fp8(values, bits, codes, scales, status):
    """values float32 [m, K], bits the same as uint32; codes uint8 [m, K]; scales bfloat16 words [m, 1].

    The outputs arrive zeroed.
    """
    rows = values.shape[0]
    for b in nb.prange(-(-rows // _TASK)):
        _fp8_rows(b * _TASK, min(rows, (b + 1) * _TASK), values, bits, codes, scales, status)


@_parallel
def nvfp4(values, bits, codes, scales, status, divisor, e4m3):
    """values float32 [m, K], bits the same as uint32; codes uint8 [m, K/2]; scales uint8 [m, K/16].

    The outputs arrive zeroed; the scales are in natural order.
    """
    rows = values.shape[0]
    for b in nb.prange(-(-rows // _TASK)):
        _nvfp4_rows(b * _TASK, min(rows, (b + 1) * _TASK), values, bits, codes, scales, status, divisor, e4m3)

"""Kernels over rows of features: norms, embedding, gathers, scatters, copies."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.products import (
    AUX_FACTOR,
    HEAD,
    HEAD_COLS,
    HEAD_ROWS,
    HEAD_SEGMENTS,
    SEG,
    SEG_BEGIN,
    SEG_END,
    SEG_FIRST,
    SEG_UNPACK,
    WS_AUX,
    WS_TILE,
)
from ninfer._cpu.kernels.simd import (
    call6,
    f32,
    fill,
    fma,
    i32p,
    i64p,
    load_bf16,
    load_part,
    real,
    store_part,
    total,
    u8,
    u16,
)


@njit
def inverse_rms(x, n, eps):
    """1 / sqrt(mean(x^2) + eps) of n fp32 at ``x``."""
    acc = fill(np.float32(0.0))
    for i in range(0, n, 16):
        v = load_part(x, i, n - i)
        acc = fma(v, v, acc)
    return types.float32(1.0 / math.sqrt(total(acc) / n + eps))


@njit
def norm1(out, x, weight, n, eps):
    """out = x * inverse_rms * (1 + weight); weight bf16."""
    one, scale = fill(np.float32(1.0)), fill(inverse_rms(x, n, eps))
    for i in range(0, n, 16):
        w = one + load_bf16(weight, i, n - i)
        store_part(out, i, load_part(x, i, n - i) * scale * w, n - i)


@njit
def chosen(index, t, rows):
    """index[t] of i32 at ``index``, 0 where that is no row of ``rows``; t itself where there is no index."""
    if index == 0:
        return types.int64(t)
    row = types.int64(i32p(index)[t])
    return row if 0 <= row < rows else types.int64(0)


@kernel("norm")
def norm(a, begin, end, ws):
    """out[t] = norm1(x[index[t]], weight). Words: out, x, weight, index or 0, features, rows of x, eps."""
    w = i64p(a)
    n = w[4]
    for t in range(begin, end):
        row = chosen(w[3], t, w[5])
        norm1(f32(w[0] + 4 * t * n), f32(w[1] + 4 * row * n), u16(w[2]), n, real(w[6]))


@kernel("norm_pair")
def norm_pair(a, begin, end, ws):
    """out[t] = [norm1(x[t], u), norm1(y[t], v)]. Words: out, x, y, u, v, features, eps."""
    w = i64p(a)
    row = 4 * w[5]
    for t in range(begin, end):
        norm1(f32(w[0] + 2 * t * row), f32(w[1] + t * row), u16(w[3]), w[5], real(w[6]))
        norm1(f32(w[0] + (2 * t + 1) * row), f32(w[2] + t * row), u16(w[4]), w[5], real(w[6]))


@kernel("draft_rows")
def draft_rows(a, begin, end, ws):
    """Words: index, start, width, positions, accepted, start and positions of the rows, B, W, S, limit; one task."""
    w = i64p(a)
    B, W = w[7], w[8]
    for b in range(B):
        n = types.int64(i32p(w[4])[b])
        i32p(w[0])[b] = b * W + n
        for s in range(w[9]):
            ordinal = i32p(w[5])[b] + n + 1 + s
            i32p(w[1])[s * B + b] = min(ordinal, w[10] - 1)
            i32p(w[2])[s * B + b] = 1 if ordinal < w[10] else 0
            for axis in range(3):
                i32p(w[3])[(3 * s + axis) * B + b] = i32p(w[6])[(axis * B + b) * W + n] + 1 + s


@kernel("embed")
def embed(a, begin, end, ws):
    """out[t] = table[tokens[t]]. Words: out, table, tokens."""
    w = i64p(a)
    table = w[1]
    m = i64p(table)
    n = m[HEAD_COLS]
    tile, aux = ws + WS_TILE, ws + WS_AUX
    factors = aux + AUX_FACTOR
    for t in range(begin, end):
        token = types.int64(i32p(w[2])[t])
        if token < 0 or token >= m[HEAD_ROWS]:
            token = 0
        for j in range(m[HEAD_SEGMENTS]):
            seg = table + 8 * (HEAD + j * SEG)
            s = i64p(seg)
            if s[SEG_BEGIN] <= token < s[SEG_END]:
                call6(s[SEG_UNPACK], seg, s[SEG_FIRST] + token - s[SEG_BEGIN], 1, tile, factors, aux)
        scale = fill(f32(factors)[0])
        out, row = f32(w[0] + 4 * t * n), f32(tile)
        for i in range(0, n, 16):
            store_part(out, i, load_part(row, i, n - i) * scale, n - i)


@njit
def _move(out, source, n):
    """n bytes."""
    to, of = u8(out), u8(source)
    for i in range(n):
        to[i] = of[i]


@kernel("gather")
def gather(a, begin, end, ws):
    """dst[i] = src[index[i]]. Words: dst, src, index, bytes of a row, rows of src."""
    w = i64p(a)
    for i in range(begin, end):
        row = types.int64(i32p(w[2])[i])
        if 0 <= row < w[4]:
            _move(w[0] + i * w[3], w[1] + row * w[3], w[3])


@kernel("scatter")
def scatter(a, begin, end, ws):
    """dst[index[i]] = src[i]. Words: dst, src, index, bytes of a row, rows of dst."""
    w = i64p(a)
    for i in range(begin, end):
        row = types.int64(i32p(w[2])[i])
        if 0 <= row < w[4]:
            _move(w[0] + row * w[3], w[1] + i * w[3], w[3])


@kernel("copy")
def copy(a, begin, end, ws):
    """Words: dst, src, bytes; one task."""
    w = i64p(a)
    _move(w[0], w[1], w[2])


@kernel("zero")
def zero(a, begin, end, ws):
    """Words: dst, bytes; one task."""
    w = i64p(a)
    out = u8(w[0])
    for i in range(w[1]):
        out[i] = 0

"""Gated DeltaNet: causal convolution, gates, delta-rule recurrence, gated norm.

The recurrence runs token after token at every width, so a state never depends on how a prompt was cut. Per token and
value head, with the state S decayed by alpha: ``d = beta * (v - alpha * S^T k)``, ``S <- fma(k, d, alpha * S)``,
``o = S^T q``. Columns of S are independent; a strip of them stays in the workspace for all tokens.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.rows import inverse_rms
from ninfer._cpu.kernels.simd import (
    exp,
    f32,
    fill,
    fma,
    i32p,
    i64p,
    lane0,
    load,
    load_bf16,
    load_part,
    real,
    silu,
    store,
    store_part,
    total,
    u16,
)

START, WIDTH, READ, WRITE, COLUMNS, NK, NV, DK, DV, TAPS = range(10)
"""Words every kernel here begins with: addresses of start, width, read and write slots; W; the geometry."""

STRIP = 64
"""Columns of the state a strip holds."""


@njit
def _unit(x, n, extra):
    """x <- x / sqrt(sum x^2 + 1e-6) * extra."""
    acc = fill(np.float32(0.0))
    for i in range(0, n, 16):
        v = load_part(x, i, n - i)
        acc = fma(v, v, acc)
    scale = fill(types.float32(extra / math.sqrt(total(acc) + 1e-6)))
    for i in range(0, n, 16):
        store_part(x, i, load_part(x, i, n - i) * scale, n - i)


@njit
def _decay(g):
    """e^g of one number, as everything here computes it."""
    return lane0(exp(fill(g)))


@kernel("gdn_prepare")
def gdn_prepare(a, begin, end, ws):
    """Convolution, SiLU, L2 norms and gates. A task is a token.

    Words: common; q, k, v, a, b, convolution, a_log, dt_bias, tail, y [T, C], gates [T, nv, 2] (decay, beta),
    record k, g, c (0 without a record).
    """
    w = i64p(a)
    columns, nk, nv, dk, dv, taps = w[COLUMNS], w[NK], w[NV], w[DK], w[DV], w[TAPS]
    channels = 2 * nk * dk + nv * dv
    y, gates, record_k, record_g, record_c = w[19], w[20], w[21], w[22], w[23]
    for t in range(begin, end):
        b, column = t // columns, t % columns
        if column >= i32p(w[WIDTH])[b]:
            continue
        fresh = i32p(w[START])[b] == 0
        tail = f32(w[18] + 4 * types.int64(i32p(w[READ])[b]) * (taps - 1) * channels)
        weights = u16(w[15])
        channel = 0
        for part in range(3):
            n = nv * dv if part == 2 else nk * dk
            x = f32(w[10 + part] + 4 * (t - column) * n)
            out = f32(y + 4 * t * channels)
            for i in range(0, n, 16):
                acc = fill(np.float32(0.0))
                for j in range(taps):
                    at = column - taps + 1 + j
                    if at >= 0:
                        value = load_part(x, at * n + i, n - i)
                    elif fresh:
                        value = fill(np.float32(0.0))
                    else:
                        value = load_part(tail, (taps - 1 + at) * channels + channel + i, n - i)
                    acc = fma(load_bf16(weights, j * channels + channel + i, n - i), value, acc)
                store_part(out, channel + i, silu(acc), n - i)
                if record_c:
                    value = load_part(x, column * n + i, n - i)
                    store_part(f32(record_c), t * channels + channel + i, value, n - i)
            channel += n
        for h in range(nk):
            _unit(f32(y + 4 * (t * channels + h * dk)), dk, 1.0 / math.sqrt(dk))
            k = f32(y + 4 * (t * channels + (nk + h) * dk))
            _unit(k, dk, 1.0)
            if record_k:
                for i in range(0, dk, 16):
                    store_part(f32(record_k), (t * nk + h) * dk + i, load_part(k, i, dk - i), dk - i)
        for j in range(nv):
            x = types.float64(f32(w[13])[t * nv + j]) + types.float64(f32(w[17])[j])
            soft = x if x > 20.0 else math.log1p(math.exp(x))
            g = types.float32(-math.exp(types.float64(f32(w[16])[j])) * soft)
            gate = f32(gates + 8 * (t * nv + j))
            gate[0] = _decay(g)
            gate[1] = types.float32(1.0 / (1.0 + math.exp(-types.float64(f32(w[14])[t * nv + j]))))
            if record_g:
                f32(record_g)[t * nv + j] = g


@njit
def _load_strip(strip, source, first, dk, dv, fresh):
    """strip [dk, STRIP] <- columns from ``first`` of the state [dk, dv] at ``source``."""
    for i in range(dk):
        for j in range(0, STRIP, 16):
            left = 0 if fresh else dv - first - j
            store(strip, i * STRIP + j, load_part(source, i * dv + first + j, left))


@njit
def _store_strip(target, strip, first, dk, dv):
    for i in range(dk):
        for j in range(0, min(STRIP, dv - first), 16):
            store_part(target, i * dv + first + j, load(strip, i * STRIP + j), dv - first - j)


@njit
def _read(strip, k, dk):
    """The four vectors S^T k of a strip."""
    zero = fill(np.float32(0.0))
    p0, p1, p2, p3 = zero, zero, zero, zero
    for i in range(dk):
        x = fill(k[i])
        p0 = fma(x, load(strip, i * STRIP), p0)
        p1 = fma(x, load(strip, i * STRIP + 16), p1)
        p2 = fma(x, load(strip, i * STRIP + 32), p2)
        p3 = fma(x, load(strip, i * STRIP + 48), p3)
    return p0, p1, p2, p3


@njit
def _advance(strip, decay, d, k, q, after, dk, out):
    """S <- decay * S + k d^T; out [STRIP] = S^T q; returns S^T after, what the next token's error starts from."""
    zero, alpha = fill(np.float32(0.0)), fill(decay)
    d0, d1, d2, d3 = load(d, 0), load(d, 16), load(d, 32), load(d, 48)
    o0, o1, o2, o3 = zero, zero, zero, zero
    p0, p1, p2, p3 = zero, zero, zero, zero
    for i in range(dk):
        x, y, z = fill(k[i]), fill(q[i]), fill(after[i])
        s = fma(x, d0, alpha * load(strip, i * STRIP))
        store(strip, i * STRIP, s)
        o0, p0 = fma(y, s, o0), fma(z, s, p0)
        s = fma(x, d1, alpha * load(strip, i * STRIP + 16))
        store(strip, i * STRIP + 16, s)
        o1, p1 = fma(y, s, o1), fma(z, s, p1)
        s = fma(x, d2, alpha * load(strip, i * STRIP + 32))
        store(strip, i * STRIP + 32, s)
        o2, p2 = fma(y, s, o2), fma(z, s, p2)
        s = fma(x, d3, alpha * load(strip, i * STRIP + 48))
        store(strip, i * STRIP + 48, s)
        o3, p3 = fma(y, s, o3), fma(z, s, p3)
    store(out, 0, o0)
    store(out, 16, o1)
    store(out, 32, o2)
    store(out, 48, o3)
    return p0, p1, p2, p3


@kernel("gdn_scan")
def gdn_scan(a, begin, end, ws):
    """Recurrence and gated norm. Tasks: (row, value head), then one per row that moves the tail.

    Words: common; q, k, v (convolution inputs), z, norm, eps, state, tail, y, gates, out, record d (0 without), rows.
    """
    w = i64p(a)
    columns, nk, nv, dk, dv, taps = w[COLUMNS], w[NK], w[NV], w[DK], w[DV], w[TAPS]
    channels = 2 * nk * dk + nv * dv
    state, y, gates, out, record, rows = w[16], w[18], w[19], w[20], w[21], w[22]
    strip, d, o = ws, ws + 4 * dk * STRIP, ws + 4 * dk * STRIP + 4 * STRIP
    for task in range(begin, end):
        b = task // nv if task < rows * nv else task - rows * nv
        width = types.int64(i32p(w[WIDTH])[b])
        fresh = i32p(w[START])[b] == 0
        read, write = types.int64(i32p(w[READ])[b]), types.int64(i32p(w[WRITE])[b])
        if width <= 0:
            continue
        if task >= rows * nv:
            if record == 0:
                size = 4 * (taps - 1) * channels
                old, new, channel = f32(w[17] + read * size), f32(w[17] + write * size), 0
                for part in range(3):
                    n = nv * dv if part == 2 else nk * dk
                    x = f32(w[10 + part] + 4 * b * columns * n)
                    _move_tail(new, old, x, n, channel, channels, width, taps, fresh)
                    channel += n
            continue
        j = task % nv
        head = j // (nv // nk)
        first_row = y + 4 * b * columns * channels
        for first in range(0, dv, STRIP):
            source = f32(state + 4 * (read * nv + j) * dk * dv)
            _load_strip(f32(strip), source, first, dk, dv, fresh)
            p0, p1, p2, p3 = _read(f32(strip), f32(first_row + 4 * (nk + head) * dk), dk)
            for column in range(width):
                t = b * columns + column
                here = first_row + 4 * column * channels
                gate = f32(gates + 8 * (t * nv + j))
                alpha, beta = fill(gate[0]), fill(gate[1])
                v = f32(here + 4 * (2 * nk * dk + j * dv))
                for part in range(4):
                    p = p0 if part == 0 else (p1 if part == 1 else (p2 if part == 2 else p3))
                    lane = first + 16 * part
                    delta = beta * (load_part(v, lane, dv - lane) - alpha * p)
                    store(f32(d), 16 * part, delta)
                    if record:
                        store_part(f32(record), (t * nv + j) * dv + lane, delta, dv - lane)
                k, q = here + 4 * (nk + head) * dk, here + 4 * head * dk
                after = k + 4 * channels if column + 1 < width else k
                p0, p1, p2, p3 = _advance(f32(strip), gate[0], f32(d), f32(k), f32(q), f32(after), dk, f32(o))
                for lane in range(0, min(STRIP, dv - first), 16):
                    place = (t * nv + j) * dv + first + lane
                    store_part(f32(out), place, load(f32(o), lane), dv - first - lane)
            if record == 0:
                _store_strip(f32(state + 4 * (write * nv + j) * dk * dv), f32(strip), first, dk, dv)
        for column in range(width):
            place = ((b * columns + column) * nv + j) * dv
            x, z = f32(out + 4 * place), f32(w[13] + 4 * place)
            scale = fill(inverse_rms(x, dv, real(w[15])))
            for i in range(0, dv, 16):
                normed = load_part(x, i, dv - i) * scale * load_bf16(u16(w[14]), i, dv - i)
                store_part(x, i, normed * silu(load_part(z, i, dv - i)), dv - i)


@njit
def _move_tail(new, old, x, n, channel, channels, count, taps, fresh):
    """Channels from ``channel`` on of the tail ``new`` <- the last taps-1 rows of [``old`` | ``count`` rows of x]."""
    for j in range(taps - 1):
        at = count - (taps - 1) + j
        for i in range(n):
            if at >= 0:
                value = x[at * n + i]
            elif fresh:
                value = types.float32(0.0)
            else:
                value = old[(taps - 1 + at) * channels + channel + i]
            new[j * channels + channel + i] = value


@kernel("gdn_fold")
def gdn_fold(a, begin, end, ws):
    """Replay recorded columns into the states, in the recurrence's own order. Tasks: those of ``gdn_scan``, by layer.

    Words: common; accepted, rows; of every layer state, tail, record k, d, g, c.
    """
    w = i64p(a)
    columns, nk, nv, dk, dv, taps = w[COLUMNS], w[NK], w[NV], w[DK], w[DV], w[TAPS]
    channels = 2 * nk * dk + nv * dv
    rows = w[11]
    for each in range(begin, end):
        layer, task = each // (rows * (nv + 1)), each % (rows * (nv + 1))
        own = i64p(a + 8 * (12 + 6 * layer))
        state, tails, record_k, record_d, record_g, record_c = own[0], own[1], own[2], own[3], own[4], own[5]
        b = task // nv if task < rows * nv else task - rows * nv
        count = min(types.int64(i32p(w[10])[b]), types.int64(i32p(w[WIDTH])[b]))
        fresh = i32p(w[START])[b] == 0
        read, write = types.int64(i32p(w[READ])[b]), types.int64(i32p(w[WRITE])[b])
        if count <= 0:
            continue
        if task < rows * nv:
            j = task % nv
            for column in range(count):
                f32(ws)[column] = _decay(f32(record_g)[(b * columns + column) * nv + j])
            source, target = f32(state + 4 * (read * nv + j) * dk * dv), f32(state + 4 * (write * nv + j) * dk * dv)
            for i in range(dk):
                for lane in range(0, dv, 16):
                    s = load_part(source, i * dv + lane, 0 if fresh else dv - lane)
                    for column in range(count):
                        t = b * columns + column
                        k = fill(f32(record_k)[(t * nk + j // (nv // nk)) * dk + i])
                        d = load_part(f32(record_d), (t * nv + j) * dv + lane, dv - lane)
                        s = fma(k, d, fill(f32(ws)[column]) * s)
                    store_part(target, i * dv + lane, s, dv - lane)
        else:
            size = 4 * (taps - 1) * channels
            old, new = f32(tails + read * size), f32(tails + write * size)
            inputs = f32(record_c + 4 * b * columns * channels)
            _move_tail(new, old, inputs, channels, 0, channels, count, taps, fresh)

"""Kernels of block drafting: norms and rotation of heads, the context's keys and values, attention of a block."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.rows import chosen, inverse_rms
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
    store,
    store_part,
    total,
    u16,
    u32p,
)
from ninfer._cpu.sampling import uniform

PAGE = 64
PROPOSAL = 5
"""Purpose of the random numbers that drafts are drawn with."""


@njit
def _norm0(out, x, weight, n, eps):
    """out = x * inverse_rms * weight; weight bf16."""
    scale = fill(inverse_rms(x, n, eps))
    for i in range(0, n, 16):
        store_part(out, i, load_part(x, i, n - i) * scale * load_bf16(weight, i, n - i), n - i)


@kernel("block_place")
def place(a, begin, end, ws):
    """out[t, first : first + n] = x[t]. Words: out, x, n, features of out, first."""
    w = i64p(a)
    n = w[2]
    for t in range(begin, end):
        out, x = f32(w[0] + 4 * (t * w[3] + w[4])), f32(w[1] + 4 * t * n)
        for i in range(0, n, 16):
            store_part(out, i, load_part(x, i, n - i), n - i)


@kernel("block_norm")
def norm(a, begin, end, ws):
    """out[t] = norm0(x[index[t]], weight). Words: out, x, weight, index or 0, features, rows of x, eps."""
    w = i64p(a)
    n = w[4]
    for t in range(begin, end):
        row = chosen(w[3], t, w[5])
        _norm0(f32(w[0] + 4 * t * n), f32(w[1] + 4 * row * n), u16(w[2]), n, real(w[6]))


@kernel("block_rotate")
def rotate(a, begin, end, ws):
    """Normalise and rotate a token's heads in place. Words: x, norm, start, W, heads, hd, rot, frequencies, eps."""
    w = i64p(a)
    hd, half, frequency = w[5], w[6] // 2, f32(w[7])
    for t in range(begin, end):
        ordinal = types.int64(i32p(w[2])[t // w[3]]) + t % w[3]
        for h in range(w[4]):
            x = f32(w[0] + 4 * (t * w[4] + h) * hd)
            _norm0(x, x, u16(w[1]), hd, real(w[8]))
            for j in range(half):
                angle = types.float32(ordinal) * frequency[j]
                cosine = types.float32(math.cos(types.float64(angle)))
                sine = types.float32(math.sin(types.float64(angle)))
                low, high = x[j], x[j + half]
                x[j] = low * cosine - high * sine
                x[j + half] = high * cosine + low * sine


@njit
def _row(blocks, row, length, pages, ordinal, hk, head):
    """Which row of hd features holds an ordinal's head; ``blocks``: an address, or 0."""
    page = row * length + ordinal // PAGE % length
    if blocks != 0:
        page = types.int64(i32p(blocks)[page])
    return (min(max(page, 0), pages - 1) * hk + head) * PAGE + ordinal % PAGE


@kernel("block_append")
def append(a, begin, end, ws):
    """A task is a token. Words: k, v, keys, values, blocks or 0, rows, start, width, W, length, pages, hk, hd."""
    w = i64p(a)
    hk, hd = w[11], w[12]
    for t in range(begin, end):
        b, column = t // w[8], t % w[8]
        width = types.int64(i32p(w[7])[b])
        if column >= width or column < width - w[9] * PAGE:
            continue
        ordinal, row = types.int64(i32p(w[6])[b]) + column, types.int64(i32p(w[5])[b])
        for h in range(hk):
            to = 4 * hd * _row(w[4], row, w[9], w[10], ordinal, hk, h)
            source = 4 * (t * hk + h) * hd
            for i in range(0, hd, 16):
                store_part(f32(w[2] + to), i, load_part(f32(w[0] + source), i, hd - i), hd - i)
                store_part(f32(w[3] + to), i, load_part(f32(w[1] + source), i, hd - i), hd - i)


@njit
def _attend(q, k, v, count, acc, numbers, scores, hd):
    """Fold ``count`` <= 64 keys and values, hd features apart, into acc, its peak and its mass."""
    top = numbers[0]
    for p in range(count):
        key = f32(k + 4 * p * hd)
        sums = fill(np.float32(0.0))
        for i in range(0, hd, 16):
            sums = fma(load(q, i), load_part(key, i, hd - i), sums)
        scores[p] = total(sums)
        top = max(top, scores[p])
    scale = exp(fill(numbers[0] - top))
    for i in range(0, hd, 16):
        store(acc, i, load(acc, i) * scale)
    mass = numbers[1] * lane0(scale)
    for p in range(count):
        weight = exp(fill(scores[p] - top))
        mass += lane0(weight)
        value = f32(v + 4 * p * hd)
        for i in range(0, hd, 16):
            store(acc, i, fma(weight, load_part(value, i, hd - i), load(acc, i)))
    numbers[0], numbers[1] = top, mass


@kernel("block_attention")
def attention(a, begin, end, ws):
    """A task is a head of a token.

    Words: out, q, k, v, keys, values, blocks or 0, rows, start, W, length, pages, hq, hk, hd, window or 0, causal.
    """
    w = i64p(a)
    W, hq, hk, hd, window = w[9], w[12], w[13], w[14], w[15]
    padded = (hd + 15) // 16 * 16
    query, acc = f32(ws), f32(ws + 4 * padded)
    scores, numbers = f32(ws + 8 * padded), f32(ws + 8 * padded + 4 * PAGE)
    scale = fill(types.float32(1.0 / math.sqrt(hd)))
    for task in range(begin, end):
        t, h = task // hq, task % hq
        b, column, g = t // W, t % W, h // (hq // hk)
        start, row = types.int64(i32p(w[8])[b]), types.int64(i32p(w[7])[b])
        for i in range(0, padded, 16):
            store(query, i, load_part(f32(w[1] + 4 * task * hd), i, hd - i) * scale)
            store(acc, i, fill(np.float32(0.0)))
        numbers[0], numbers[1] = -np.inf, 0.0
        ordinal = max(0, start - w[10] * PAGE)
        if window:
            ordinal = max(ordinal, start + column - window + 1)
        while ordinal < start:
            count = min(start - ordinal, PAGE - ordinal % PAGE)
            at = 4 * hd * _row(w[6], row, w[10], w[11], ordinal, hk, g)
            _attend(query, w[4] + at, w[5] + at, count, acc, numbers, scores, hd)
            ordinal += count
        first, last = 0, column + 1 if w[16] else W
        if window:
            first, last = max(0, column - window + 1), min(last, column + window)
        for j in range(first, last):  # a key of the block is hk heads away from the next
            at = 4 * ((b * W + j) * hk + g) * hd
            _attend(query, w[2] + at, w[3] + at, 1, acc, numbers, scores, hd)
        mass = fill(numbers[1])
        for i in range(0, hd, 16):
            store_part(f32(w[0] + 4 * task * hd), i, load(acc, i) / mass, hd - i)


@kernel("block_begin")
def begin_block(a, begin, end, ws):
    """A task is a row. Words: tokens, start, width, decided, kept, start of the rows, columns of those, W, mask."""
    w = i64p(a)
    for b in range(begin, end):
        n = types.int64(i32p(w[4])[b]) + 1
        i32p(w[1])[b] = i32p(w[5])[b] + n
        i32p(w[2])[b] = n
        for i in range(w[7]):
            i32p(w[0])[b * w[7] + i] = w[8]
        i32p(w[0])[b * w[7]] = max(0, i32p(w[3])[b * w[6] + n - 1])


@kernel("block_convolve")
def convolve(a, begin, end, ws):
    """A task is a row. Words: out, x, base, delta, side, columns, taps, H, groups, add."""
    w = i64p(a)
    side, columns, taps, H, groups, add = w[4], w[5], w[6], w[7], w[8], w[9]
    width = H // groups
    for t in range(begin, end):
        out = f32(w[0] + 4 * t * H)
        for h in range(H):
            total = types.float32(0.0)
            for tap in range(min(taps, t % columns + 1)):
                place = (side * taps + tap) * H + h
                base = u16(w[2] + 2 * place)
                weight = lane0(load_bf16(base, 0, 1))
                weight += f32(w[3])[(t * 2 * taps + side * taps + tap) * groups + h // width]
                total += weight * f32(w[1])[(t - tap) * H + h]
            out[h] = out[h] + total if add else total


@njit
def _pair(predecessor, gamma, successor, rank):
    """sum_r predecessor[r] * gamma[r] * successor[r]; two bf16 rows and an fp32 one."""
    sums = fill(np.float32(0.0))
    for i in range(0, rank, 16):
        both = load_bf16(predecessor, i, rank - i) * load_part(gamma, i, rank - i)
        sums = fma(both, load_bf16(successor, i, rank - i), sums)
    return total(sums)


@kernel("block_select")
def select(a, begin, end, ws):
    """A task is a row. Words: token, ids out, q out, ids, scores, stride, count, gamma, predecessor, successor, rank,
    rows of the codebooks, tokens, columns, start, real, seed, B, K."""
    w = i64p(a)
    stride, count, rank, rows, B, K = w[5], w[6], w[10], w[11], w[17], w[18]
    scores = f32(ws)
    for b in range(begin, end):
        temperature = f32(w[15])[5 * b]
        previous = types.int64(i32p(w[12])[b * w[13]])
        for i in range(K):
            at = i * B + b
            book = u16(w[8] + 2 * min(max(previous, 0), rows - 1) * rank)
            best = 0
            for c in range(count):
                token = types.int64(i32p(w[3])[at * stride + c])
                other = u16(w[9] + 2 * min(max(token, 0), rows - 1) * rank)
                scores[c] = f32(w[4])[at * stride + c] + _pair(book, f32(w[7] + 4 * at * rank), other, rank)
                if token < 0:  # fewer candidates than asked for
                    scores[c] = -np.inf
                if scores[c] > scores[best]:
                    best = c
            top, mass = scores[best], types.float32(0.0)
            q = f32(w[2] + 4 * (b * K + i) * count)
            for c in range(count):
                if temperature > 0:
                    q[c] = lane0(exp(fill((scores[c] - top) / temperature)))
                else:
                    q[c] = 1.0 if c == best else 0.0
                mass += q[c]
                i32p(w[1])[(b * K + i) * count + c] = i32p(w[3])[at * stride + c]
            chosen = best
            if temperature > 0:
                index = types.int64(i32p(w[14])[b]) + 1 + i
                u = uniform(u32p(w[16])[2 * b], u32p(w[16])[2 * b + 1], index, PROPOSAL) * mass
                below = types.float32(0.0)
                for c in range(count):
                    if q[c] > 0:
                        chosen = c
                    below += q[c]
                    if below > u:
                        break
                for c in range(count):
                    q[c] /= mass
            previous = types.int64(i32p(w[3])[at * stride + chosen])
            i32p(w[0])[at] = types.int32(previous)

"""Gated attention over paged keys and values.

A column is one query head of one token. Its softmax goes over pages of 64 ordinals in order, inside splits of SPLIT
pages whose results are then merged in order, so a column computes the same bits whether its splits ran side by side
(few tokens) or one after another (many), and whatever columns ran beside it.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.kv import F32, get_row, put_row
from ninfer._cpu.kernels.lanes import VF, at, f32_t, fma_ir, i64, load_ir, splat
from ninfer._cpu.kernels.products import STRETCH, WS_BYTES
from ninfer._cpu.kernels.rows import norm1
from ninfer._cpu.kernels.simd import (
    call8,
    exp,
    f32,
    fill,
    i32p,
    i64p,
    keep,
    lane0,
    largest,
    load,
    load_part,
    real,
    sigmoid,
    store,
    store_part,
    total,
    u16,
)

PAGE = 64
SPLIT = 8
"""Pages of a split: 512 ordinals."""
COLUMNS = 32
"""Columns that share the pages they read, at most, unless one token alone has more."""

START, WIDTH, TABLE, POSITIONS = range(4)
"""Words of the row metadata every kernel here begins with: addresses of start, width, table, positions."""


def workspace(columns: int, hd: int) -> int:
    """Bytes of a thread's workspace that ``attention`` uses for so many columns."""
    padded = (hd + 15) // 16 * 16
    return 4 * (columns * (3 * padded + PAGE + 4) + 2 * PAGE * padded) + 16 * columns


assert workspace(COLUMNS, 512) <= WS_BYTES
assert STRETCH >= 512


@njit
def _rotate(x, cosine, sine, half):
    """Rotate pairs (j, j + half) of ``x`` in place."""
    for j in range(half):
        low, high = x[j], x[j + half]
        x[j] = low * cosine[j] - high * sine[j]
        x[j + half] = high * cosine[j] + low * sine[j]


@kernel("attention_prepare")
def attention_prepare(a, begin, end, ws):
    """Normalise and rotate q in place; normalise, rotate and append k; append v. A task is a token.

    Words: row metadata; tokens, W, q, k, v, query norm, key norm, key plane, value plane, storage, blocks,
    pages of a block row, pages, inverse frequencies, axes, hq, hk, hd, rot, eps, key scales, value scales.
    """
    w = i64p(a)
    tokens, columns = w[4], w[5]
    storage, blocks, length, pages = w[13], i32p(w[14]), w[15], w[16]
    frequency, axes = f32(w[17]), i32p(w[18])
    hq, hk, hd, rot, eps = w[19], w[20], w[21], w[22], real(w[23])
    half = rot // 2
    cosine, sine, head = f32(ws), f32(ws + 4 * half), ws + 8 * half
    room = head + 4 * hd
    for t in range(begin, end):
        b, column = t // columns, t % columns
        if column >= i32p(w[WIDTH])[b]:
            continue
        for j in range(half):
            angle = types.float32(i32p(w[POSITIONS])[axes[j] * tokens + t]) * frequency[j]
            cosine[j] = types.float32(math.cos(types.float64(angle)))
            sine[j] = types.float32(math.sin(types.float64(angle)))
        for h in range(hq):
            q = f32(w[6] + 4 * (t * hq + h) * hd)
            norm1(q, q, u16(w[9]), hd, eps)
            _rotate(q, cosine, sine, half)
        ordinal = types.int64(i32p(w[START])[b]) + column
        if ordinal // PAGE >= length:
            continue
        page = types.int64(blocks[types.int64(i32p(w[TABLE])[b]) * length + ordinal // PAGE])
        if page < 0 or page >= pages:
            continue
        for h in range(hk):
            k = f32(head)
            norm1(k, f32(w[7] + 4 * (t * hk + h) * hd), u16(w[10]), hd, eps)
            _rotate(k, cosine, sine, half)
            row = (page * hk + h) * PAGE + ordinal % PAGE
            put_row(w[11], w[24], row, k, hd, storage, room)
            for i in range(0, hd, 16):
                store_part(k, i, load_part(f32(w[8]), (t * hk + h) * hd + i, hd - i), hd - i)
            put_row(w[12], w[25], row, k, hd, storage, room)


def _make_accumulate(columns: int, vectors: int):
    """Intrinsic: acc[c][:16 * vectors] += sum over p in [first, last) of s[c][p] * v[p][:], p ascending."""

    def codegen(context, b, signature, args):
        acc, acc_stride, s, v, v_stride, first, last = args
        places = [
            at(b, acc, VF, b.add(b.mul(acc_stride, ir.Constant(i64, 4 * c)), ir.Constant(i64, 64 * j)))
            for c in range(columns)
            for j in range(vectors)
        ]
        sums = [cgutils.alloca_once_value(b, load_ir(b, place, 4)) for place in places]
        with cgutils.for_range_slice(b, first, last, ir.Constant(i64, 1), intp=i64) as (p, _):
            row = b.add(v, b.shl(b.mul(p, v_stride), ir.Constant(i64, 2)))
            values = [load_ir(b, at(b, row, VF, ir.Constant(i64, 64 * j)), 4) for j in range(vectors)]
            for c in range(columns):
                offset = b.shl(b.add(p, ir.Constant(i64, PAGE * c)), ir.Constant(i64, 2))
                weight = splat(b, load_ir(b, at(b, s, f32_t, offset), 4))
                for j in range(vectors):
                    cell = sums[c * vectors + j]
                    b.store(fma_ir(b, weight, values[j], b.load(cell)), cell)
        for place, cell in zip(places, sums, strict=True):
            b.store(b.load(cell), place, align=4)
        return context.get_dummy_value()

    @intrinsic
    def accumulate(typingctx, acc, acc_stride, s, v, v_stride, first, last):
        return types.void(*(types.int64,) * 7), codegen

    return accumulate


_four4, _four1 = _make_accumulate(4, 4), _make_accumulate(4, 1)
_two4, _two1 = _make_accumulate(2, 4), _make_accumulate(2, 1)
_one4, _one1 = _make_accumulate(1, 4), _make_accumulate(1, 1)


@njit
def _span(acc, s, v, hd, columns, first, last):
    """acc[c] += s[c] V over the ordinals [first, last) for 1, 2 or 4 columns."""
    i = 0
    while i < hd:
        out, values = acc + 4 * i, v + 4 * i
        if hd - i >= 64:
            if columns == 4:
                _four4(out, hd, s, values, hd, first, last)
            elif columns == 2:
                _two4(out, hd, s, values, hd, first, last)
            else:
                _one4(out, hd, s, values, hd, first, last)
            i += 64
        else:
            if columns == 4:
                _four1(out, hd, s, values, hd, first, last)
            elif columns == 2:
                _two1(out, hd, s, values, hd, first, last)
            else:
                _one1(out, hd, s, values, hd, first, last)
            i += 16


@njit
def _accumulate(acc, s, v, hd, columns, visible):
    """acc[c] += s[c] V over the ordinals each column sees; ``visible`` int64 [columns], ascending."""
    c = 0
    while c < columns:
        width = 4 if columns - c >= 4 else (2 if columns - c >= 2 else 1)
        common = visible[c]
        _span(acc + 4 * c * hd, s + 4 * c * PAGE, v, hd, width, 0, common)
        for j in range(c + 1, c + width):
            if visible[j] > common:
                _span(acc + 4 * j * hd, s + 4 * j * PAGE, v, hd, 1, common, visible[j])
        c += width


@njit
def _softmax_page(s, acc, hd, peak, mass, visible):
    """Turn scores into weights against the running peak, rescaling what was accumulated."""
    low = fill(types.float32(-np.inf))
    m = low
    for i in range(0, PAGE, 16):
        x = keep(load(s, i), visible - i, low)
        store(s, i, x)
        m = fill(max(largest(m), largest(x)))
    new = max(peak[0], largest(m))
    shift = fill(new)
    scale = exp(fill(peak[0] - new))
    sums = fill(types.float32(0.0))
    for i in range(0, PAGE, 16):
        e = exp(load(s, i) - shift)
        store(s, i, e)
        sums = sums + e
    mass[0] = mass[0] * lane0(scale) + total(sums)
    peak[0] = new
    for i in range(0, hd, 16):
        store(acc, i, load(acc, i) * scale)


@njit
def _merge(total_acc, total_peak, total_mass, acc, peak, mass, hd):
    """Fold the split (acc, peak, mass) into the running total."""
    new = max(total_peak[0], peak)
    old_scale, scale = exp(fill(total_peak[0] - new)), exp(fill(peak - new))
    total_mass[0] = total_mass[0] * lane0(old_scale) + mass * lane0(scale)
    total_peak[0] = new
    for i in range(0, hd, 16):
        store(total_acc, i, load(total_acc, i) * old_scale + load(acc, i) * scale)


@njit
def _finish(out, acc, mass, gate, hd):
    """out = acc / mass * sg(gate)."""
    norm = fill(mass)
    for i in range(0, hd, 16):
        store_part(out, i, load(acc, i) / norm * sigmoid(load_part(gate, i, hd - i)), hd - i)


@njit
def _clear(acc, n):
    zero = fill(types.float32(0.0))
    for i in range(0, n, 16):
        store(acc, i, zero)


@kernel("attention")
def attention(a, begin, end, ws):
    """A task is (row, block of tokens, key head, split), or with ``splits`` 0 all splits of such columns.

    Words: row metadata; W, tokens of a block, blocks of a row, splits, out, q, gate, key plane, value plane, storage,
    blocks, pages of a block row, pages, hq, hk, hd, gemm, scratch (token, head, split: hd padded, peak, mass), key
    scales, value scales.
    """
    w = i64p(a)
    columns, block, per_row, splits = w[4], w[5], w[6], w[7]
    storage, blocks, length, pages = w[13], i32p(w[14]), w[15], w[16]
    hq, hk, hd, gemm, scratch = w[17], w[18], w[19], w[20], w[21]
    ratio, padded = hq // hk, (hd + 15) // 16 * 16
    most = block * ratio
    q = ws
    acc = q + 4 * most * padded
    all_acc = acc + 4 * most * padded
    scores = all_acc + 4 * most * padded
    numbers = scores + 4 * most * PAGE
    peak, mass, all_peak, all_mass = numbers, numbers + 4 * most, numbers + 8 * most, numbers + 12 * most
    table = numbers + 16 * most
    keys = table + 8 * most
    values = keys + 4 * PAGE * padded
    visible = i64p(values + 4 * PAGE * padded)
    for c in range(most):
        i64p(table)[c] = q + 4 * c * padded
    scale = fill(types.float32(1.0 / math.sqrt(hd)))
    for task in range(begin, end):
        split = task % splits if splits else 0
        rest = task // splits if splits else task
        g, rest = rest % hk, rest // hk
        b, first = rest // per_row, rest % per_row * block
        start, width = types.int64(i32p(w[START])[b]), types.int64(i32p(w[WIDTH])[b])
        tokens = min(block, width - first)
        if tokens <= 0:
            continue
        seen = start + first + tokens  # ordinals the last token sees
        page, page_end = split * SPLIT, (seen + PAGE - 1) // PAGE
        if splits:
            page_end = min(page_end, page + SPLIT)
            if page >= page_end:
                continue
        n = tokens * ratio
        for c in range(n):
            t, h = b * columns + first + c // ratio, g * ratio + c % ratio
            source, target = f32(w[9] + 4 * (t * hq + h) * hd), f32(q + 4 * c * padded)
            for i in range(0, padded, 16):
                store(target, i, load_part(source, i, hd - i) * scale)
            f32(all_peak)[c] = -np.inf
            f32(all_mass)[c] = 0.0
            _clear(f32(all_acc + 4 * c * padded), padded)
        while page < page_end:
            if page % SPLIT == 0:
                _clear(f32(acc), n * padded)
                for c in range(n):
                    f32(peak)[c] = -np.inf
                    f32(mass)[c] = 0.0
            place = types.int64(blocks[types.int64(i32p(w[TABLE])[b]) * length + min(page, length - 1)])
            row = (min(max(place, 0), pages - 1) * hk + g) * PAGE
            for c in range(n):
                visible[c] = min(max(start + first + c // ratio + 1 - page * PAGE, 0), PAGE)
            k, v = w[11] + 4 * row * hd, w[12] + 4 * row * hd
            if storage != F32 or padded != hd:
                k, v = keys, values
                for p in range(visible[n - 1]):
                    get_row(f32(k + 4 * p * padded), w[11], w[22], row + p, hd, storage)
                    get_row(f32(v + 4 * p * padded), w[12], w[23], row + p, hd, storage)
            call8(gemm, k, (visible[n - 1] + 3) // 4 * 4, padded, table, n, scores, PAGE, 0)
            for c in range(n):
                if visible[c] > 0:
                    _softmax_page(
                        f32(scores + 4 * c * PAGE), f32(acc + 4 * c * padded), padded,
                        f32(peak + 4 * c), f32(mass + 4 * c), visible[c],
                    )  # fmt: skip
            _accumulate(acc, scores, v, padded, n, visible)
            page += 1
            if page % SPLIT == 0 or page == page_end:
                for c in range(n):
                    if start + first + c // ratio + 1 > (page - 1) // SPLIT * SPLIT * PAGE:
                        _merge(
                            f32(all_acc + 4 * c * padded), f32(all_peak + 4 * c), f32(all_mass + 4 * c),
                            f32(acc + 4 * c * padded), f32(peak)[c], f32(mass)[c], padded,
                        )  # fmt: skip
        for c in range(n):
            t, h = b * columns + first + c // ratio, g * ratio + c % ratio
            if splits:
                part = f32(scratch + 4 * ((t * hq + h) * splits + split) * (padded + 16))
                for i in range(0, padded, 16):
                    store(part, i, load(f32(acc + 4 * c * padded), i))
                part[padded] = f32(peak)[c]
                part[padded + 1] = f32(mass)[c]
            else:
                place = 4 * (t * hq + h) * hd
                _finish(f32(w[8] + place), f32(all_acc + 4 * c * padded), f32(all_mass)[c], f32(w[10] + place), hd)


@kernel("attention_merge")
def attention_merge(a, begin, end, ws):
    """Merge the splits of a token's heads. A task is (token, head). Words as ``attention``."""
    w = i64p(a)
    columns, splits, hq, hd, scratch = w[4], w[7], w[17], w[19], w[21]
    padded = (hd + 15) // 16 * 16
    acc, numbers = ws, ws + 4 * padded
    for task in range(begin, end):
        t = task // hq
        b, column = t // columns, t % columns
        if column >= i32p(w[WIDTH])[b]:
            continue
        seen = types.int64(i32p(w[START])[b]) + column + 1
        used = (seen + PAGE * SPLIT - 1) // (PAGE * SPLIT)
        _clear(f32(acc), padded)
        f32(numbers)[0] = -np.inf
        f32(numbers)[1] = 0.0
        for split in range(min(used, splits)):
            part = scratch + 4 * (task * splits + split) * (padded + 16)
            values = f32(part)
            _merge(f32(acc), f32(numbers), f32(numbers + 4), values, values[padded], values[padded + 1], padded)
        _finish(f32(w[8] + 4 * task * hd), f32(acc), f32(numbers)[1], f32(w[10] + 4 * task * hd), hd)

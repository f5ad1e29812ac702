"""Mixture of experts: routing, and the selected experts' matrices applied to the tokens that chose them.

A slot is one (token, choice) pair. Every task groups the slots by expert itself, so that an expert's rows are decoded
once for all its tokens; each product and the sum over a token's slots keep the order a lone token would have.
"""

from __future__ import annotations

import math

from numba import njit, types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.products import WS_RESULT, product
from ninfer._cpu.kernels.rows import norm1
from ninfer._cpu.kernels.simd import f32, fill, fma, i32p, i64p, load_part, real, silu, store_part, u16

ROUTE_TOKENS = 8
"""Tokens a routing task takes, so that the router's rows are decoded once for several."""

ROUTE_ROWS = 16
"""Router rows decoded at a time."""


@njit
def _choose(ids, weights, logits, experts, k):
    """The k largest logits, descending, ties to the lower id, and the softmax over them."""
    for slot in range(k):
        best = -1
        for e in range(experts):
            taken = False
            for before in range(slot):
                taken |= ids[before] == e
            if not taken and (best < 0 or logits[e] > logits[best]):
                best = e
        ids[slot] = best
    mass = types.float32(0.0)
    for slot in range(k):
        weights[slot] = types.float32(math.exp(types.float64(logits[ids[slot]] - logits[ids[0]])))
        mass += weights[slot]
    for slot in range(k):
        weights[slot] /= mass


@kernel("moe_route")
def moe_route(a, begin, end, ws):
    """A task is ROUTE_TOKENS tokens.

    Words: u, ids, weights, shared, x, norm, router words, shared score words, features, experts, k, tokens, eps.
    """
    w = i64p(a)
    n, experts, k, tokens = w[8], w[9], w[10], w[11]
    table, y = ws + WS_RESULT, ws + WS_RESULT + 8 * (ROUTE_TOKENS + 1)
    logits = y + 4 * ROUTE_ROWS * (ROUTE_TOKENS + 1)
    for task in range(begin, end):
        first = task * ROUTE_TOKENS
        count = min(ROUTE_TOKENS, tokens - first)
        for i in range(count):
            u = w[0] + 4 * (first + i) * n
            norm1(f32(u), f32(w[4] + 4 * (first + i) * n), u16(w[5]), n, real(w[12]))
            i64p(table)[i] = u
            i64p(table)[i + 1] = u
        for row in range(0, experts, ROUTE_ROWS):
            rows = min(ROUTE_ROWS, experts - row)
            product(w[6], row, rows, table, count, y, ROUTE_ROWS, ws)
            for i in range(count):
                for r in range(rows):
                    f32(logits)[i * experts + row + r] = f32(y)[i * ROUTE_ROWS + r]
        product(w[7], 0, 1, table, count, y, 4, ws)
        for i in range(count):
            t = first + i
            score = types.float64(f32(y)[4 * i])
            f32(w[3])[t] = types.float32(1.0 / (1.0 + math.exp(-score)))
            _choose(i32p(w[1] + 4 * t * k), f32(w[2] + 4 * t * k), f32(logits + 4 * i * experts), experts, k)


@njit
def _group(ids, slots, experts, starts, order):
    """Counting sort of slots by expert: expert e owns order[starts[e] : starts[e+1]], slots ascending."""
    for e in range(experts + 1):
        starts[e] = 0
    for s in range(slots):
        starts[ids[s] + 1] += 1
    for e in range(experts):
        starts[e + 1] += starts[e]
    for s in range(slots):
        order[starts[ids[s]]] = s
        starts[ids[s]] += 1
    for e in range(experts, 0, -1):
        starts[e] = starts[e - 1]
    starts[0] = 0


@kernel("moe_swiglu")
def moe_swiglu(a, begin, end, ws):
    """out[slot, n] = silu(G_e[n] . u) * (U_e[n] . u). A task is some rows of every expert.

    Words: out, u, ids, gates, ups (addresses of the experts' words), experts, slots, k, rows of an expert, features,
    rows of a task, most columns at once.
    """
    w = i64p(a)
    experts, slots, k, rows, n, block, most = w[5], w[6], w[7], w[8], w[9], w[10], w[11]
    ids = i32p(w[2])
    starts, order = ws + WS_RESULT, ws + WS_RESULT + 4 * (experts + 2)
    table = (order + 4 * slots + 15) // 8 * 8
    gate = table + 8 * (most + 1)
    up = gate + 4 * (most + 1) * block
    for task in range(begin, end):
        row = task * block
        count = min(block, rows - row)
        _group(ids, slots, experts, i32p(starts), i32p(order))
        for e in range(experts):
            last = types.int64(i32p(starts)[e + 1])
            at = types.int64(i32p(starts)[e])
            while at < last:
                columns = min(most, last - at)
                for c in range(columns):
                    i64p(table)[c] = w[1] + 4 * (types.int64(i32p(order)[at + c]) // k) * n
                i64p(table)[columns] = i64p(table)[columns - 1]
                product(i64p(w[3])[e], row, count, table, columns, gate, block, ws)
                product(i64p(w[4])[e], row, count, table, columns, up, block, ws)
                for c in range(columns):
                    slot = types.int64(i32p(order)[at + c])
                    g, u = f32(gate + 4 * c * block), f32(up + 4 * c * block)
                    out = f32(w[0] + 4 * (slot * rows + row))
                    for i in range(0, count, 16):
                        store_part(out, i, silu(load_part(g, i, count - i)) * load_part(u, i, count - i), count - i)
                at += columns


@kernel("moe_down_add")
def moe_down_add(a, begin, end, ws):
    """x[t, n] += sum over the token's slots, in order, of weight * (D_e[n] . h[slot]). A task is some rows.

    Words: x, h, ids, weights, downs (addresses of the experts' words), experts, slots, k, rows, features, rows of a
    task, most columns at once.
    """
    w = i64p(a)
    experts, slots, k, rows, n, block, most = w[5], w[6], w[7], w[8], w[9], w[10], w[11]
    ids = i32p(w[2])
    starts, order = ws + WS_RESULT, ws + WS_RESULT + 4 * (experts + 2)
    table = (order + 4 * slots + 15) // 8 * 8
    y = table + 8 * (most + 1)
    parts = y + 4 * (most + 1) * block
    for task in range(begin, end):
        row = task * block
        count = min(block, rows - row)
        _group(ids, slots, experts, i32p(starts), i32p(order))
        for e in range(experts):
            last = types.int64(i32p(starts)[e + 1])
            at = types.int64(i32p(starts)[e])
            while at < last:
                columns = min(most, last - at)
                for c in range(columns):
                    i64p(table)[c] = w[1] + 4 * types.int64(i32p(order)[at + c]) * n
                i64p(table)[columns] = i64p(table)[columns - 1]
                product(i64p(w[4])[e], row, count, table, columns, y, block, ws)
                for c in range(columns):
                    source, part = f32(y + 4 * c * block), f32(parts + 4 * types.int64(i32p(order)[at + c]) * block)
                    for i in range(0, count, 16):
                        store_part(part, i, load_part(source, i, count - i), count - i)
                at += columns
        for t in range(slots // k):
            x = f32(w[0] + 4 * (t * rows + row))
            for i in range(0, count, 16):
                acc = load_part(x, i, count - i)
                for s in range(t * k, t * k + k):
                    part = f32(parts + 4 * s * block)
                    acc = fma(fill(f32(w[3])[s]), load_part(part, i, count - i), acc)
                store_part(x, i, acc, count - i)

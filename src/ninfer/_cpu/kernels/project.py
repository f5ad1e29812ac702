"""Kernels that apply weight matrices to columns: plain, added to a residual, and gated."""

from __future__ import annotations

from numba import types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.products import WS_RESULT, product
from ninfer._cpu.kernels.simd import f32, fill, fma, i64p, load_part, silu, store_part

TABLE, ITEM = 5, 5
"""Words before the matrices of ``project``, and words of each."""


@kernel("project")
def project(a, begin, end, ws):
    """out_i[t, n] = W_i[n] . x[t], or += scale[t] times that.

    Words: columns, address table of the columns, add (0 or 1), scale or 0, matrices; then for each matrix: its words,
    out, rows wanted (the stride of out), first task, rows per task.
    """
    w = i64p(a)
    columns, table, add, scale = w[0], w[1], w[2], w[3]
    y = ws + WS_RESULT
    for task in range(begin, end):
        item = TABLE
        for j in range(1, w[4]):
            if w[TABLE + ITEM * j + 3] <= task:
                item = TABLE + ITEM * j
        matrix, out, stride, block = w[item], w[item + 1], w[item + 2], w[item + 4]
        row = (task - w[item + 3]) * block
        n = min(block, stride - row)
        product(matrix, row, n, table, columns, y, block, ws)
        for t in range(columns):
            source, target = f32(y + 4 * t * block), f32(out + 4 * (t * stride + row))
            if add:
                s = fill(f32(scale)[t]) if scale else fill(types.float32(1.0))
                for i in range(0, n, 16):
                    store_part(target, i, fma(s, load_part(source, i, n - i), load_part(target, i, n - i)), n - i)
            else:
                for i in range(0, n, 16):
                    store_part(target, i, load_part(source, i, n - i), n - i)


@kernel("swiglu")
def swiglu(a, begin, end, ws):
    """out[t, n] = silu(G[n] . x[t]) * (U[n] . x[t]).

    Words: columns, address table of the columns, gate words, up words, out, rows (the stride of out), rows per task.
    """
    w = i64p(a)
    columns, table, stride, block = w[0], w[1], w[5], w[6]
    gate, up = ws + WS_RESULT, ws + WS_RESULT + 4 * block * (columns + 1)
    for task in range(begin, end):
        row = task * block
        n = min(block, stride - row)
        product(w[2], row, n, table, columns, gate, block, ws)
        product(w[3], row, n, table, columns, up, block, ws)
        for t in range(columns):
            g, u, out = f32(gate + 4 * t * block), f32(up + 4 * t * block), f32(w[4] + 4 * (t * stride + row))
            for i in range(0, n, 16):
                store_part(out, i, silu(load_part(g, i, n - i)) * load_part(u, i, n - i), n - i)

"""Kernels that measure the machine."""

from __future__ import annotations

import numpy as np
from numba import types

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.simd import f32, fill, fma, i64p, load, total

BLOCK = 1 << 16
"""Floats of one task of ``read``."""


@kernel("read")
def read(a, begin, end, ws):
    """Read blocks of BLOCK floats and do next to nothing with them. Words: source, out (a float per task)."""
    w = i64p(a)
    zero = fill(np.float32(0.0))
    for task in range(begin, end):
        x = f32(w[0] + 4 * task * BLOCK)
        s0, s1, s2, s3 = zero, zero, zero, zero
        for i in range(0, BLOCK, 64):
            s0, s1 = s0 + load(x, i), s1 + load(x, i + 16)
            s2, s3 = s2 + load(x, i + 32), s3 + load(x, i + 48)
        f32(w[1])[task] = total((s0 + s1) + (s2 + s3))


@kernel("multiply")
def multiply(a, begin, end, ws):
    """Multiply-adds in registers: 12 vectors in each of the rounds of a task. Words: rounds, out (a float per task)."""
    w = i64p(a)
    x, y = fill(types.float32(0.5)), fill(types.float32(1.0))
    for task in range(begin, end):
        a0, a1, a2, a3, a4, a5 = x, x, x, x, x, x
        b0, b1, b2, b3, b4, b5 = y, y, y, y, y, y
        for _ in range(w[0]):
            a0, a1, a2 = fma(a0, x, y), fma(a1, x, y), fma(a2, x, y)
            a3, a4, a5 = fma(a3, x, y), fma(a4, x, y), fma(a5, x, y)
            b0, b1, b2 = fma(b0, x, y), fma(b1, x, y), fma(b2, x, y)
            b3, b4, b5 = fma(b3, x, y), fma(b4, x, y), fma(b5, x, y)
        f32(w[1])[task] = total((a0 + a1) + (a2 + a3) + (a4 + a5) + (b0 + b1) + (b2 + b3) + (b4 + b5))

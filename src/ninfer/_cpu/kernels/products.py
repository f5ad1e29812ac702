"""Matrix products straight from stored bytes.

One order for every result: ``y[n, t] = reduce(acc)`` with ``acc = fma(w[n, k:k+16], x[t, k:k+16], acc)`` for ascending
``k`` and the lane reduction of ``simd``, then one multiplication by the row's factor. ``dot`` decodes rows in registers
for one column; ``unpack`` decodes rows into a tile for ``gemm``, which takes many columns. Both follow that order, so a
result never depends on which of them computed it.

A matrix is described by int64 words: HEAD words, then SEG words for each run of rows of one stored parent.
"""

from __future__ import annotations

from numba import njit, types

from ninfer._cpu.kernel import Kernel, kernel
from ninfer._cpu.kernels.codes import CODES, WIDE, Code
from ninfer._cpu.kernels.scales import bf16, block_scales, half_scales
from ninfer._cpu.kernels.simd import call6, call8, f32, i64p, u8, u16
from ninfer._cpu.kernels.tiles import ROWS, make_decode, make_dot, make_gemm

HEAD_SEGMENTS, HEAD_ROWS, HEAD_COLS, HEAD_GEMM, HEAD_DIRECT, HEAD = range(6)
"""HEAD_DIRECT: columns up to which the rows are decoded in registers."""

SEG_BEGIN, SEG_END, SEG_FIRST, SEG_DOT, SEG_UNPACK = range(5)
"""Rows of the matrix a segment covers, its first row in the parent, addresses of its two native functions."""
SEG_BASE, SEG_HIGH, SEG_SCALE, SEG_FACTOR = range(5, 9)
"""Addresses of the parent's planes: codes, high bits, group scales, row factors or divisor."""
SEG_COLS, SEG_BASE_ROW, SEG_HIGH_ROW, SEG_GROUPS, SEG = range(9, 14)
"""Columns, bytes of a row in the base and high planes, groups of a row."""

COLUMNS = (6, 4, 2, 1) if WIDE else (1,)
"""Columns of a register tile, widest first; without 32 wide registers more than one would spill."""

STRETCH = 1024
"""Columns of x that a register tile's columns take from the first-level cache before the next rows."""

_CHEAP = ("fp32", "bf16", "q8_g32_fp16", "q4_g64_fp16")
"""Formats that are decoded twice sooner than written to a tile once."""


def direct(format: str) -> int:
    """Columns up to which rows of a format are decoded in registers, four columns a time; else once into a tile."""
    return (8 if format in _CHEAP else 4) if WIDE else 1


WS_TILE, WS_RESULT, WS_AUX, WS_BYTES = 0, 512 << 10, 896 << 10, 1024 << 10
"""A thread's workspace: decoded rows, products, and the rest (scales, tails, factors)."""
_AUX_TAIL, AUX_FACTOR, _AUX_SCALE, _AUX_KEPT = 0, 256, 1024, 80 << 10

TILE_BYTES, RESULT_BYTES = WS_RESULT - WS_TILE, WS_AUX - WS_RESULT
MAX_COLUMNS = TILE_BYTES // (4 * ROWS)
MAX_ROWS = (_AUX_SCALE - AUX_FACTOR) // 4
"""Columns of a matrix, and rows of one task, that the workspace has room for."""


def _declare(code: Code) -> tuple[Kernel, Kernel]:
    """The two native functions of a format."""
    dot4, dot1, decode = make_dot(code, 4, 1), make_dot(code, 1, 1), make_decode(code)
    dot4x2, dot4x4 = (make_dot(code, 4, c) for c in (2, 4))
    group, base_bits, high_bits = code.group, code.base_bits, code.high_bits
    fp8, fp4 = code.name == "fp8_e4m3fn_row_bf16", code.name == "nvfp4"

    @njit
    def scales(s, row, rows, aux):
        """Group scales of some rows as fp32 in the workspace."""
        if fp4:
            block_scales(s[SEG_SCALE], row, rows, s[SEG_GROUPS], aux + _AUX_SCALE)
        elif group:
            half_scales(s[SEG_SCALE], row * s[SEG_GROUPS], rows * s[SEG_GROUPS], aux + _AUX_SCALE)

    @njit
    def tails(s, row, rows, aux):
        """Last columns of rows of a format without padding, zero-filled to sixteen lanes in the workspace."""
        if group == 0:
            left = s[SEG_COLS] % 16 * base_bits // 8
            if left:
                for r in range(rows):
                    source = u8(s[SEG_BASE] + (row + r + 1) * s[SEG_BASE_ROW] - left)
                    tail = u8(aux + _AUX_TAIL + 64 * r)
                    for i in range(64):
                        tail[i] = source[i] if i < left else 0

    @njit
    def factor(s, row):
        """What every product of a row is multiplied by."""
        if fp8:
            return bf16(u16(s[SEG_FACTOR])[row])
        if fp4:
            return types.float32(1.0) / f32(s[SEG_FACTOR])[0]
        return types.float32(1.0)

    @kernel(f"dot_{code.name}", arity=8)
    def dot(seg, row, n, table, columns, y, ldy, aux):
        """y[t * ldy + i] = row (row + i) . x[t]; see ``product`` for the column after the last."""
        s = i64p(seg)
        base_row, high_row, groups, cols = s[SEG_BASE_ROW], s[SEG_HIGH_ROW], s[SEG_GROUPS], s[SEG_COLS]
        scale, tail = aux + _AUX_SCALE, aux + _AUX_TAIL
        i = 0
        while i < n:
            at_row, out = row + i, y + 4 * i
            base, high = s[SEG_BASE] + at_row * base_row, s[SEG_HIGH] + at_row * high_row
            taken = 4 if n - i >= 4 else 1
            scales(s, at_row, taken, aux)
            tails(s, at_row, taken, aux)
            t = 0
            while t < columns:
                xs, to, left = table + 8 * t, out + 4 * t * ldy, columns - t
                if taken == 1:
                    dot1(base, base_row, high, high_row, scale, groups, tail, cols, xs, to, ldy)
                    t += 1
                elif left == 1:
                    dot4(base, base_row, high, high_row, scale, groups, tail, cols, xs, to, ldy)
                    t += 1
                elif left == 2:
                    dot4x2(base, base_row, high, high_row, scale, groups, tail, cols, xs, to, ldy)
                    t += 2
                else:  # three make four
                    dot4x4(base, base_row, high, high_row, scale, groups, tail, cols, xs, to, ldy)
                    t += 4
            i += taken
        if fp8 or fp4:
            for t in range(columns):
                out = f32(y + 4 * t * ldy)
                for i in range(n):
                    out[i] *= factor(s, row + i)

    @kernel(f"unpack_{code.name}", arity=6)
    def unpack(seg, row, n, tile, factors, aux):
        s = i64p(seg)
        cols, scale = s[SEG_COLS], f32(aux + _AUX_SCALE)
        stride = (cols + 15) // 16 * 16
        for i in range(n):
            at_row = row + i
            base, high = s[SEG_BASE] + at_row * s[SEG_BASE_ROW], s[SEG_HIGH] + at_row * s[SEG_HIGH_ROW]
            out = tile + 4 * i * stride
            scales(s, at_row, 1, aux)
            f32(factors)[i] = factor(s, at_row)
            whole = stride if group else cols // 16 * 16
            one = types.float32(1.0)
            for k in range(0, whole, 16):
                g = scale[k // group] if group else one
                decode(base + k * base_bits // 8, high + k * high_bits // 8, g, out + 4 * k)
            if whole < stride:
                tails(s, at_row, 1, aux)
                decode(aux + _AUX_TAIL, high, one, out + 4 * whole)

    return dot, unpack


FUNCTIONS: dict[str, tuple[Kernel, Kernel]] = {name: _declare(code) for name, code in CODES.items()}
"""(dot, unpack) of every matrix format."""


@njit
def _no_more(tile, n, stride, cols, table, columns, y, ldy, kept, t):
    pass


def _then(width: int, rest):
    """Take ``width`` columns at a time while there are as many, then leave what is left to ``rest``."""
    step = make_gemm(width)

    @njit
    def take(tile, n, stride, cols, table, columns, y, ldy, kept, t):
        while columns - t >= width:
            for k in range(0, cols, STRETCH):
                first, last = types.int64(k == 0), types.int64(k + STRETCH >= cols)
                for i in range(0, n, 4):
                    step(
                        tile + 4 * (i * stride + k), stride, min(STRETCH, cols - k), table + 8 * t, 4 * k,
                        y + 4 * (t * ldy + i), ldy, kept + 64 * width * i, first, last,
                    )  # fmt: skip
            t += width
        rest(tile, n, stride, cols, table, columns, y, ldy, kept, t)

    return take


def _declare_gemm() -> Kernel:
    take = _no_more
    for width in reversed(COLUMNS):
        take = _then(width, take)

    @kernel("gemm", arity=8)
    def gemm(tile, n, cols, table, columns, y, ldy, kept):
        """y[t * ldy + i] = tile row i . x at table[t]; n a multiple of four, tile rows padded to sixteen columns.

        ``kept``: room for n * COLUMNS[0] vectors, not used up to STRETCH columns.
        """
        take(tile, n, (cols + 15) // 16 * 16, cols, table, columns, y, ldy, kept, 0)

    return gemm


gemm = _declare_gemm()


@njit
def product(matrix, row, n, table, columns, y, ldy, ws):
    """y[t * ldy + i] = matrix row (row + i) . x[t]; ``table`` holds the addresses of the columns x[t].

    n <= ldy, a multiple of four; the tile and result regions of the workspace must hold them. One more column than
    asked for may be computed: the table must have an address for it and y room.
    """
    m = i64p(matrix)
    aux, tile = ws + WS_AUX, ws + WS_TILE
    factors = aux + AUX_FACTOR
    stride = (m[HEAD_COLS] + 15) // 16 * 16
    direct = columns <= m[HEAD_DIRECT]
    for j in range(m[HEAD_SEGMENTS]):
        seg = matrix + 8 * (HEAD + j * SEG)
        s = i64p(seg)
        begin, end = max(row, s[SEG_BEGIN]), min(row + n, s[SEG_END])
        if begin < end:
            parent = s[SEG_FIRST] + begin - s[SEG_BEGIN]
            if direct:
                call8(s[SEG_DOT], seg, parent, end - begin, table, columns, y + 4 * (begin - row), ldy, aux)
            else:
                out, scale = 4 * (begin - row) * stride, factors + 4 * (begin - row)
                call6(s[SEG_UNPACK], seg, parent, end - begin, tile + out, scale, aux)
    if not direct:
        call8(m[HEAD_GEMM], tile, (n + 3) // 4 * 4, m[HEAD_COLS], table, columns, y, ldy, aux + _AUX_KEPT)
        scale = f32(factors)
        for t in range(columns):
            out = f32(y + 4 * t * ldy)
            for i in range(n):
                out[i] *= scale[i]

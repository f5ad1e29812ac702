"""Matrix products straight from stored bytes.

One order for every result: ``y[n, t] = reduce(acc)`` with ``acc = fma(w[n, k:k+16], x[t, k:k+16], acc)`` for ascending
``k`` and the lane reduction of ``simd``, then one multiplication by the row's factor. ``dot`` decodes rows in registers
for one column; ``unpack`` decodes rows into a tile for ``gemm``, which takes many columns. Both follow that order, so a
result never depends on which of them computed it.

A matrix is described by int64 words: HEAD words, then SEG words for each run of rows of one stored parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ninfer._cpu.kernel import Kernel, kernel
from ninfer._cpu.kernels.codes import CODES, Code, e4m3_ir
from ninfer._cpu.kernels.simd import (
    LANES,
    VF,
    VI,
    at,
    call6,
    call8,
    const,
    f32,
    f32_t,
    fma_ir,
    i8,
    i16,
    i32,
    i64,
    i64p,
    load_ir,
    mask_ir,
    masked_load,
    splat,
    sum4_ir,
    sum_ir,
    u8,
    u16,
)

HEAD_SEGMENTS, HEAD_ROWS, HEAD_COLS, HEAD_GEMM, HEAD_DIRECT, HEAD = range(6)
"""HEAD_DIRECT: columns up to which the rows are decoded in registers."""

SEG_BEGIN, SEG_END, SEG_FIRST, SEG_DOT, SEG_UNPACK = range(5)
"""Rows of the matrix a segment covers, its first row in the parent, addresses of its two native functions."""
SEG_BASE, SEG_HIGH, SEG_SCALE, SEG_FACTOR = range(5, 9)
"""Addresses of the parent's planes: codes, high bits, group scales, row factors or divisor."""
SEG_COLS, SEG_BASE_ROW, SEG_HIGH_ROW, SEG_GROUPS, SEG = range(9, 14)
"""Columns, bytes of a row in the base and high planes, groups of a row."""

ROWS = 4
"""Rows that one register tile takes."""

_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
COLUMNS = (6, 4, 2, 1) if _WIDE else (1,)
"""Columns of a register tile, widest first; without 32 wide registers more than one would spill."""

STRETCH = 1024
"""Columns of x that a register tile's columns take from the first-level cache before the next rows."""

_CHEAP = ("fp32", "bf16", "q8_g32_fp16", "q4_g64_fp16")
"""Formats that are decoded twice sooner than written to a tile once."""


def direct(format: str) -> int:
    """Columns up to which rows of a format are decoded in registers, four columns a time; else once into a tile."""
    return (8 if format in _CHEAP else 4) if _WIDE else 1


WS_TILE, WS_RESULT, WS_AUX, WS_BYTES = 0, 512 << 10, 896 << 10, 1024 << 10
"""A thread's workspace: decoded rows, products, and the rest (scales, tails, factors)."""
_AUX_TAIL, AUX_FACTOR, _AUX_SCALE, _AUX_KEPT = 0, 256, 1024, 80 << 10

TILE_BYTES, RESULT_BYTES = WS_RESULT - WS_TILE, WS_AUX - WS_RESULT
MAX_COLUMNS = TILE_BYTES // (4 * ROWS)
MAX_ROWS = (_AUX_SCALE - AUX_FACTOR) // 4
"""Columns of a matrix, and rows of one task, that the workspace has room for."""


@dataclass(frozen=True)
class _Step:
    """Sixteen columns of a loop that takes ``unroll`` such steps a turn: step ``j`` of turn ``index``."""

    b: Any
    index: Any
    unroll: int
    j: int

    def offset(self, size: int) -> Any:
        """Where items of ``size`` bytes, one a step, are."""
        return self.b.add(self.b.mul(self.index, _word(self.unroll * size)), _word(self.j * size))

    def shared(self, steps: int, size: int) -> Any:
        """Where items of ``size`` bytes are that every ``steps`` steps share."""
        if self.unroll % steps == 0:
            item = self.b.add(self.b.mul(self.index, _word(self.unroll // steps)), _word(self.j // steps))
        else:
            item = self.b.udiv(self.offset(1), _word(steps))
        return self.b.mul(item, _word(size))


def _word(value: int) -> ir.Constant:
    return ir.Constant(i64, value)


def _accumulate(b, rows: int, xs, cols, unroll: int, weights):
    """Cells that hold, per row and column, the vector sum of weights times x; ``weights(step, last)`` gives the rows'.

    ``last``: the step may be the final one, of fewer than sixteen columns.
    """
    acc = [[cgutils.alloca_once(b, VF) for _ in xs] for _ in range(rows)]

    def add(step: _Step, mask) -> None:
        w = weights(step, mask is not None)
        for c, column in enumerate(xs):
            pointer = at(b, column, f32_t, step.offset(4 * LANES))
            if mask is None:
                x = load_ir(b, b.bitcast(pointer, VF.as_pointer()), 4)
            else:
                x = masked_load(b, pointer, mask, f32_t, "f32")
            for r in range(rows):
                b.store(fma_ir(b, w[r], x, b.load(acc[r][c])), acc[r][c])

    def loop() -> None:
        turns = b.udiv(cols, _word(LANES * unroll))
        with cgutils.for_range_slice(b, _word(0), turns, _word(1), intp=i64) as (i, _):
            for j in range(unroll):
                add(_Step(b, i, unroll, j), None)
        steps = b.udiv(b.add(cols, _word(LANES - 1)), _word(LANES))
        with cgutils.for_range_slice(b, b.mul(turns, _word(unroll)), steps, _word(1), intp=i64) as (i, _):
            add(_Step(b, i, 1, 0), mask_ir(b, b.sub(cols, b.mul(i, _word(LANES)))))

    return acc, loop


def _clear(b, acc) -> None:
    for cell in (cell for row in acc for cell in row):
        b.store(ir.Constant(VF, [0.0] * LANES), cell)


def _reduce(b, acc, y, ldy) -> None:
    """y[c * ldy + r] = the lane sum of each cell."""
    for c in range(len(acc[0])):
        out = b.add(y, b.mul(ldy, _word(4 * c)))
        sums = [b.load(row[c]) for row in acc]
        if len(sums) == 4:
            b.store(sum4_ir(b, sums), at(b, out, ir.VectorType(f32_t, 4)), align=4)
        else:
            for r, value in enumerate(sums):
                b.store(sum_ir(b, value), at(b, out, f32_t, _word(4 * r)), align=4)


def _addresses(b, table, columns: int):
    return [load_ir(b, at(b, table, i64, _word(8 * c)), 8) for c in range(columns)]


def _make_dot(code: Code, rows: int, columns: int):
    """Intrinsic: y[c * ldy + r] = row r of the codes . x[c]."""

    def codegen(context, b, signature, args):
        base, base_row, high, high_row, scales, groups, tails, cols, table, y, ldy = args
        bases = [b.add(base, b.mul(base_row, _word(r))) for r in range(rows)]
        highs = [b.add(high, b.mul(high_row, _word(r))) for r in range(rows)]
        scale = [b.add(scales, b.mul(groups, _word(4 * r))) for r in range(rows)]

        def weights(step, last):
            out = []
            for r in range(rows):
                low = b.add(bases[r], step.offset(2 * code.base_bits))
                if last and not code.group:  # the end of a row may be the end of the buffer
                    short = b.icmp_signed(">", b.mul(b.add(step.index, _word(1)), _word(LANES)), cols)
                    low = b.select(short, b.add(tails, _word(64 * r)), low)
                top = b.add(highs[r], step.offset(2 * code.high_bits))
                w = code.decode(b, at(b, low, i8), at(b, top, i8))
                if code.group:
                    place = at(b, scale[r], f32_t, step.shared(code.group // LANES, 4))
                    w = b.fmul(w, splat(b, load_ir(b, place, 4)))
                out.append(w)
            return out

        acc, loop = _accumulate(b, rows, _addresses(b, table, columns), cols, 4, weights)
        _clear(b, acc)
        loop()
        _reduce(b, acc, y, ldy)
        return context.get_dummy_value()

    @intrinsic
    def dot(typingctx, base, base_row, high, high_row, scales, groups, tails, cols, table, y, ldy):
        return types.void(*(types.int64,) * 11), codegen

    return dot


def _make_gemm(columns: int):
    """Intrinsic: a stretch of columns of y[c * ldy + r] = tile row r . x[c] for four rows.

    ``first`` starts the sums, ``last`` reduces them into y; between stretches they are kept at ``kept``.
    """

    def codegen(context, b, signature, args):
        tile, stride, cols, table, skip, y, ldy, kept, first, last = args
        rows = [b.add(tile, b.mul(stride, _word(4 * r))) for r in range(ROWS)]
        xs = [b.add(x, skip) for x in _addresses(b, table, columns)]

        def weights(step, last):
            return [load_ir(b, at(b, row, VF, step.offset(4 * LANES)), 4) for row in rows]

        acc, loop = _accumulate(b, ROWS, xs, cols, 1, weights)
        cells = [
            (cell, at(b, kept, VF, _word(64 * (c * ROWS + r))))
            for r, row in enumerate(acc)
            for c, cell in enumerate(row)
        ]
        with b.if_else(b.icmp_signed("!=", first, _word(0))) as (start, resume):
            with start:
                _clear(b, acc)
            with resume:
                for cell, place in cells:
                    b.store(load_ir(b, place, 4), cell)
        loop()
        with b.if_else(b.icmp_signed("!=", last, _word(0))) as (finish, pause):
            with finish:
                _reduce(b, acc, y, ldy)
            with pause:
                for cell, place in cells:
                    b.store(b.load(cell), place, align=4)
        return context.get_dummy_value()

    @intrinsic
    def gemm(typingctx, tile, stride, cols, table, skip, y, ldy, kept, first, last):
        return types.void(*(types.int64,) * 10), codegen

    return gemm


def _make_decode(code: Code):
    """Intrinsic: sixteen codes at (base, high), times ``scale`` where the format has groups, stored at ``out``."""

    def codegen(context, b, signature, args):
        base, high, scale, out = args
        w = code.decode(b, at(b, base, i8), at(b, high, i8))
        if code.group:
            w = b.fmul(w, splat(b, scale))
        b.store(w, at(b, out, VF), align=4)
        return context.get_dummy_value()

    @intrinsic
    def decode(typingctx, base, high, scale, out):
        return types.void(types.int64, types.int64, types.float32, types.int64), codegen

    return decode


@intrinsic
def _widen_halves(typingctx, source, out):
    """Sixteen non-negative fp16 words at ``source`` as fp32 at ``out``, without relying on the machine's fp16."""

    def codegen(context, b, signature, args):
        words = b.zext(load_ir(b, at(b, args[0], ir.VectorType(i16, LANES)), 1), VI)
        normal = b.bitcast(b.add(b.shl(words, const(13)), const(112 << 23)), VF)
        tiny = b.fmul(b.sitofp(words, VF), ir.Constant(VF, [2.0**-24] * LANES))
        value = b.select(b.icmp_signed("<", words, const(0x400)), tiny, normal)
        b.store(value, at(b, args[1], VF), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _widen_e4m3(typingctx, source, stride, out):
    """Four runs of four E4M3 bytes, ``stride`` bytes apart, as sixteen fp32 at ``out``."""

    def codegen(context, b, signature, args):
        source, stride, out = args
        quads = ir.Constant(ir.VectorType(i32, 4), ir.Undefined)
        for j in range(4):
            quad = load_ir(b, at(b, source, i32, b.mul(stride, _word(j))), 1)
            quads = b.insert_element(quads, quad, ir.Constant(i32, j))
        b.store(e4m3_ir(b, b.bitcast(quads, ir.VectorType(i8, LANES))), at(b, out, VF), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _bf16(typingctx, word):
    """A bf16 word as float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(b.shl(b.zext(args[0], i32), ir.Constant(i32, 16)), f32_t)

    return types.float32(types.uint16), codegen


@njit
def _half(word):
    """A non-negative fp16 word as float32."""
    if word < 0x400:
        return types.float32(word) * types.float32(2.0**-24)
    return types.float32((1 + (word & 0x3FF) / 1024) * 2.0 ** ((word >> 10) - 15))


@njit
def _half_scales(plane, first, count, out):
    """fp16 scales [first, first + count) of a plane as fp32 at ``out``."""
    halves = u16(plane)
    i = 0
    while count - i >= 16:
        _widen_halves(plane + 2 * (first + i), out + 4 * i)
        i += 16
    while i < count:
        f32(out)[i] = _half(halves[first + i])
        i += 1


@njit
def _block_scales(plane, row, rows, groups, out):
    """E4M3 scales of ``rows`` rows from the 128 x 4 swizzled plane as fp32 [rows, groups] at ``out``."""
    for r in range(rows):
        n = row + r
        source = plane + (n // 128) * (groups // 4) * 512 + (n % 32) * 16 + (n % 128) // 32 * 4
        g = 0
        while g + 16 <= groups:
            _widen_e4m3(source + g // 4 * 512, 512, out + 4 * (r * groups + g))
            g += 16
        if g < groups:  # the last one to three blocks: read them once more rather than past the plane
            end = (groups - g) // 4
            for j in range(end):
                _widen_e4m3(source + (g // 4 + j) * 512, 0, out + 4 * (r * groups + g + 4 * j))
    # the last store of a row may spill twelve floats into the next row, which is written after it


def _declare(code: Code) -> tuple[Kernel, Kernel]:
    """The two native functions of a format."""
    dot4, dot1, decode = _make_dot(code, 4, 1), _make_dot(code, 1, 1), _make_decode(code)
    dot4x2, dot4x4 = (_make_dot(code, 4, c) for c in (2, 4))
    group, base_bits, high_bits = code.group, code.base_bits, code.high_bits
    fp8, fp4 = code.name == "fp8_e4m3fn_row_bf16", code.name == "nvfp4"

    @njit
    def scales(s, row, rows, aux):
        """Group scales of some rows as fp32 in the workspace."""
        if fp4:
            _block_scales(s[SEG_SCALE], row, rows, s[SEG_GROUPS], aux + _AUX_SCALE)
        elif group:
            _half_scales(s[SEG_SCALE], row * s[SEG_GROUPS], rows * s[SEG_GROUPS], aux + _AUX_SCALE)

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
            return _bf16(u16(s[SEG_FACTOR])[row])
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
    step = _make_gemm(width)

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

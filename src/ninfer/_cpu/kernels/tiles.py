"""Register tiles as LLVM IR: rows of weights times columns of x, one order of sums for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ninfer._cpu.kernels.codes import Code
from ninfer._cpu.kernels.lanes import (
    LANES,
    VF,
    at,
    f32_t,
    fma_ir,
    i8,
    i64,
    load_ir,
    mask_ir,
    masked_load,
    prefetch_ir,
    splat,
    sum4_ir,
    sum_ir,
)

ROWS = 4
"""Rows that one register tile takes."""


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


def make_dot(code: Code, rows: int, columns: int):
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
                if not last and step.j == 0:
                    for line in range(0, 2 * code.base_bits * step.unroll, 64):
                        ahead = b.add(b.add(low, b.mul(base_row, _word(rows))), _word(line))
                        prefetch_ir(b, at(b, ahead, i8))
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


def make_gemm(columns: int):
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


def make_decode(code: Code):
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

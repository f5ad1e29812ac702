"""What stored codes are multiplied by: group scales, row factors, the divisor of a matrix."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ninfer._cpu.kernels.codes import e4m3_ir
from ninfer._cpu.kernels.lanes import LANES, VF, VI, at, f32_t, half_ir, i8, i16, i32, i64, load_ir
from ninfer._cpu.kernels.simd import f32, u16


@intrinsic
def _widen_halves(typingctx, source, out):
    """Sixteen non-negative fp16 words at ``source`` as fp32 at ``out``."""

    def codegen(context, b, signature, args):
        words = b.zext(load_ir(b, at(b, args[0], ir.VectorType(i16, LANES)), 1), VI)
        value = half_ir(b, words, VF, VI)
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
            quad = load_ir(b, at(b, source, i32, b.mul(stride, ir.Constant(i64, j))), 1)
            quads = b.insert_element(quads, quad, ir.Constant(i32, j))
        b.store(e4m3_ir(b, b.bitcast(quads, ir.VectorType(i8, LANES))), at(b, out, VF), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def bf16(typingctx, word):
    """A bf16 word as float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(b.shl(b.zext(args[0], i32), ir.Constant(i32, 16)), f32_t)

    return types.float32(types.uint16), codegen


@intrinsic
def half(typingctx, word):
    """A non-negative fp16 word as float32."""

    def codegen(context, b, signature, args):
        return half_ir(b, b.zext(args[0], i32), f32_t, i32)

    return types.float32(types.uint16), codegen


@njit
def half_scales(plane, first, count, out):
    """fp16 scales [first, first + count) of a plane as fp32 at ``out``."""
    halves = u16(plane)
    i = 0
    while count - i >= 16:
        _widen_halves(plane + 2 * (first + i), out + 4 * i)
        i += 16
    while i < count:
        f32(out)[i] = half(halves[first + i])
        i += 1


@njit
def block_scales(plane, row, rows, groups, out):
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

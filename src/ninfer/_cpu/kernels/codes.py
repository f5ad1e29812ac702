"""Sixteen stored codes of each number format as sixteen fp32 lanes.

``Code.decode`` gives the integer or floating code; where ``group`` is set it is still to be multiplied by the scale of
its group of that many columns. Planes and bit orders are those of the artifact's layouts: nibbles low half first, the
high plane a bit stream with lane 0 first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ninfer._cpu.kernels.simd import (
    LANES,
    VF,
    VI,
    call,
    const,
    fconst,
    i8,
    i16,
    i32,
    lanes_const,
    load_ir,
    shuffle,
    splat,
    widen_bf16,
)

_BYTES = ir.VectorType(i8, LANES)


@dataclass(frozen=True)
class Code:
    """How a format keeps its codes: bits of the base and the high plane per column, columns per scale (0: none)."""

    name: str
    base_bits: int
    high_bits: int
    group: int
    decode: Callable[[Any, Any, Any], Any]
    """(builder, base pointer, high pointer) -> <16 x float>; pointers are i8*."""


def _words(b, pointer, element, lanes: int = LANES):
    kind = ir.VectorType(element, lanes)
    return load_ir(b, b.bitcast(pointer, kind.as_pointer()), 1)


def _nibbles(b, pointer):
    """Sixteen u8 from eight bytes."""
    packed = _words(b, pointer, i8, 8)
    low, high = b.and_(packed, const(15, 8, i8)), b.lshr(packed, const(4, 8, i8))
    order = [x for j in range(8) for x in (j, 8 + j)]
    return shuffle(b, low, high, order)


def _signed(b, codes):
    return b.sitofp(b.sext(codes, VI), VF)


def _fp32(b, base, high):
    return b.bitcast(_words(b, base, i32), VF)


def _bf16(b, base, high):
    return widen_bf16(b, _words(b, base, i16))


def _q8(b, base, high):
    return _signed(b, _words(b, base, i8))


def _q4(b, base, high):
    eight = const(8, LANES, i8)
    return _signed(b, b.sub(b.xor(_nibbles(b, base), eight), eight))


def _stream(b, high, bits: int):
    """Fields of ``bits`` bits per lane as two's complement, times 16."""
    word = ir.IntType(LANES * bits)
    stream = load_ir(b, b.bitcast(high, word.as_pointer()), 1)
    stream = splat(b, b.zext(stream, i32) if bits == 1 else stream)
    top = b.shl(stream, lanes_const(32 - bits * (lane + 1) for lane in range(LANES)))
    return b.and_(b.ashr(top, const(28 - bits)), const(-16))


def _q5(b, base, high):
    return b.sitofp(b.or_(b.zext(_nibbles(b, base), VI), _stream(b, high, 1)), VF)


def _q6(b, base, high):
    return b.sitofp(b.or_(b.zext(_nibbles(b, base), VI), _stream(b, high, 2)), VF)


def e4m3_ir(b, codes):
    """<16 x i8> E4M3FN as fp32, NaN codes read as 480."""
    word = b.zext(codes, VI)
    magnitude = b.and_(word, const(0x7F))
    normal = b.bitcast(b.add(b.shl(magnitude, const(20)), const(120 << 23)), VF)
    tiny = b.fmul(b.sitofp(magnitude, VF), fconst(2.0**-9))
    value = b.select(b.icmp_signed("<", magnitude, const(8)), tiny, normal)
    sign = b.shl(b.and_(word, const(0x80)), const(24))
    return b.bitcast(b.or_(b.bitcast(value, VI), sign), VF)


def _fp8(b, base, high):
    return e4m3_ir(b, _words(b, base, i8))


def _fp4(b, base, high):
    """E2M1: magnitudes 0, 1, 2, 3, 4, 6, 8, 12 halves."""
    codes = _nibbles(b, base)
    m = b.and_(codes, const(7, LANES, i8))
    above4 = call(b, "llvm.usub.sat.v16i8", _BYTES, m, const(4, LANES, i8))
    above6 = call(b, "llvm.usub.sat.v16i8", _BYTES, m, const(6, LANES, i8))
    halves = b.add(m, b.add(above4, b.shl(above6, const(1, LANES, i8))))
    negative = b.icmp_unsigned(">", codes, const(7, LANES, i8))
    halves = b.select(negative, b.neg(halves), halves)
    return b.fmul(_signed(b, halves), fconst(0.5))


CODES = {
    code.name: code
    for code in (
        Code("fp32", 32, 0, 0, _fp32),
        Code("bf16", 16, 0, 0, _bf16),
        Code("q4_g64_fp16", 4, 0, 64, _q4),
        Code("q5_g64_fp16", 4, 1, 64, _q5),
        Code("q6_g64_fp16", 4, 2, 64, _q6),
        Code("q8_g32_fp16", 8, 0, 32, _q8),
        Code("nvfp4", 4, 0, 16, _fp4),
        Code("fp8_e4m3fn_row_bf16", 8, 0, 0, _fp8),
    )
}
"""Matrix formats by name."""

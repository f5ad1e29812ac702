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

from ninfer._cpu.kernels.lanes import (
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
from ninfer.native import cpu_features

WIDE = "+avx512f" in cpu_features()
"""Whether sixteen lanes are one register, of which there are 32."""


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


def _rotated(b, words, amounts):
    """Each lane rotated left by its own amount."""
    return call(b, "llvm.fshl.v16i32", VI, words, words, lanes_const(n % 32 for n in amounts))


def _nibbles(b, pointer, top: int):
    """Sixteen lanes from eight bytes, the nibble of each in bits ``top``..``top - 3``, other nibbles around it."""
    pair = _words(b, pointer, i32, 2)
    words = shuffle(b, pair, pair, [0] * 8 + [1] * 8)
    return _rotated(b, words, (top - 3 - 4 * (lane % 8) for lane in range(LANES)))


def _integer(b, words, bits: int):
    """The top ``bits`` bits of each lane as a two's complement number."""
    return b.sitofp(b.ashr(words, const(32 - bits)), VF)


def _fp32(b, base, high):
    return b.bitcast(_words(b, base, i32), VF)


def _bf16(b, base, high):
    return widen_bf16(b, _words(b, base, i16))


def _q8(b, base, high):
    return b.sitofp(b.sext(_words(b, base, i8), VI), VF)


def _q4(b, base, high):
    return _integer(b, _nibbles(b, base, 31), 4)


def _topped(b, base, high, bits: int):
    """Nibbles below ``bits`` bits of the high stream, lane 0 in its lowest bits."""
    # four bytes also where two would do: a broadcast from memory is free, and another plane follows this one
    stream = splat(b, load_ir(b, b.bitcast(high, i32.as_pointer()), 1))
    tops = _rotated(b, stream, (32 - bits * (lane + 1) for lane in range(LANES)))
    mask = -(1 << 32 - bits)
    both = b.or_(b.and_(tops, const(mask)), b.and_(_nibbles(b, base, 31 - bits), const(~mask)))
    return _integer(b, both, 4 + bits)


def _q5(b, base, high):
    return _topped(b, base, high, 1)


def _q6(b, base, high):
    return _topped(b, base, high, 2)


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


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp4(b, base, high):
    """E2M1: without a table, the magnitudes 0, 1, 2, 3, 4, 6, 8, 12 halves are u + max(u, 4) + 2 max(u, 6) - 16."""
    if WIDE:
        table = ir.Constant(VF, [*_E2M1, *(-x for x in _E2M1)])
        # of an index the instruction reads the low four bits alone
        return call(b, "llvm.x86.avx512.permvar.sf.512", VF, table, _nibbles(b, base, 3))
    codes = _nibbles(b, base, 31)
    u = b.and_(b.lshr(codes, const(28)), const(7))
    above4 = call(b, "llvm.smax.v16i32", VI, u, const(4))
    above6 = call(b, "llvm.smax.v16i32", VI, u, const(6))
    halves = b.add(b.add(u, above4), b.add(b.add(above6, above6), const(-16)))
    value = b.bitcast(b.fmul(b.sitofp(halves, VF), fconst(0.5)), VI)
    return b.bitcast(b.or_(value, b.and_(codes, const(-(1 << 31)))), VF)


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

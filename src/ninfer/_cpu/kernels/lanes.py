"""Pieces of LLVM IR for sixteen fp32 lanes, LLVM's own names left to the builder ``b``."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils

LANES = 16

i8, i16, i32, i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
f32_t = ir.FloatType()
VF = ir.VectorType(f32_t, LANES)
VI = ir.VectorType(i32, LANES)


def const(value: int, lanes: int = LANES, element: ir.IntType = i32) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def fconst(value: float) -> ir.Constant:
    return ir.Constant(VF, [float(np.float32(value))] * LANES)


def lanes_const(values) -> ir.Constant:
    return ir.Constant(VI, list(values))


def shuffle(b, x, y, order):
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(i32, len(order)), list(order)))


def splat(b, x, lanes: int = LANES):
    vt = ir.VectorType(x.type, lanes)
    one = b.insert_element(ir.Constant(vt, ir.Undefined), x, ir.Constant(i32, 0))
    return shuffle(b, one, one, [0] * lanes)


def call(b, name: str, result, *args):
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]), name)
    return b.call(fn, args)


def fma_ir(b, x, y, z):
    return call(b, "llvm.fma.v16f32", VF, x, y, z)


def at(b, address, kind, offset=None):
    """The i64 ``address`` (plus a byte ``offset``) as a pointer to ``kind``."""
    if offset is not None:
        address = b.add(address, offset)
    return b.inttoptr(address, kind.as_pointer())


def load_ir(b, pointer, align: int):
    value = b.load(pointer)
    value.align = align
    return value


def prefetch_ir(b, pointer) -> None:
    """Ask for the line at a pointer that will be read once."""
    read, locality, data = (ir.Constant(i32, n) for n in (0, 0, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, read, locality, data)


def mask_ir(b, count):
    """Lanes below the i64 ``count``."""
    top = ir.Constant(i64, LANES)
    count = b.select(b.icmp_signed("<", count, top), count, top)
    return b.icmp_signed("<", lanes_const(range(LANES)), splat(b, b.trunc(count, i32)))


def masked_load(b, pointer, mask, element, name: str):
    kind = ir.VectorType(element, LANES)
    align = ir.Constant(i32, element_bytes(element))
    return call(b, f"llvm.masked.load.v16{name}.p0", kind, pointer, align, mask, zeros(kind))


def part_load(b, pointer, count, element, name: str):
    """Lanes below ``count`` and zeros above; whole vectors, the common case, take no mask."""
    kind = ir.VectorType(element, LANES)
    cell = cgutils.alloca_once(b, kind)
    with b.if_else(b.icmp_signed(">=", count, ir.Constant(i64, LANES)), likely=True) as (whole, part):
        with whole:
            b.store(load_ir(b, b.bitcast(pointer, kind.as_pointer()), element_bytes(element)), cell)
        with part:
            b.store(masked_load(b, pointer, mask_ir(b, count), element, name), cell)
    return b.load(cell)


def part_store(b, value, pointer, count, element, name: str) -> None:
    """Lanes below ``count``."""
    kind = ir.VectorType(element, LANES)
    with b.if_else(b.icmp_signed(">=", count, ir.Constant(i64, LANES)), likely=True) as (whole, part):
        with whole:
            b.store(value, b.bitcast(pointer, kind.as_pointer()), align=element_bytes(element))
        with part:
            align = ir.Constant(i32, element_bytes(element))
            call(b, f"llvm.masked.store.v16{name}.p0", ir.VoidType(), value, pointer, align, mask_ir(b, count))


def element_bytes(element) -> int:
    return element.width // 8 if isinstance(element, ir.IntType) else 4


def zeros(kind):
    return ir.Constant(kind, [0] * kind.count)


def widen_bf16(b, words):
    return b.bitcast(b.shl(b.zext(words, VI), const(16)), VF)


def narrow_bf16(b, x):
    """bf16 words of x, to nearest even; NaN stays NaN."""
    bits = b.bitcast(x, VI)
    odd = b.and_(b.lshr(bits, const(16)), const(1))
    rounded = b.lshr(b.add(bits, b.add(odd, const(0x7FFF))), const(16))
    nan = b.or_(b.lshr(bits, const(16)), const(0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), nan, rounded), ir.VectorType(i16, LANES))


def sum_ir(b, x):
    """Sum of the lanes, halves first: the one reduction order of every kernel."""
    n = LANES
    while n > 1:
        n //= 2
        x = b.fadd(shuffle(b, x, x, range(n)), shuffle(b, x, x, range(n, 2 * n)))
    return b.extract_element(x, ir.Constant(i32, 0))


def sum4_ir(b, rows):
    """``sum_ir`` of four vectors as one <4 x float>, adding in the same order."""
    quads = []
    for x in rows:
        x = b.fadd(shuffle(b, x, x, range(8)), shuffle(b, x, x, range(8, 16)))
        quads.append(b.fadd(shuffle(b, x, x, range(4)), shuffle(b, x, x, range(4, 8))))
    pairs = [
        b.fadd(shuffle(b, p, q, (0, 1, 4, 5)), shuffle(b, p, q, (2, 3, 6, 7)))
        for p, q in ((quads[0], quads[1]), (quads[2], quads[3]))
    ]
    return b.fadd(shuffle(b, *pairs, (0, 2, 4, 6)), shuffle(b, *pairs, (1, 3, 5, 7)))


def half_ir(b, words, kind, whole):
    """Non-negative fp16 ``words`` (zero-extended to the integers ``whole``) as fp32 of ``kind``, subnormals included.

    Without the machine's own conversion, which not every machine has.
    """
    lift = ir.Constant(whole, [112 << 23] * LANES if kind is VF else 112 << 23)
    thirteen = ir.Constant(whole, [13] * LANES if kind is VF else 13)
    first = ir.Constant(whole, [0x400] * LANES if kind is VF else 0x400)
    unit = ir.Constant(kind, [2.0**-24] * LANES if kind is VF else 2.0**-24)
    normal = b.bitcast(b.add(b.shl(words, thirteen), lift), kind)
    tiny = b.fmul(b.sitofp(words, kind), unit)
    return b.select(b.icmp_signed("<", words, first), tiny, normal)

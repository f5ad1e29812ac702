"""Sixteen fp32 lanes as a Numba type, and typed views of addresses.

Kernels write their vector arithmetic out with these, so every sum has one order that no compiler heuristic changes.
LLVM legalises the lanes to whatever registers the machine has.
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from ninfer._cpu.kernels.lanes import (
    LANES,
    VF,
    VI,
    call,
    const,
    f32_t,
    fconst,
    fma_ir,
    i8,
    i16,
    i32,
    i64,
    load_ir,
    mask_ir,
    narrow_bf16,
    part_load,
    part_store,
    shuffle,
    splat,
    sum_ir,
    widen_bf16,
)


class Vec(types.Type):
    """Numba's type of sixteen fp32 lanes."""

    def __init__(self) -> None:
        super().__init__("f32x16")


vec = Vec()


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager, frontend_type):
        super().__init__(manager, frontend_type, VF)


# -- views of addresses ------------------------------------------------------------------------------------------


def _view(kind: types.Type):
    @intrinsic
    def view(typingctx, address):
        pointer = types.CPointer(kind)

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return view


u8 = _view(types.uint8)
u16 = _view(types.uint16)
i32p = _view(types.int32)
i64p = _view(types.int64)
u32p = _view(types.uint32)
u64p = _view(types.uint64)
f32 = _view(types.float32)
"""Views: an int64 address as a pointer to uint8, uint16, int32, int64, uint32, uint64, float32."""


@intrinsic
def real(typingctx, word):
    """A float64 whose bits are an int64 argument word."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


def _invoke(context, builder, signature, args):
    fnty = ir.FunctionType(ir.VoidType(), [i64] * (len(args) - 1))
    builder.call(builder.inttoptr(args[0], fnty.as_pointer()), args[1:])
    return context.get_dummy_value()


@intrinsic
def call4(typingctx, address, a, b, c, d):
    """Call the native ``void(i64 x 4)`` at ``address``."""
    return types.void(*(types.int64,) * 5), _invoke


@intrinsic
def call6(typingctx, address, a, b, c, d, e, f):
    """Call the native ``void(i64 x 6)`` at ``address``."""
    return types.void(*(types.int64,) * 7), _invoke


@intrinsic
def call7(typingctx, address, a, b, c, d, e, f, g):
    """Call the native ``void(i64 x 7)`` at ``address``."""
    return types.void(*(types.int64,) * 8), _invoke


@intrinsic
def call8(typingctx, address, a, b, c, d, e, f, g, h):
    """Call the native ``void(i64 x 8)`` at ``address``."""
    return types.void(*(types.int64,) * 9), _invoke


# -- lanes -------------------------------------------------------------------------------------------------------

_index = types.int64


@intrinsic
def load(typingctx, p, i):
    """Lanes p[i : i+16]."""

    def codegen(context, b, signature, args):
        return load_ir(b, b.bitcast(b.gep(args[0], [args[1]]), VF.as_pointer()), 4)

    return vec(types.CPointer(types.float32), _index), codegen


@intrinsic
def load_part(typingctx, p, i, n):
    """Lanes p[i : i+n], the others zero; n may exceed 16."""

    def codegen(context, b, signature, args):
        return part_load(b, b.gep(args[0], [args[1]]), args[2], f32_t, "f32")

    return vec(types.CPointer(types.float32), _index, _index), codegen


@intrinsic
def load_bf16(typingctx, p, i, n):
    """Lanes of bf16 words p[i : i+n], the others zero; n may exceed 16."""

    def codegen(context, b, signature, args):
        return widen_bf16(b, part_load(b, b.gep(args[0], [args[1]]), args[2], i16, "i16"))

    return vec(types.CPointer(types.uint16), _index, _index), codegen


@intrinsic
def load_i8(typingctx, p, i, n):
    """Lanes of signed bytes p[i : i+n], the others zero; n may exceed 16."""

    def codegen(context, b, signature, args):
        return b.sitofp(part_load(b, b.gep(args[0], [args[1]]), args[2], i8, "i8"), VF)

    return vec(types.CPointer(types.uint8), _index, _index), codegen


@intrinsic
def store(typingctx, p, i, x):
    """p[i : i+16] = x."""

    def codegen(context, b, signature, args):
        b.store(args[2], b.bitcast(b.gep(args[0], [args[1]]), VF.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), _index, vec), codegen


@intrinsic
def store_part(typingctx, p, i, x, n):
    """p[i : i+n] = x; n may exceed 16."""

    def codegen(context, b, signature, args):
        part_store(b, args[2], b.gep(args[0], [args[1]]), args[3], f32_t, "f32")
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), _index, vec, _index), codegen


@intrinsic
def store_bf16(typingctx, p, i, x, n):
    """bf16 words p[i : i+n] = x rounded to nearest even; n may exceed 16."""

    def codegen(context, b, signature, args):
        part_store(b, narrow_bf16(b, args[2]), b.gep(args[0], [args[1]]), args[3], i16, "i16")
        return context.get_dummy_value()

    return types.void(types.CPointer(types.uint16), _index, vec, _index), codegen


@intrinsic
def fill(typingctx, x):
    """All lanes x."""

    def codegen(context, b, signature, args):
        return splat(b, args[0])

    return vec(types.float32), codegen


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z, rounded once."""

    def codegen(context, b, signature, args):
        return fma_ir(b, *args)

    return vec(vec, vec, vec), codegen


@intrinsic
def total(typingctx, x):
    """Sum of the lanes in the fixed order."""

    def codegen(context, b, signature, args):
        return sum_ir(b, args[0])

    return types.float32(vec), codegen


@intrinsic
def lane0(typingctx, x):
    """The first lane."""

    def codegen(context, b, signature, args):
        return b.extract_element(args[0], ir.Constant(i32, 0))

    return types.float32(vec), codegen


@intrinsic
def largest(typingctx, x):
    """Largest lane."""

    def codegen(context, b, signature, args):
        x, n = args[0], LANES
        while n > 1:
            n //= 2
            low, high = shuffle(b, x, x, range(n)), shuffle(b, x, x, range(n, 2 * n))
            x = b.select(b.fcmp_ordered(">", low, high), low, high)
        return b.extract_element(x, ir.Constant(i32, 0))

    return types.float32(vec), codegen


@intrinsic
def keep(typingctx, x, n, other):
    """Lanes below n from x, the rest from other."""

    def codegen(context, b, signature, args):
        return b.select(mask_ir(b, args[1]), args[0], args[2])

    return vec(vec, _index, vec), codegen


@intrinsic
def exp(typingctx, x):
    """e^x per lane, within two units in the last place; 0 below -87.3, inf above 88.7.

    Range reduction by ln 2 in two parts and the degree-6 Taylor-like minimax polynomial on [-ln2/2, ln2/2].
    """

    def codegen(context, b, signature, args):
        x = args[0]
        low, high = fconst(-87.33), fconst(88.72)
        under, over = b.fcmp_ordered("<", x, low), b.fcmp_ordered(">", x, high)
        t = b.select(under, low, b.select(over, high, x))
        n = call(b, "llvm.rint.v16f32", VF, b.fmul(t, fconst(1.44269504088896341)))
        r = fma_ir(b, n, fconst(-0.693359375), t)
        r = fma_ir(b, n, fconst(2.12194440e-4), r)
        p = fconst(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = fma_ir(b, p, r, fconst(c))
        p = b.fadd(fma_ir(b, p, b.fmul(r, r), r), fconst(1.0))
        # 2^n in two factors: n = 128 alone would overflow the exponent field
        whole = b.fptosi(n, VI)
        half = b.ashr(whole, const(1))
        for part in (half, b.sub(whole, half)):
            p = b.fmul(p, b.bitcast(b.shl(b.add(part, const(127)), const(23)), VF))
        p = b.select(under, fconst(0.0), p)
        return b.select(over, ir.Constant(VF, [float("inf")] * LANES), p)

    return vec(vec), codegen


def _operator(fn, opcode: str) -> None:
    @type_callable(fn)
    def typer(context):
        def resolve(x, y):
            return vec if isinstance(x, Vec) and isinstance(y, Vec) else None

        return resolve

    @lower_builtin(fn, vec, vec)
    def lower(context, builder, signature, args):
        return getattr(builder, opcode)(*args)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@njit(inline="always")
def silu(x):
    """x / (1 + e^-x) per lane."""
    one = fill(np.float32(1.0))
    return x / (one + exp(fill(np.float32(0.0)) - x))


@njit(inline="always")
def sigmoid(x):
    """1 / (1 + e^-x) per lane."""
    one = fill(np.float32(1.0))
    return one / (one + exp(fill(np.float32(0.0)) - x))

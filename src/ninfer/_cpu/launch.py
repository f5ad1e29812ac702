"""The native side of the thread pool: run recorded launches, and share their tasks with whoever is awake.

A launch opens a gate, works on its own tasks until none is left, closes the gate, and waits only for workers that came
in. A worker that the system has not scheduled in time is never waited for, so a busy machine slows a launch by the
share of work it loses and not by a scheduling period.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ninfer._cpu.kernel import kernel
from ninfer._cpu.kernels.lanes import at, i32, i64
from ninfer._cpu.kernels.simd import call4, i64p

ENTRY = 4
"""int64 words of a recorded launch: kernel address, address of its argument words, tasks, tasks taken at a time."""

GATE, NEXT, JOB, SLEEPERS, BELL, STOP, SHARED = 0, 64, 128, 192, 256, 320, 384
"""Byte offsets in the memory that the threads share, a cache line each, and its size.

GATE: workers inside (low half of the low word), open flag, number of the launch (high word). NEXT: the next task.
JOB: kernel, argument words, tasks, grain. BELL: changes with every launch; what sleepers wait on.
"""

_OPEN = 1 << 16
_INSIDE = _OPEN - 1
_SPINS = 2000
"""Looks at the gate before a worker goes to sleep: some tens of microseconds, more than most gaps between launches."""

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the futex system call, or None on a machine this is not known for."""

_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129


@intrinsic
def _load(typingctx, address):
    """The int64 at an address, acquired."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(at(builder, args[0], i64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store(typingctx, address, value):
    """Release an int64 to an address."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], at(builder, args[0], i64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _add(typingctx, address, value):
    """Add to the int64 at an address at once; what it was."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", at(builder, args[0], i64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _and(typingctx, address, value):
    """Mask the int64 at an address at once; what it was."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("and", at(builder, args[0], i64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _swap(typingctx, address, expected, value):
    """Store ``value`` if the int64 at an address is ``expected``; whether it was."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(at(builder, args[0], i64), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


def _declare(builder, name: str, kind: ir.FunctionType):
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, kind, name)


@intrinsic
def _futex(typingctx, address, operation, value):
    """The futex system call without a timeout."""

    def codegen(context, builder, signature, args):
        fn = _declare(builder, "syscall", ir.FunctionType(i64, [i64], var_arg=True))
        zero = ir.Constant(i64, 0)
        builder.call(fn, [ir.Constant(i64, SYS_FUTEX or 0), args[0], args[1], args[2], zero, zero, zero])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx):
    """Tell the core that this is a waiting loop."""

    def codegen(context, builder, signature, args):
        if platform.machine() == "x86_64":
            builder.call(_declare(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])
        elif platform.machine() == "aarch64":
            fn = _declare(builder, "llvm.aarch64.hint", ir.FunctionType(ir.VoidType(), [i32]))
            builder.call(fn, [ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield(typingctx):
    """Let another thread have the core."""

    def codegen(context, builder, signature, args):
        builder.call(_declare(builder, "sched_yield", ir.FunctionType(i32, [])), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def _share(shared, ws):
    """Do tasks of the open launch until none is left."""
    job = i64p(shared + JOB)
    fn, words, tasks, grain = job[0], job[1], job[2], job[3]
    while True:
        begin = _add(shared + NEXT, grain)
        if begin >= tasks:
            break
        call4(fn, words, begin, min(begin + grain, tasks), ws)


@kernel("run", arity=5)
def run(tape, entries, shared, threads, ws):
    """Launch the entries of ``tape`` in order; ``ws`` is the calling thread's workspace."""
    for i in range(entries):
        entry = i64p(tape + 8 * ENTRY * i)
        fn, words, tasks, grain = entry[0], entry[1], entry[2], entry[3]
        if tasks <= grain or threads == 1:
            call4(fn, words, 0, tasks, ws)
            continue
        job = i64p(shared + JOB)
        job[0], job[1], job[2], job[3] = fn, words, tasks, grain
        _store(shared + NEXT, 0)
        launch = (_load(shared + GATE) >> 32) + 1
        _store(shared + GATE, ((launch & 0x7FFFFFFF) << 32) | _OPEN)
        _add(shared + BELL, 1)
        if _load(shared + SLEEPERS) > 0:
            _futex(shared + BELL, _WAKE_PRIVATE, threads)
        _share(shared, ws)
        _and(shared + GATE, ~_OPEN)
        spins = 0
        while _load(shared + GATE) & _INSIDE:
            spins += 1
            if spins < _SPINS:
                _pause()
            else:
                _yield()


@kernel("work", arity=2)
def work(shared, ws):
    """A worker's life: join launches until told to stop."""
    done = 0
    while True:
        spins = 0
        while True:
            if _load(shared + STOP):
                return
            gate = _load(shared + GATE)
            if gate & _OPEN and gate >> 32 != done:
                break
            spins += 1
            if spins < _SPINS:
                _pause()
                continue
            # The bell is read before the gate is looked at once more, so a launch in between fails the wait.
            bell = _load(shared + BELL)
            _add(shared + SLEEPERS, 1)
            gate = _load(shared + GATE)
            if not (gate & _OPEN and gate >> 32 != done) and not _load(shared + STOP):
                _futex(shared + BELL, _WAIT_PRIVATE, bell & 0xFFFFFFFF)
            _add(shared + SLEEPERS, -1)
            spins = 0
        if _swap(shared + GATE, gate, gate + 1):
            done = gate >> 32
            _share(shared, ws)
            _add(shared + GATE, -1)


@kernel("stop", arity=2)
def stop(shared, threads):
    """Tell the workers to return."""
    _store(shared + STOP, 1)
    _add(shared + BELL, 1)
    _futex(shared + BELL, _WAKE_PRIVATE, threads)

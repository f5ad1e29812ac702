"""Time every Op of the host device against what the machine can do: ``python -m ninfer._cpu.bench [name ...]``.

The first lines give the read bandwidth and the fp32 multiply-add rate of all threads, measured with kernels of the same
make; the table gives each Op's best time of several runs, its bytes or operations a second, and their ratio to those.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ninfer._cpu.device import CpuDevice
from ninfer._cpu.kernels import probe
from ninfer.artifact.layouts import geometry
from ninfer.device import ITEM_BYTES, Buffer
from ninfer.ops import AttentionShape, Bank, GdnShape, GdnState, KVPlanes, Matrix, Rows, Segment, Stored

FORMATS = (
    "q8_g32_fp16", "q6_g64_fp16", "q5_g64_fp16", "q4_g64_fp16", "bf16", "fp8_e4m3fn_row_bf16", "nvfp4", "fp32",
)  # fmt: skip
_SECONDS = 0.4
"""Time spent on one line, about."""


@dataclass(frozen=True)
class Line:
    """One measured piece of work: bytes it must read, multiply-adds it must do."""

    name: str
    work: Callable[[], None]
    nbytes: int = 0
    madds: int = 0


class Bench:
    """A device, and memory in it that nothing needs to keep."""

    def __init__(self, threads: int | None = None) -> None:
        self.device = CpuDevice(threads)
        self.ops = self.device.ops
        self.rng = np.random.default_rng(0)

    def buffer(self, *shape: int, dtype: str = "f32") -> Buffer:
        nbytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
        buffer = self.device.arena(-(-nbytes // 256) * 256).buffer(0, shape, dtype)
        if dtype == "f32":
            self.device.upload(buffer, self.rng.standard_normal(shape, np.float32))
        return buffer

    def ints(self, values: object) -> Buffer:
        array = np.ascontiguousarray(values, np.int32)
        buffer = self.buffer(*array.shape, dtype="i32")
        self.device.upload(buffer, array)
        return buffer

    def matrix(self, format: str, rows: int, cols: int) -> Matrix:
        """Random legal bytes: any code, scales of one kind."""
        g = geometry(format, None, (rows, cols))
        data = self.rng.integers(0, 0x77, g.nbytes, np.uint8)
        if format in ("fp32", "bf16"):
            data.view(np.uint8)[1::2] = 0x3C
        if g.scales is not None and format != "nvfp4":
            data[g.scales.offset : g.scales.offset + g.scales.nbytes].view(np.uint16)[:] = 0x2000
        if g.divisor is not None:
            data[g.divisor.offset :].view(np.float32)[:] = 64.0
        stored = Stored(format, (rows, cols), self.device.weights(data))
        return self.ops.matrix([Segment(stored, 0, rows)])

    def best(self, work: Callable[[], None]) -> float:
        """Seconds of the fastest of several launches of a recording of ``work``."""
        graph = self.device.capture(work)
        graph.launch()
        best, spent = float("inf"), 0.0
        while spent < _SECONDS:
            begin = time.perf_counter()
            graph.launch()
            took = time.perf_counter() - begin
            best, spent = min(best, took), spent + took
        graph.close()
        return best

    def madds(self) -> float:
        """fp32 multiply-adds a second of all threads."""
        tasks, rounds = 64, 20_000
        out = self.buffer(tasks)
        return tasks * rounds * 12 * 16 / self.best(lambda: self.device.submit(probe.multiply, tasks, rounds, out))

    def rows(self, B: int, W: int, start: int) -> Rows:
        lanes = list(range(B))
        return Rows(
            B, W, self.ints([start] * B), self.ints([W] * B), self.ints(lanes), self.ints(lanes), self.ints(lanes),
            self.ints([0] * B * W), self.ints(np.tile(np.arange(start, start + W), (3, B))),
        )  # fmt: skip


def projections(b: Bench) -> Iterator[Line]:
    """Decode and prefill products of a 1024-wide model, every format."""
    for format in FORMATS:
        for n, k, count in ((4096, 1024, 8), (1024, 3584, 8), (65536, 1024, 1)):
            matrices = [b.matrix(format, n, k) for _ in range(count)]  # together more than a cache holds
            for T in (1, 4, 8):
                x, outs = b.buffer(T, k), [b.buffer(T, n) for _ in matrices]
                yield Line(
                    f"{format} {count}x[{n}, {k}] T={T}", partial(_project, b, outs, x, matrices),
                    sum(m.nbytes for m in matrices), count * T * n * k,
                )  # fmt: skip
            if n == 65536:
                continue
            T = 512
            x, outs = b.buffer(T, k), [b.buffer(T, n)]
            yield Line(
                f"{format} [{n}, {k}] T={T}", partial(_project, b, outs, x, matrices[:1]), matrices[0].nbytes, T * n * k
            )


def _project(b: Bench, outs: list[Buffer], x: Buffer, matrices: list[Matrix]) -> None:
    for out, matrix in zip(outs, matrices):
        b.ops.norm_project([out], x, None, [matrix], 0.0, out)


def swiglu(b: Bench) -> Iterator[Line]:
    H, I = 1024, 3584
    gate, up = (b.matrix("q8_g32_fp16", I, H) for _ in range(2))
    norm = b.buffer(H, dtype="bf16")
    for T in (1, 4, 512):
        x, out, scratch = b.buffer(T, H), b.buffer(T, I), b.buffer(4 * T * H, dtype="u8")
        work = partial(b.ops.norm_swiglu, out, x, norm, gate, up, 1e-6, scratch)
        yield Line(f"norm_swiglu q8 2x[{I}, {H}] T={T}", work, 2 * gate.nbytes, 2 * T * I * H)


def attention(b: Bench) -> Iterator[Line]:
    """8 query and 2 key heads of 256 over a context of 8192."""
    shape = AttentionShape(8, 2, 256, 64, 1e7, tuple(j % 3 for j in range(32)))
    blocks = 8192 // 64
    norm = b.buffer(256, dtype="bf16")
    for dtype in ("f32", "bf16"):
        keys, values = (b.buffer(blocks, 2, 64, 256, dtype=dtype) for _ in range(2))
        kv = KVPlanes(keys, values, b.ints(np.arange(blocks)[None]))
        for W, start in ((1, 500), (1, 8000), (4, 4000), (512, 0), (512, 4096)):
            rows = b.rows(1, W, start)
            q, gate, out = (b.buffer(W, 8 * 256) for _ in range(3))
            k, v = (b.buffer(W, 2 * 256) for _ in range(2))
            scratch = b.buffer(max(1, b.ops.attention_scratch(W, 8192, shape)), dtype="u8")
            seen = W * start + W * (W + 1) // 2
            yield Line(
                f"attention {dtype} W={W} at {start}", partial(b.ops.attention, out, q, gate, kv, rows, shape, scratch),
                (start + W) * 2 * 2 * 256 * ITEM_BYTES[dtype], seen * 8 * 256 * 2,
            )  # fmt: skip
            prepare = partial(b.ops.attention_prepare, q, k, v, norm, norm, kv, rows, shape, 1e-6)
            yield Line(f"attention_prepare {dtype} W={W}", prepare, 4 * W * 3072)


def gdn(b: Bench) -> Iterator[Line]:
    """16 heads of 128 x 128, four taps."""
    g = GdnShape(16, 16, 128, 128, 4)
    state = GdnState(b.buffer(1, 16, 128, 128), b.buffer(1, 3, g.channels))
    fixed = (b.buffer(4, g.channels, dtype="bf16"), b.buffer(16), b.buffer(16), b.buffer(128, dtype="bf16"))
    for W in (1, 4, 512):
        qkv, gates = [b.buffer(W, 2048) for _ in range(3)], (b.buffer(W, 16), b.buffer(W, 16))
        z, out = b.buffer(W, 2048), b.buffer(W, 2048)
        scratch = b.buffer(b.ops.gdn_scratch(W, g), dtype="u8")
        rows = b.rows(1, W, 64)
        work = partial(b.ops.gdn, out, qkv, z, *gates, *fixed, state, None, rows, g, 1e-6, scratch)
        yield Line(f"gdn 16 x 128 x 128 W={W}", work, 8 * 16 * 128 * 128, 4 * W * 16 * 128 * 128)


def experts(b: Bench) -> Iterator[Line]:
    """A layer of 64 experts of 512, 8 chosen, H 2048, q4 and q5."""
    E, k, I, H = 64, 8, 512, 2048

    def bank_of(format: str, rows: int, cols: int) -> tuple[Matrix, ...]:
        return tuple(b.matrix(format, rows, cols) for _ in range(E))

    bank = Bank(bank_of("q4_g64_fp16", I, H), bank_of("q4_g64_fp16", I, H), bank_of("q5_g64_fp16", H, I))
    router, score, norm = b.matrix("bf16", E, H), b.matrix("bf16", 1, H), b.buffer(H, dtype="bf16")
    for T in (1, 4, 512):
        ids = b.ints(np.stack([b.rng.permutation(E)[:k] for _ in range(T)]))
        u, x, h, weights, shared = b.buffer(T, H), b.buffer(T, H), b.buffer(T, k, I), b.buffer(T, k), b.buffer(T)
        chosen = b.buffer(T, k, dtype="i32")
        used = min(E, T * k)
        route = partial(b.ops.moe_route, u, chosen, weights, shared, x, norm, router, score, 1e-6)
        yield Line(f"moe_route {E} T={T}", route, router.nbytes, T * E * H)
        yield Line(
            f"moe_swiglu q4 T={T}", partial(b.ops.moe_swiglu, h, u, ids, bank), 2 * used * bank.gate[0].nbytes,
            2 * T * k * I * H,
        )  # fmt: skip
        yield Line(
            f"moe_down_add q5 T={T}", partial(b.ops.moe_down_add, x, h, ids, weights, bank), used * bank.down[0].nbytes,
            T * k * I * H,
        )  # fmt: skip


def run(words: Sequence[str]) -> None:
    """Print the table; with ``words`` only of lines that contain one of them."""
    b = Bench()
    bandwidth, madds = b.device.read_bandwidth(), b.madds()
    print(f"{b.device.name}: read {bandwidth / 1e9:.1f} GB/s, multiply-add {2 * madds / 1e9:.0f} GFLOP/s")
    print(f"{'':44}{'us':>10}{'GB/s':>8}{'ratio':>7}{'GFLOP/s':>9}{'ratio':>7}")
    for family in (projections, swiglu, attention, gdn, experts):
        for line in family(b):
            if words and not any(word in line.name for word in words):
                continue
            seconds = b.best(line.work)
            rate, speed = line.nbytes / seconds, line.madds / seconds
            print(
                f"{line.name:44}{seconds * 1e6:10.1f}{rate / 1e9:8.1f}{rate / bandwidth:7.2f}"
                f"{2 * speed / 1e9:9.1f}{speed / madds:7.2f}",
                flush=True,
            )
    b.device.close()


if __name__ == "__main__":
    run(sys.argv[1:])

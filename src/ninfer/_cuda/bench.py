"""Time the Ops of a GPU at the sizes of real models, with random weights: ``ninfer bench --ops --device cuda:0``.

Every case is recorded into a graph that works on enough copies of its weights to miss the second-level cache. A row
gives microseconds of one call, the bytes it must read over that time, the ratio to the read bandwidth measured first,
and the kernels that ran. A case that did not run the kernels it is there to measure has failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ninfer._cuda.device import CudaArena, CudaDevice
from ninfer.artifact.layouts import geometry
from ninfer.device import ITEM_BYTES, working
from ninfer.ops import (
    AttentionShape,
    Bank,
    GdnRecord,
    GdnShape,
    GdnState,
    KVPlanes,
    Rows,
    Segment,
    Stored,
)

COLD = 256 << 20
"""Bytes a graph touches at least, so that nothing stays in the cache from one replay to the next."""

Q4, Q5, Q6, FP8, BF16, NVFP4 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "fp8_e4m3fn_row_bf16", "bf16", "nvfp4"


PRODUCTS = "stream_1 stream_4 stream_8 stream_16 wide_32 wide_64 wide_128"
ATTENTION = "attention attention_bf16 attention_i8"
GDN = "gdn_one gdn_few gdn_chunk gdn_carry"
"""Modules of the products that read stored weights, of attention and of Gated DeltaNet."""


class Bench:
    """Cases over one device. ``results``: what was measured."""

    def __init__(self, device: CudaDevice, only: Sequence[str]) -> None:
        self.device, self.ops, self.only = device, device.ops, only
        self.rng = np.random.default_rng(0)
        self.results: list[dict[str, Any]] = []
        self._arenas: list[CudaArena] = []
        self.bandwidth = device.read_bandwidth()
        self._noise = self.rng.integers(0, 256, 32 << 20, dtype=np.uint8)

    def measure(self) -> Iterator[dict[str, Any]]:
        """Run every case, and give its row."""
        for part in (self.layers, self.attention, self.gdn, self.experts, self.prefill, self.projections):
            done = len(self.results)
            part()
            yield from self.results[done:]

    # -- buffers

    def empty(self, *shape: int, dtype: str = "bf16") -> Any:
        nbytes = max(256, math.prod(shape) * ITEM_BYTES[dtype])
        self._arenas.append(self.device.arena(nbytes))
        return self._arenas[-1].buffer(0, shape, dtype)

    def put(self, values: Any, dtype: str) -> Any:
        kinds = {"i32": np.int32, "f32": np.float32, "u8": np.uint8}
        array = np.asarray(values)
        if dtype == "bf16":
            words = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            words = np.ascontiguousarray(array.astype(kinds[dtype]))
        buffer = self.empty(*array.shape, dtype=dtype)
        self.device.upload(buffer, words)
        self.finish()
        return buffer

    def normal(self, *shape: int) -> Any:
        return self.put(self.rng.standard_normal(shape, dtype=np.float32), "bf16")

    def scratch(self, nbytes: int) -> Any:
        return self.empty(nbytes, dtype="u8")

    def finish(self) -> None:
        event = self.device.event()
        event.record()
        event.wait()

    def stored(self, format: str, rows: int, cols: int) -> Stored:
        """A matrix of random codes and small positive scales."""
        g = geometry(format, None, (rows, cols))
        data = np.resize(self._noise, g.nbytes)
        if format == BF16:
            data.view(np.uint16)[:] = data.view(np.uint16) & 0x807F | 0x3C00
        if format == FP8:
            data &= 0xB7  # no NaN
        if g.scales is not None:
            plane = data[g.scales.offset : g.scales.offset + g.scales.nbytes]
            if format == NVFP4:
                plane[:] = 0x30
                data[g.divisor.offset :] = np.array([64.0], np.float32).view(np.uint8)  # type: ignore[union-attr]
            else:
                plane.view(np.uint16)[:] = 0x3C00 if format == FP8 else 0x2000
        buffer = self.empty(g.nbytes, dtype="u8")
        self.device.upload(buffer, data)
        self.finish()
        return Stored(format, (rows, cols), buffer)

    def matrix(self, format: str, rows: int, cols: int) -> Any:
        return self.ops.matrix([Segment(self.stored(format, rows, cols), 0, rows)])

    # -- timing

    def case(
        self, name: str, kernels: str, nbytes: int, make: Callable[[], list[Callable[[], None]]], flops: float = 0.0
    ) -> None:
        """``make`` builds one closure per copy of the weights; ``kernels``: modules, one of which must do the work."""
        if self.only and not any(text in name for text in self.only):
            return
        kept = len(self._arenas)
        works = make()
        before = self.device.asked.copy()
        works[0]()
        self.finish()
        ran = sorted(self.device.asked - before)

        def all_of_them() -> None:
            for work in works:
                work()

        graph = self.device.capture(all_of_them)
        times = sorted(self.device.seconds(graph.launch) for _ in range(9))
        graph.close()
        while len(self._arenas) > kept:
            self._arenas.pop().close()
        seconds = times[len(times) // 2] / len(works)
        row: dict[str, Any] = {"case": name, "us": seconds * 1e6, "kernels": ran, "GB/s": nbytes / seconds / 1e9}
        row["ratio"] = nbytes / seconds / self.bandwidth
        if flops:
            row["TFLOP/s"] = flops / seconds / 1e12
        few = next((r["us"] for r in self.results if r["case"] == name.replace("T=64", "T=8")), None)
        if name.endswith("T=64") and few:
            row["of 8 columns"] = row["us"] / few
        row["failed"] = not any(kernel.split(".")[0] in kernels.split() for kernel in ran)
        self.results.append(row)

    # -- cases

    def projections(self) -> None:
        large = [(f, 34816, 5120) for f in (Q4, Q5, FP8, NVFP4)]
        for format, N, K in (*large, (BF16, 9216, 2560)):
            size = geometry(format, None, (N, K)).nbytes
            for T in (1, 8, 16, 32, 64, 128):
                name = f"norm_project {format} {N}x{K} T={T}"
                self.case(name, PRODUCTS, size, partial(self._projection, format, T, N, K))

    def _projection(self, format: str, T: int, N: int, K: int) -> list[Callable[[], None]]:
        weights = [self.matrix(format, N, K) for _ in range(max(2, -(-COLD // geometry(format, None, (N, K)).nbytes)))]
        x, norm, out, scratch = self.normal(T, K), self.normal(K), self.empty(T, N), self.scratch(T * K * 2)
        return [partial(self.ops.norm_project, [out], x, norm, [w], 1e-6, scratch) for w in weights]

    def layers(self) -> None:
        """The launches of one decode step, a layer of each kind."""
        for T in (1, 8, 64):
            self._layers(T)
        for recipe, formats in (("q4-mixed", (Q5, Q4, Q4, Q5, Q4, Q4, Q5, Q5)), ("fp8", (FP8,) * 8)):
            for B, W in ((1, 1), (1, 4), (1, 8), (8, 8)):
                self._layer(recipe, formats, B, W)
            for T in (8, 64):
                self._layer(recipe, formats, 1, T, step=False)

    def _layer(self, recipe: str, formats: Sequence[str], B: int, W: int, step: bool = True) -> None:
        """A step of a Gated DeltaNet layer of the 27B geometry, to the inputs of the next, or its products alone;
        several columns: recorded.

        formats: of output, gate, up, down, query, key, value and output gate."""
        T = B * W
        H, I, g = 5120, 17408, GdnShape(16, 48, 128, 128, 4)
        keys, values = g.nk * g.dk, g.nv * g.dv
        sizes = ((H, values), (I, H), (I, H), (H, I), *((n, H) for n in (keys, keys, values, values)))
        nbytes = sum(geometry(f, None, size).nbytes for f, size in zip(formats, sizes, strict=True))
        nbytes += 2 * 2 * g.nv * H + step * B * (2 if W == 1 else 1) * 4 * g.nv * g.dk * g.dv

        def make() -> list[Callable[[], None]]:
            x, norm, product, mixed = self.normal(T, H), self.normal(H), self.empty(T, I), self.empty(T, values)
            q, k, v, z, a, b = outs = [self.normal(T, n) for n in (keys, keys, values, values, g.nv, g.nv)]
            record = None if W == 1 else self.record(T, g)
            zeros, conv, gdn_norm = self.put(np.zeros(g.nv), "f32"), self.normal(4, g.channels), self.normal(g.dv)
            rows = self.rows(B, W, 7)
            scratch = self.scratch(max(self.ops.norm_scratch(T, I), self.ops.gdn_scratch(T, g)))

            def work(out: Any, gate: Any, up: Any, down: Any, *inputs: Any) -> Callable[[], None]:
                state = GdnState(self.empty(B, g.nv, g.dk, g.dv, dtype="f32"), self.empty(B, 3, g.channels))

                def layer() -> None:
                    fixed = (conv, zeros, zeros, gdn_norm)
                    if step:
                        self.ops.gdn(mixed, (q, k, v), z, a, b, *fixed, state, record, rows, g, 1e-6, scratch)
                    self.ops.project_add(x, mixed, out, norm=norm)
                    self.ops.norm_swiglu(product, x, norm, gate, up, 1e-6, scratch)
                    self.ops.project_add(x, product, down, norm=norm)
                    self.ops.norm_project(outs, x, norm, inputs, 1e-6, scratch)

                return layer

            small = [(BF16, (g.nv, H))] * 2
            sets = [
                [self.matrix(f, *size) for f, size in (*zip(formats, sizes, strict=True), *small)] for _ in range(3)
            ]
            return [work(*matrices) for matrices in sets]

        name = f"layer {recipe}" if step else f"products of a layer {recipe}"
        self.case(f"{name}{f' {B} rows' if B > 1 else ''} T={T}", PRODUCTS, nbytes, make)

    def _layers(self, T: int) -> None:
        x, norm, scratch = self.normal(T, 5120), self.normal(5120), self.scratch(T * 17408 * 2)

        def swiglu() -> list[Callable[[], None]]:
            product = self.empty(T, 17408)
            pairs = [(self.matrix(Q4, 17408, 5120), self.matrix(Q4, 17408, 5120)) for _ in range(4)]
            return [partial(self.ops.norm_swiglu, product, x, norm, *p, 1e-6, scratch) for p in pairs]

        def add(N: int, K: int) -> list[Callable[[], None]]:
            y, size = self.normal(T, K), geometry(Q5, None, (N, K)).nbytes
            return [partial(self.ops.project_add, x, y, self.matrix(Q5, N, K)) for _ in range(-(-COLD // size))]

        def gdn() -> list[Callable[[], None]]:
            outs = [self.empty(T, n) for n in (16384, 48, 48)]
            sets = [
                (self.matrix(Q4, 16384, 5120), self.matrix(BF16, 48, 5120), self.matrix(BF16, 48, 5120))
                for _ in range(6)
            ]
            return [partial(self.ops.norm_project, outs, x, norm, w, 1e-6, scratch) for w in sets]

        def head() -> list[Callable[[], None]]:
            logits, w = self.empty(T, 248077, dtype="f32"), self.matrix(Q6, 248320, 5120)
            return [lambda: self.ops.head(logits, x, w)]

        def nbytes(format: str, N: int, K: int) -> int:
            return geometry(format, None, (N, K)).nbytes

        self.case(f"norm_swiglu q4 2x17408x5120 T={T}", PRODUCTS, 2 * nbytes(Q4, 17408, 5120), swiglu)
        self.case(f"project_add q5 5120x17408 T={T}", PRODUCTS, nbytes(Q5, 5120, 17408), partial(add, 5120, 17408))
        self.case(f"project_add q5 5120x6144 T={T}", PRODUCTS, nbytes(Q5, 5120, 6144), partial(add, 5120, 6144))
        self.case(f"norm_project q4 16384 + bf16 2x48 T={T}", PRODUCTS, nbytes(Q4, 16384, 5120), gdn)
        self.case(f"head q6 248320x5120 T={T}", PRODUCTS, nbytes(Q6, 248320, 5120), head)

    def record(self, tokens: int, g: GdnShape) -> GdnRecord:
        k, d = (self.empty(tokens, heads, width, dtype="f32") for heads, width in ((g.nk, g.dk), (g.nv, g.dv)))
        return GdnRecord(k, d, self.empty(tokens, g.nv, dtype="f32"), self.empty(tokens, g.channels))

    def rows(self, B: int, W: int, start: int) -> Rows:
        lanes, T = list(range(B)), B * W
        position = [start + w for _ in range(B) for w in range(W)]
        i32 = "i32"
        return Rows(
            B, W, self.put([start] * B, i32), self.put([W] * B, i32), self.put(lanes, i32), self.put(lanes, i32),
            self.put(lanes, i32), self.put([0] * T, i32), self.put([position] * 3, i32),
        )  # fmt: skip

    def attention(self) -> None:
        shape = AttentionShape(24, 4, 256, 64, 1e7, tuple(j % 3 for j in range(32)))
        few = ((1, 1, 1023), (1, 4, 1020), (8, 1, 1023), (1, 1, 16383), (1, 1, 131071), (8, 8, 4088))
        cases = [(*case, "bf16") for case in (*few, (1, 2048, 0), (1, 2048, 6144))]
        for B, W, start, dtype in (*cases, (8, 1, 1023, "i8"), (1, 1, 131071, "i8"), (1, 2048, 6144, "i8")):
            pages = -(-(start + W) // 64)
            row = 2 * 256 if dtype == "bf16" else 256 + 2 * 4  # bytes of a key or a value

            def make(
                B: int = B, W: int = W, start: int = start, pages: int = pages, dtype: str = dtype, row: int = row
            ) -> Any:
                T = B * W
                copies = max(1, min(16, COLD // (2 * B * pages * 4 * 64 * row)))
                kv = []
                for _ in range(copies):
                    blocks = self.put(self.rng.permutation(B * pages).reshape(B, pages), "i32")
                    keys, values = (self.empty(B * pages, 4, 64, 256, dtype=dtype) for _ in range(2))
                    scales = [self.empty(B * pages, 4, 64, 4, dtype="f16") for _ in range(2)] if dtype == "i8" else []
                    kv.append(KVPlanes(keys, values, blocks, *scales))
                rows, q, gate = self.rows(B, W, start), self.normal(T, 6144), self.normal(T, 6144)
                out, scratch = self.empty(T, 6144), self.scratch(self.ops.attention_scratch(T, start + W, shape))
                return [lambda p=p: self.ops.attention(out, q, gate, p, rows, shape, scratch) for p in kv]

            flops = 4.0 * 24 * 256 * W * (start + W / 2) * B
            name = f"attention {dtype} B={B} W={W} start={start}"
            self.case(name, ATTENTION, 2 * B * (start + W) * 4 * row, make, flops)

        def prepare() -> Any:
            rows = self.rows(1, 1, 1000)
            kv = KVPlanes(self.empty(16, 4, 64, 256), self.empty(16, 4, 64, 256), self.put([list(range(16))], "i32"))
            q, k, v, norm = self.normal(1, 6144), self.normal(1, 1024), self.normal(1, 1024), self.normal(256)
            return [lambda: self.ops.attention_prepare(q, k, v, norm, norm, kv, rows, shape, 1e-6)] * 16

        self.case("attention_prepare T=1", ATTENTION, 0, prepare)

    def gdn(self) -> None:
        shape = GdnShape(16, 48, 128, 128, 4)
        for B, W in ((1, 1), (8, 1), (1, 4), (1, 8), (8, 4), (8, 8), (1, 2048)):
            recorded = 1 < W <= 8  # verified, and folded later

            def make(B: int = B, W: int = W, recorded: bool = recorded) -> Any:
                T, C = B * W, shape.channels
                states = [
                    GdnState(self.empty(B, 48, 128, 128, dtype="f32"), self.empty(B, 3, C))
                    for _ in range(max(1, min(24, COLD // (B * 48 * 128 * 128 * 4))))
                ]
                qkv = [self.normal(T, n) for n in (2048, 2048, 6144)]
                z, a, b, out = self.normal(T, 6144), self.normal(T, 48), self.normal(T, 48), self.empty(T, 6144)
                fixed = (
                    self.normal(4, C), self.put(np.zeros(48), "f32"), self.put(np.zeros(48), "f32"), self.normal(128),
                )  # fmt: skip
                record = self.record(T, shape) if recorded else None
                rows, scratch = self.rows(B, W, 7), self.scratch(self.ops.gdn_scratch(T, shape))
                return [
                    lambda s=s: self.ops.gdn(out, qkv, z, a, b, *fixed, s, record, rows, shape, 1e-6, scratch)
                    for s in states
                ]

            moved = B * 48 * 128 * 128 * 4 * (1 if recorded else 2)
            self.case(f"gdn B={B} W={W}{' recorded' if recorded else ''}", GDN, moved, make)

        def fold(B: int, W: int) -> list[Callable[[], None]]:
            T, slots = B * W, (B, 48, 128, 128)
            layers = [
                (
                    GdnState(self.empty(*slots, dtype="f32"), self.empty(B, 3, shape.channels)),
                    self.record(T, shape),
                )
                for _ in range(48)
            ]
            rows, accepted = self.rows(B, W, 7), self.put([W] * B, "i32")
            return [lambda: self.ops.gdn_fold(layers, accepted, rows, shape)]

        for B, W in ((1, 4), (8, 8)):
            column = 4 * (16 * 128 + 48 * 128 + 48)
            moved = 48 * B * (2 * 4 * 48 * 128 * 128 + 2 * 3 * 2 * shape.channels + W * column)
            self.case(f"gdn fold of 48 layers B={B} W={W}", "gdn_fold", moved, partial(fold, B, W))

    def experts(self) -> None:
        E, k, I, H = 256, 8, 512, 2048

        def make(T: int) -> list[Callable[[], None]]:
            both, down = self.stored(Q4, E * 2 * I, H), self.stored(Q5, E * H, I)
            m = self.ops.matrix
            bank = Bank(
                tuple(m([Segment(both, 2 * e * I, (2 * e + 1) * I)]) for e in range(E)),
                tuple(m([Segment(both, (2 * e + 1) * I, (2 * e + 2) * I)]) for e in range(E)),
                tuple(m([Segment(down, e * H, (e + 1) * H)]) for e in range(E)),
            )

            def work(u: Any, x: Any, h: Any, ids: Any, weights: Any) -> None:
                self.ops.moe_swiglu(h, u, ids, bank)
                self.ops.moe_down_add(x, h, ids, weights, bank)

            def chosen() -> Any:
                return self.put(np.stack([self.rng.permutation(E)[:k] for _ in range(T)]), "i32")

            weights = self.put(np.full((T, k), 1 / k), "f32")
            u, x, h = self.normal(T, H), self.normal(T, H), self.empty(T, k, I)
            return [partial(work, u, x, h, chosen(), weights) for _ in range(16 if T < 100 else 1)]

        def route() -> list[Callable[[], None]]:
            router, score = self.matrix(BF16, E, H), self.matrix(BF16, 1, H)
            u, x, norm = self.empty(1, H), self.normal(1, H), self.normal(H)
            out = self.empty(1, k, dtype="i32"), self.empty(1, k, dtype="f32"), self.empty(1, dtype="f32")
            return [lambda: self.ops.moe_route(u, *out, x, norm, router, score, 1e-6)] * 16

        one = I * H * (2 * 4.25 + 5.25) / 8
        for T in (1, 8, 2048):
            flops = 6.0 * T * k * I * H if T > 100 else 0
            self.case(f"experts 256 top 8 T={T}", "moe", int(min(T * k, E) * one), partial(make, T), flops)
        self.case("moe_route T=1", "moe", E * H * 2, route)

    def prefill(self) -> None:
        self._prefill(Q4, 17408, 5120)
        self._prefill(BF16, 9216, 2560)

    def _prefill(self, format: str, N: int, K: int, T: int = 2048) -> None:
        def make() -> list[Callable[[], None]]:
            x, norm, out, scratch = self.normal(T, K), self.normal(K), self.empty(T, N), self.scratch(T * K * 2)
            gate, up = self.matrix(format, N, K), self.matrix(format, N, K)
            return [lambda: self.ops.norm_swiglu(out, x, norm, gate, up, 1e-6, scratch)]

        size = 2 * geometry(format, None, (N, K)).nbytes
        self.case(f"norm_swiglu {format} 2x{N}x{K} T={T}", "rows", size, make, 4.0 * T * N * K)


def run(index: int, only: Sequence[str]) -> int:
    """Print every case whose name contains one of the texts ``only``, or every case; 1 if one of them failed."""
    device = CudaDevice(index)
    try:
        with working(device):
            bench = Bench(device, only)
            print(f"{device.name}: read {bench.bandwidth / 1e9:.0f} GB/s")
            for row in bench.measure():
                print(line(row), flush=True)
            return int(any(row["failed"] for row in bench.results))
    finally:
        device.close()


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    speed = f"{row['TFLOP/s']:6.0f} TFLOP/s" if "TFLOP/s" in row else f"{row['GB/s']:6.0f} GB/s {row['ratio']:5.2f}"
    if "of 8 columns" in row:
        speed += f" {row['of 8 columns']:.2f}x of 8 columns"
    failed = "  WRONG KERNEL" if row["failed"] else ""
    return f"{row['case']:52s}{row['us']:10.1f} us  {speed:16s}  {' '.join(row['kernels'])}{failed}"

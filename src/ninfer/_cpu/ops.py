"""The Op contract on the host: check shapes, cut the work into tasks (``cuts``), launch kernels.

How work is cut decides speed alone; every result is the same bits for any cut (see ``kernels.products``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ninfer._cpu.block import CpuBlockOps
from ninfer._cpu.buffers import CpuBuffer
from ninfer._cpu.cuts import alone, grain, moe_cut, rows_per_task
from ninfer._cpu.kernels import attention as attention_kernels
from ninfer._cpu.kernels import gdn as gdn_kernels
from ninfer._cpu.kernels import kv as kv_kernels
from ninfer._cpu.kernels import moe as moe_kernels
from ninfer._cpu.kernels import products, project, sample
from ninfer._cpu.kernels import rows as row_kernels
from ninfer._cpu.matrix import CpuMatrix
from ninfer.device import Buffer
from ninfer.errors import InvariantError
from ninfer.ops import (
    AttentionShape,
    Bank,
    Drafts,
    GdnRecord,
    GdnShape,
    GdnState,
    KVPlanes,
    Rows,
    SampleOut,
    SampleRows,
    Segment,
)

_SPLIT_TOKENS = 8
"""Up to so many tokens, attention spreads a context's splits over the threads."""


class CpuOps:
    """Every Op of ``ninfer.ops.Ops``, over one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._submit = device.submit
        self.block = CpuBlockOps(device)
        self._banks: dict[int, tuple[Bank, _Experts]] = {}

    def close(self) -> None:
        """Forget the weights."""
        self._banks.clear()

    # memory
    @property
    def shared_bytes(self) -> int:
        return 0

    def use(self, area: Buffer) -> None:
        """Nothing: every thread has its own."""

    def leave(self, area: Buffer) -> None:
        """Nothing, as ``use``."""

    # weights
    def matrix(self, segments: Sequence[Segment]) -> CpuMatrix:
        return CpuMatrix(segments)

    # projections
    def embed(self, out: Buffer, table: CpuMatrix, tokens: Buffer) -> None:
        _want(out, "out", (tokens.shape[0], table.cols))
        self._submit(row_kernels.embed, tokens.shape[0], out, table, tokens, grain=grain(out))

    def norm_project(
        self,
        outs: Sequence[Buffer],
        x: Buffer,
        norm: Buffer | None,
        weights: Sequence[CpuMatrix],
        eps: float,
        scratch: Buffer,
    ) -> None:
        u = self._normed(x, norm, eps, scratch)
        for out, weight in zip(outs, weights, strict=True):
            _want(out, "out", (x.shape[0], weight.rows))
        self._project(outs, u, weights, None, add=False)

    def norm_scratch(self, tokens: int, cols: int) -> int:
        return 4 * tokens * cols

    def project_add(
        self, x: Buffer, y: Buffer, weight: CpuMatrix, scale: Buffer | None = None, norm: Buffer | None = None
    ) -> None:
        # norm: whoever reads x norms it, so there is nothing to make ready
        _want(x, "x", (y.shape[0], weight.rows))
        self._project((x,), y, (weight,), scale, add=True)

    def norm_swiglu(
        self, out: Buffer, x: Buffer, norm: Buffer | None, gate: CpuMatrix, up: CpuMatrix, eps: float, scratch: Buffer
    ) -> None:
        u = self._normed(x, norm, eps, scratch)
        columns = u.shape[0]
        _want(u, "x", (columns, gate.cols))
        _want(out, "out", (columns, gate.rows))
        block = rows_per_task(gate, columns, self._device.threads, results=2)
        tasks = -(-gate.rows // block)
        table = _columns(u)
        self._submit(
            project.swiglu, tasks, columns, table, gate, up, out, gate.rows, block,
            grain=alone(tasks, gate.nbytes + up.nbytes),
        )  # fmt: skip

    def final_norm(self, out: Buffer, x: Buffer, norm: Buffer, index: Buffer | None, eps: float) -> None:
        n, features = out.shape
        self._submit(row_kernels.norm, n, out, x, norm, index or 0, features, x.shape[0], eps, grain=grain(out))

    def norm_pair(self, out: Buffer, a: Buffer, b: Buffer, norm_a: Buffer, norm_b: Buffer, eps: float) -> None:
        tokens, features = a.shape
        _want(out, "out", (tokens, 2 * features))
        _want(b, "b", a.shape)
        self._submit(row_kernels.norm_pair, tokens, out, a, b, norm_a, norm_b, features, eps, grain=grain(out))

    def head(self, logits: Buffer, hidden: Buffer, weight: CpuMatrix) -> None:
        if logits.shape[1] > weight.rows:
            raise InvariantError(f"logits {logits.shape} of a head of {weight.rows} rows")
        self._project((logits,), hidden, (weight,), None, add=False)

    # gated attention
    def attention_prepare(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        query_norm: Buffer,
        key_norm: Buffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        eps: float,
    ) -> None:
        tokens = rows.B * rows.W
        _want(q, "q", (tokens, shape.hq * shape.hd))
        _want(k, "k", (tokens, shape.hk * shape.hd))
        frequency, axes = _rotary(shape.rot, shape.theta, shape.axes)
        self._submit(
            attention_kernels.attention_prepare, tokens, rows.start, rows.width, rows.table, rows.positions,
            tokens, rows.W, q, k, v, query_norm, key_norm, kv.k, kv.v, kv_kernels.CODES[kv.k.dtype], kv.blocks,
            kv.blocks.shape[1], kv.k.shape[0], frequency, axes, shape.hq, shape.hk, shape.hd, shape.rot, eps,
            kv.k_scale or 0, kv.v_scale or 0, grain=grain(q),
        )  # fmt: skip

    def attention(
        self, out: Buffer, q: Buffer, gate: Buffer, kv: KVPlanes, rows: Rows, shape: AttentionShape, scratch: Buffer
    ) -> None:
        _want(out, "out", (rows.B * rows.W, shape.hq * shape.hd))
        ratio = shape.hq // shape.hk
        block = max(1, min(rows.W, attention_kernels.COLUMNS // ratio))
        if attention_kernels.workspace(block * ratio, shape.hd) > products.WS_BYTES:
            raise InvariantError(f"{ratio} heads of {shape.hd} features a key head exceed the workspace")
        splits = self._splits(rows.B * rows.W, kv.blocks.shape[1])
        need = self.attention_scratch(rows.B * rows.W, kv.blocks.shape[1] * attention_kernels.PAGE, shape)
        if splits and scratch.nbytes < need:
            raise InvariantError(f"scratch of {scratch.nbytes} bytes, {need} needed")
        per_row = -(-rows.W // block)
        tasks = rows.B * per_row * shape.hk * max(splits, 1)
        words = (
            rows.start, rows.width, rows.table, 0, rows.W, block, per_row, splits, out, q, gate, kv.k, kv.v,
            kv_kernels.CODES[kv.k.dtype], kv.blocks, kv.blocks.shape[1], kv.k.shape[0], shape.hq, shape.hk, shape.hd,
            products.gemm.address, scratch, kv.k_scale or 0, kv.v_scale or 0,
        )  # fmt: skip
        self._submit(attention_kernels.attention, tasks, *words)
        if splits:
            heads = rows.B * rows.W * shape.hq
            self._submit(attention_kernels.attention_merge, heads, *words, grain=max(1, heads // 2))

    def attend(
        self,
        out: Buffer,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        gate: Buffer,
        query_norm: Buffer,
        key_norm: Buffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        eps: float,
        scratch: Buffer,
    ) -> None:
        self.attention_prepare(q, k, v, query_norm, key_norm, kv, rows, shape, eps)
        self.attention(out, q, gate, kv, rows, shape, scratch)

    def attention_scratch(self, tokens: int, context: int, shape: AttentionShape) -> int:
        few = min(tokens, _SPLIT_TOKENS)
        padded = (shape.hd + 15) // 16 * 16
        return 4 * few * shape.hq * self._splits(few, -(-context // attention_kernels.PAGE)) * (padded + 16)

    @staticmethod
    def _splits(tokens: int, blocks: int) -> int:
        """Splits that run side by side, or 0 where there are tokens enough to keep the threads busy."""
        return -(-blocks // attention_kernels.SPLIT) if tokens <= _SPLIT_TOKENS else 0

    # Gated DeltaNet
    def gdn(
        self,
        out: Buffer,
        qkv: Sequence[Buffer],
        z: Buffer,
        a: Buffer,
        b: Buffer,
        convolution: Buffer,
        a_log: Buffer,
        dt_bias: Buffer,
        norm: Buffer,
        state: GdnState,
        record: GdnRecord | None,
        rows: Rows,
        shape: GdnShape,
        eps: float,
        scratch: Buffer,
    ) -> None:
        tokens = rows.B * rows.W
        _want(out, "out", (tokens, shape.nv * shape.dv))
        _want(convolution, "convolution", (shape.taps, shape.channels))
        y = scratch.address  # type: ignore[attr-defined]
        gates = y + 4 * tokens * shape.channels
        if scratch.nbytes < self.gdn_scratch(tokens, shape):
            raise InvariantError(f"scratch of {scratch.nbytes} bytes")
        common = _gdn_words(rows, shape)
        k, g, c, d = (record.k, record.g, record.c, record.d) if record else (0, 0, 0, 0)
        self._submit(
            gdn_kernels.gdn_prepare, tokens, *common, *qkv, a, b, convolution, a_log, dt_bias, state.tail, y, gates,
            k, g, c, grain=grain(out),
        )  # fmt: skip
        tasks = rows.B * (shape.nv + 1)
        self._submit(
            gdn_kernels.gdn_scan, tasks, *common, *qkv, z, norm, eps, state.s, state.tail, y, gates, out, d, rows.B,
            scratch, grain=alone(tasks, rows.B * 8 * shape.nv * shape.dk * shape.dv),
        )  # fmt: skip

    def gdn_scratch(self, tokens: int, shape: GdnShape) -> int:
        return 4 * tokens * (shape.channels + 2 * shape.nv)

    def gdn_fold(
        self, layers: Sequence[tuple[GdnState, GdnRecord]], accepted: Buffer, rows: Rows, shape: GdnShape
    ) -> None:
        tasks = len(layers) * rows.B * (shape.nv + 1)
        words = [w for state, kept in layers for w in (state.s, state.tail, kept.k, kept.d, kept.g, kept.c)]
        self._submit(
            gdn_kernels.gdn_fold, tasks, *_gdn_words(rows, shape), accepted, rows.B, *words,
            grain=alone(tasks, len(layers) * rows.B * 8 * shape.nv * shape.dk * shape.dv),
        )  # fmt: skip

    # mixture of experts
    def moe_route(
        self,
        u: Buffer,
        ids: Buffer,
        weights: Buffer,
        shared: Buffer,
        x: Buffer,
        norm: Buffer,
        router: CpuMatrix,
        shared_score: CpuMatrix,
        eps: float,
    ) -> None:
        tokens, k = ids.shape
        need = 4 * (moe_kernels.ROUTE_TOKENS + 1) * (router.rows + moe_kernels.ROUTE_ROWS + 2)
        if need > products.RESULT_BYTES or moe_kernels.ROUTE_ROWS * router.cols * 4 > products.TILE_BYTES:
            raise InvariantError(f"a router of {router.rows} x {router.cols} exceeds the workspace")
        tasks = -(-tokens // moe_kernels.ROUTE_TOKENS)
        self._submit(
            moe_kernels.moe_route, tasks, u, ids, weights, shared, x, norm, router, shared_score, router.cols,
            router.rows, k, tokens, eps,
        )  # fmt: skip

    def moe_swiglu(self, out: Buffer, u: Buffer, ids: Buffer, bank: Bank) -> None:
        tokens, k = ids.shape
        experts = self._experts(bank)
        first: CpuMatrix = bank.gate[0]  # type: ignore[assignment]
        _want(out, "out", (tokens, k, first.rows))
        block, most = moe_cut(first, tokens * k, len(bank.gate), results=2, parts=0)
        tasks = -(-first.rows // block)
        self._submit(
            moe_kernels.moe_swiglu, tasks, out, u, ids, experts.gate, experts.up, len(bank.gate), tokens * k, k,
            first.rows, first.cols, block, most,
        )  # fmt: skip

    def moe_down_add(self, x: Buffer, h: Buffer, ids: Buffer, weights: Buffer, bank: Bank) -> None:
        tokens, k = ids.shape
        experts = self._experts(bank)
        first: CpuMatrix = bank.down[0]  # type: ignore[assignment]
        _want(h, "h", (tokens, k, first.cols))
        # A task keeps the products of all its slots, so a long prompt goes in runs of tokens.
        most_tokens = max(1, products.RESULT_BYTES // 2 // (4 * products.ROWS * k) // 2)
        for begin in range(0, tokens, most_tokens):
            end = min(tokens, begin + most_tokens)
            slots = (end - begin) * k
            block, most = moe_cut(first, slots, len(bank.down), results=1, parts=slots)
            self._submit(
                moe_kernels.moe_down_add, -(-first.rows // block), x.slice(begin, end), h.slice(begin, end),
                ids.slice(begin, end), weights.slice(begin, end), experts.down, len(bank.down), slots, k, first.rows,
                first.cols, block, most,
            )  # fmt: skip

    # sampling
    def sample(
        self, out: SampleOut, logits: Buffer, masks: Buffer, counts: Buffer, rows: SampleRows, scratch: Buffer
    ) -> None:
        positions, vocab = logits.shape
        tasks = min(positions, self._device.threads)
        self._submit(
            sample.sample, tasks, tasks, positions, rows.W, vocab, out.token, out.logprob, out.alt_ids,
            out.alt_logprobs, logits, masks, counts, rows.real, rows.whole, rows.seed, rows.index, rows.purpose,
            scratch,
        )  # fmt: skip

    def accept(
        self,
        out: SampleOut,
        accepted: Buffer,
        logits: Buffer,
        masks: Buffer,
        counts: Buffer,
        rows: SampleRows,
        drafts: Drafts,
        scratch: Buffer,
    ) -> None:
        _want(drafts.tokens, "drafts", (rows.B, rows.W - 1))
        candidates = drafts.ids.shape[2] if drafts.ids else 0
        tasks = min(rows.B, self._device.threads)
        self._submit(
            sample.accept, tasks, tasks, rows.B, rows.W, logits.shape[1], out.token, out.logprob, out.alt_ids,
            out.alt_logprobs, accepted, logits, masks, counts, rows.real, rows.whole, rows.seed, rows.index,
            rows.purpose, drafts.count, drafts.tokens, drafts.ids or 0, drafts.q or 0, candidates, scratch,
        )  # fmt: skip

    def sample_scratch(self, positions: int, vocab: int) -> int:
        return min(positions, self._device.threads) * vocab * 8

    def count(self, counts: Buffer, lanes: Buffer, tokens: Buffer, width: Buffer) -> None:
        self._submit(sample.count, 1, counts, lanes, tokens, width, *tokens.shape, *counts.shape)

    def draft_rows(
        self, index: Buffer, start: Buffer, width: Buffer, positions: Buffer, accepted: Buffer, rows: Rows, limit: int
    ) -> None:
        steps = start.shape[0]
        _want(positions, "positions", (steps, 3, rows.B))
        self._submit(
            row_kernels.draft_rows, 1, index, start, width, positions, accepted, rows.start, rows.positions, rows.B,
            rows.W, steps, limit,
        )  # fmt: skip

    def scatter(self, dst: Buffer, src: Buffer, index: Buffer) -> None:
        self._move(row_kernels.scatter, dst, src, index, dst.shape[0])

    def gather(self, dst: Buffer, src: Buffer, index: Buffer) -> None:
        self._move(row_kernels.gather, dst, src, index, src.shape[0])

    # -- own

    def _move(self, kernel: Any, dst: Buffer, src: Buffer, index: Buffer, limit: int) -> None:
        n, row = index.shape[0], src.nbytes // max(1, src.shape[0])
        if dst.nbytes // max(1, dst.shape[0]) != row:
            raise InvariantError(f"rows of {dst.shape} and {src.shape}")
        self._submit(kernel, n, dst, src, index, row, limit, grain=n)

    def _normed(self, x: Buffer, norm: Buffer | None, eps: float, scratch: Buffer) -> Buffer:
        """norm1(x, norm) in scratch, or x itself without a norm."""
        if norm is None:
            return x
        tokens, features = x.shape
        room = cast(CpuBuffer, scratch.head(4 * tokens * features)).array
        u = CpuBuffer(room.view(np.float32).reshape(x.shape), "f32")
        self._submit(row_kernels.norm, tokens, u, x, norm, 0, features, tokens, eps, grain=grain(x))
        return u

    def _project(
        self, outs: Sequence[Buffer], x: Buffer, weights: Sequence[CpuMatrix], scale: Buffer | None, add: bool
    ) -> None:
        columns = x.shape[0]
        words: list[Any] = []
        first = 0
        for out, weight in zip(outs, weights, strict=True):
            _want(x, "x", (columns, weight.cols))
            limit = out.shape[1]
            block = rows_per_task(weight, columns, self._device.threads, results=1)
            words += [weight, out, limit, first, block]
            first += -(-limit // block)
        nbytes = sum(weight.nbytes for weight in weights)
        self._submit(
            project.project, first, columns, _columns(x), int(add), scale or 0, len(weights), *words,
            grain=alone(first, nbytes * max(1, columns // 8)),
        )  # fmt: skip

    def _experts(self, bank: Bank) -> _Experts:
        known = self._banks.get(id(bank))
        if known is None or known[0] is not bank:
            known = self._banks[id(bank)] = (bank, _Experts(bank))
        return known[1]


class _Experts:
    """Addresses of a bank's matrices, as the kernels take them."""

    def __init__(self, bank: Bank) -> None:
        def addresses(matrices: Sequence[Any]) -> npt.NDArray[np.int64]:
            return np.array([m.address for m in matrices], np.int64)

        self.gate, self.up, self.down = addresses(bank.gate), addresses(bank.up), addresses(bank.down)


def _want(buffer: Buffer, name: str, shape: tuple[int, ...]) -> None:
    if buffer.shape != shape:
        raise InvariantError(f"{name} is {buffer.shape}, not {shape}")


def _columns(x: Any) -> npt.NDArray[np.int64]:
    """The address of every row of x, the last one twice."""
    stride = 4 * x.shape[1]
    return np.int64(x.address) + stride * np.minimum(np.arange(x.shape[0] + 1, dtype=np.int64), x.shape[0] - 1)


@cache
def _rotary(rot: int, theta: float, axes: tuple[int, ...]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Inverse frequencies theta^(-2j/rot), rounded to fp32, and the axis of every pair."""
    exponent = -2.0 * np.arange(rot // 2) / rot
    return np.power(float(theta), exponent).astype(np.float32), np.array(axes, np.int32)


def _gdn_words(rows: Rows, shape: GdnShape) -> tuple[Any, ...]:
    return (
        rows.start, rows.width, rows.read, rows.write, rows.W, shape.nk, shape.nv, shape.dk, shape.dv, shape.taps,
    )  # fmt: skip

"""The block operations on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ninfer._cpu.kernels import block as kernels
from ninfer.block_ops import Candidates, Chain, ContextKV, Selection
from ninfer.device import Buffer
from ninfer.errors import InvariantError
from ninfer.ops import AttentionShape, Rows


class CpuBlockOps:
    """Every operation of ``ninfer.block_ops.BlockOps``, over one device."""

    def __init__(self, device: Any) -> None:
        self._submit = device.submit

    def place(self, out: Buffer, x: Buffer, first: int) -> None:
        (tokens, features), columns = x.shape, out.shape[1]
        if out.shape[0] != tokens or not 0 <= first <= columns - features:
            raise InvariantError(f"{x.shape} at column {first} of {out.shape}")
        self._submit(kernels.place, tokens, out, x, features, columns, first)

    def norm0(self, out: Buffer, x: Buffer, norm: Buffer, index: Buffer | None, eps: float) -> None:
        n, features = out.shape
        self._submit(kernels.norm, n, out, x, norm, index or 0, features, x.shape[0], eps)

    def rotate(self, x: Buffer, norm: Buffer, rows: Rows, shape: AttentionShape, eps: float) -> None:
        exponent = -2.0 * np.arange(shape.rot // 2) / shape.rot
        frequency = np.power(float(shape.theta), exponent).astype(np.float32)
        heads = x.shape[1] // shape.hd
        self._submit(
            kernels.rotate, x.shape[0], x, norm, rows.start, rows.W, heads, shape.hd, shape.rot, frequency, eps
        )

    def append(self, kv: ContextKV, k: Buffer, v: Buffer, rows: Rows) -> None:
        pages, hk, hd = _planes(kv)
        owners = rows.write if kv.blocks is None else rows.table
        self._submit(
            kernels.append, k.shape[0], k, v, kv.k, kv.v, kv.blocks or 0, owners, rows.start, rows.width, rows.W,
            kv.length, pages, hk, hd,
        )  # fmt: skip

    def attention(
        self,
        out: Buffer,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        kv: ContextKV,
        rows: Rows,
        shape: AttentionShape,
        window: int | None,
        causal: bool,
        scratch: Buffer,
    ) -> None:
        pages, hk, hd = _planes(kv)
        owners = rows.read if kv.blocks is None else rows.table
        self._submit(
            kernels.attention, q.shape[0] * shape.hq, out, q, k, v, kv.k, kv.v, kv.blocks or 0, owners, rows.start,
            rows.W, kv.length, pages, shape.hq, hk, hd, window or 0, int(causal),
        )  # fmt: skip

    def attention_scratch(self, tokens: int, context: int, shape: AttentionShape) -> int:
        return 0

    def convolve(
        self, out: Buffer, x: Buffer, base: Buffer, delta: Buffer, side: int, columns: int, *, add: bool
    ) -> None:
        (tokens, H), taps = x.shape, base.shape[1]
        groups = delta.shape[1] // (2 * taps)
        if out.shape != x.shape or base.shape[2] != H or H % groups:
            raise InvariantError(f"{x.shape} convolved into {out.shape} by {base.shape} and {delta.shape}")
        self._submit(kernels.convolve, tokens, out, x, base, delta, side, columns, taps, H, groups, int(add))

    def select(self, out: Selection, candidates: Candidates, rows: Chain) -> None:
        c, K = candidates, out.token.shape[0]
        self._submit(
            kernels.select, rows.B, out.token, out.ids, out.q, c.ids, c.scores, c.ids.shape[1], c.count, c.gamma,
            c.predecessor, c.successor, c.gamma.shape[1], c.predecessor.shape[0], rows.tokens, rows.tokens.shape[1],
            rows.start, rows.real, rows.seed, rows.B, K,
        )  # fmt: skip

    def begin(
        self, tokens: Buffer, start: Buffer, width: Buffer, decided: Buffer, kept: Buffer, rows: Rows, mask: int
    ) -> None:
        self._submit(
            kernels.begin_block, rows.B, tokens, start, width, decided, kept, rows.start, rows.W, tokens.shape[1],
            mask, grain=rows.B,
        )  # fmt: skip


def _planes(kv: ContextKV) -> tuple[int, int, int]:
    """Pages, key heads and features of a head."""
    *pages, hk, _, hd = kv.k.shape
    return int(np.prod(pages)), hk, hd

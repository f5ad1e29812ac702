"""The block operations on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.products import pack
from ninfer.block_ops import Candidates, Chain, ContextKV, Selection
from ninfer.errors import InvariantError
from ninfer.ops import AttentionShape, Rows

_QUERIES = 32
"""Query rows of a key head that a block of attention takes."""


class CudaBlockOps:
    """Every operation of ``ninfer.block_ops.BlockOps``, over one device. rotary: a shape's frequencies, in device
    memory."""

    def __init__(
        self, device: Any, launch: Callable[..., None], rotary: Callable[[AttentionShape], CudaBuffer]
    ) -> None:
        self._device = device
        self._launch = launch
        self._rotary = rotary

    def place(self, out: CudaBuffer, x: CudaBuffer, first: int) -> None:
        (tokens, features), columns = x.shape, out.shape[1]
        if out.shape[0] != tokens or not 0 <= first <= columns - features:
            raise InvariantError(f"{x.shape} at column {first} of {out.shape}")
        self._launch("block", "block_place", tokens, 256, pack(out, x, features, columns, first))

    def norm0(self, out: CudaBuffer, x: CudaBuffer, norm: CudaBuffer, index: CudaBuffer | None, eps: float) -> None:
        n, features = out.shape
        self._launch("block", "block_norm", n, 256, pack(out, x, norm, index, eps, features))

    def rotate(self, x: CudaBuffer, norm: CudaBuffer, rows: Rows, shape: AttentionShape, eps: float) -> None:
        tokens, heads = x.shape[0], x.shape[1] // shape.hd
        words = pack(x, norm, rows.start, self._rotary(shape), eps, tokens, rows.W, heads, shape.hd, shape.rot)
        self._launch("block", "block_rotate", -(-tokens * heads // 4), 128, words, 16 * shape.hd)

    def append(self, kv: ContextKV, k: CudaBuffer, v: CudaBuffer, rows: Rows) -> None:
        words = _context(kv, rows.write if kv.blocks is None else rows.table, rows) + pack(k, v, rows.width)
        self._launch("block", "block_append", k.shape[0], 128, words)

    def attention(
        self,
        out: CudaBuffer,
        q: CudaBuffer,
        k: CudaBuffer,
        v: CudaBuffer,
        kv: ContextKV,
        rows: Rows,
        shape: AttentionShape,
        window: int | None,
        causal: bool,
        scratch: CudaBuffer,
    ) -> None:
        width = next((w for w in (64, 128, 256) if shape.hd <= w), None)
        if width is None or shape.hd % 2:
            raise InvariantError(f"heads of {shape.hd} features")
        tiles = -(-rows.W * (shape.hq // shape.hk) // _QUERIES)
        units = rows.B * shape.hk * tiles
        splits = max(1, min(self._units // units, 2 * kv.length))
        if scratch.nbytes < self._bytes(units * splits, shape):
            raise InvariantError(f"scratch of {scratch.nbytes} bytes")
        words = _context(kv, rows.read if kv.blocks is None else rows.table, rows) + pack(
            out, q, k, v, scratch, math.log2(math.e) / math.sqrt(shape.hd), shape.hq, window or 0, int(causal), splits
        )
        shared = _QUERIES * (2 * width + 4 * (width + 2) + 4 * 32)
        grid = (tiles, shape.hk * splits, rows.B)
        self._launch("block", f"block_attention_{width}", grid, 128, words, shared)
        self._launch("block", "block_merge", (rows.B * rows.W, shape.hq), -(-shape.hd // 32) * 32, words)

    def attention_scratch(self, tokens: int, context: int, shape: AttentionShape) -> int:
        rows = tokens * (shape.hq // shape.hk)
        return self._bytes(max(self._units, shape.hk * (tokens + rows // _QUERIES)), shape)

    def convolve(
        self, out: CudaBuffer, x: CudaBuffer, base: CudaBuffer, delta: CudaBuffer, side: int, columns: int, *, add: bool
    ) -> None:
        (tokens, H), taps = x.shape, base.shape[1]
        groups = delta.shape[1] // (2 * taps)
        if out.shape != x.shape or base.shape[2] != H or H % groups:
            raise InvariantError(f"{x.shape} convolved into {out.shape} by {base.shape} and {delta.shape}")
        words = pack(out, x, base, delta, side, columns, taps, H, groups, int(add))
        self._launch("block", "block_convolve", tokens, 256, words)

    def select(self, out: Selection, candidates: Candidates, rows: Chain) -> None:
        c, K = candidates, out.token.shape[0]
        words = pack(
            out.token, out.ids, out.q, c.ids, c.scores, c.gamma, c.predecessor, c.successor, rows.tokens, rows.start,
            rows.real, rows.seed, c.ids.shape[1], c.count, c.gamma.shape[1], c.predecessor.shape[0],
            rows.tokens.shape[1], rows.B, K,
        )  # fmt: skip
        self._launch("block", "block_select", rows.B, 256, words)

    def begin(
        self, tokens: CudaBuffer, start: CudaBuffer, width: CudaBuffer, decided: CudaBuffer, kept: CudaBuffer,
        rows: Rows, mask: int,
    ) -> None:  # fmt: skip
        words = pack(tokens, start, width, decided, kept, rows.start, rows.W, tokens.shape[1], mask)
        self._launch("block", "block_begin", rows.B, 32, words)

    @property
    def _units(self) -> int:
        """Blocks that attention cuts a few rows' context into, about."""
        return 4 * int(self._device.multiprocessors)

    @staticmethod
    def _bytes(blocks: int, shape: AttentionShape) -> int:
        return 4 * blocks * _QUERIES * (shape.hd + 2)


def _context(kv: ContextKV, owners: Any, rows: Rows) -> bytes:
    *_, hk, _, hd = kv.k.shape
    return pack(kv.k, kv.v, kv.blocks, owners, rows.start, rows.W, kv.length, hk, hd)

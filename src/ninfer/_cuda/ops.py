"""The Op contract on a GPU: check shapes, choose kernels, launch them.

Activations are bf16. Every kernel takes one structure by value; its fields are the words packed here, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ninfer._cuda import gdn
from ninfer._cuda.area import NBYTES, Area
from ninfer._cuda.blas import Blas
from ninfer._cuda.block import CudaBlockOps
from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.experts import Experts
from ninfer._cuda.matrix import CudaMatrix
from ninfer._cuda.panels import panel_words
from ninfer._cuda.products import ADD, STORE_BF16, STORE_F32, SWIGLU, Gemm, Products, pack
from ninfer._cuda.sampling import Sampler
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

_PAGE = 64

_SHARED_KEYS = 512
"""Up to so many query rows of a key head, the warps of a block share out the keys, and blocks the context: fewer than
that, in tiles of 64, would leave most of a GPU idle while a few blocks read a long context."""

_NEW = 8
"""Up to so many columns a row are prepared by the blocks of attention themselves."""


class CudaOps:
    """Every Op of ``ninfer.ops.Ops``, over one device."""

    def __init__(self, device: Any, gemm: Gemm | None = None) -> None:
        self._device = device
        self._gemm = gemm or Blas(device)
        self._area = Area()
        self._products = Products(device, self._gemm, self._area)
        self._experts = Experts(device, self._products)
        self._delta = gdn.DeltaNet(device)
        self._sampler = Sampler(device)
        self.block = CudaBlockOps(device, self._launch, self._rotary)
        self._tables: dict[int, tuple[Any, Any]] = {}
        self._frequencies: dict[AttentionShape, CudaBuffer] = {}

    def close(self) -> None:
        """Give back what is not the device's memory."""
        if isinstance(self._gemm, Blas):
            self._gemm.close()

    # memory
    @property
    def shared_bytes(self) -> int:
        return NBYTES

    def use(self, area: CudaBuffer) -> None:
        self._area.use(area, self._device.zero)
        if isinstance(self._gemm, Blas):
            self._gemm.use(self._area.workspace)

    def leave(self, area: CudaBuffer) -> None:
        self._area.leave(area)

    # weights
    def matrix(self, segments: Sequence[Segment]) -> CudaMatrix:
        return CudaMatrix(segments)

    # projections
    def embed(self, out: CudaBuffer, table: CudaMatrix, tokens: CudaBuffer) -> None:
        _want(out, "out", (tokens.shape[0], table.cols))
        words = pack(tokens, out, table.cols, table.rows, len(table.parts), self._table(table, (table,)))
        self._launch("rows", "embed", tokens.shape[0], 256, words)

    def norm_project(
        self,
        outs: Sequence[CudaBuffer],
        x: CudaBuffer,
        norm: CudaBuffer | None,
        weights: Sequence[CudaMatrix],
        eps: float,
        scratch: CudaBuffer,
    ) -> None:
        self._products(STORE_BF16, outs, x, norm, weights, eps, None, scratch)

    def norm_scratch(self, tokens: int, cols: int) -> int:
        return 2 * tokens * cols

    def project_add(
        self, x: CudaBuffer, y: CudaBuffer, weight: CudaMatrix, scale: CudaBuffer | None = None,
        norm: CudaBuffer | None = None,
    ) -> None:  # fmt: skip
        self._products(ADD, (x,), y, None, (weight,), scale=scale, next_norm=norm)

    def norm_swiglu(
        self,
        out: CudaBuffer,
        x: CudaBuffer,
        norm: CudaBuffer | None,
        gate: CudaMatrix,
        up: CudaMatrix,
        eps: float,
        scratch: CudaBuffer,
    ) -> None:
        self._products(SWIGLU, (out,), x, norm, (gate, up), eps, None, scratch)

    def final_norm(
        self, out: CudaBuffer, x: CudaBuffer, norm: CudaBuffer, index: CudaBuffer | None, eps: float
    ) -> None:
        features = out.shape[1]
        self._launch("rows", "final_norm", out.shape[0], 256, pack(out, x, norm, index, eps, features, 0, features))

    def norm_pair(
        self, out: CudaBuffer, a: CudaBuffer, b: CudaBuffer, norm_a: CudaBuffer, norm_b: CudaBuffer, eps: float
    ) -> None:
        tokens, H = a.shape
        for x, norm, first in ((a, norm_a, 0), (b, norm_b, H)):
            self._launch("rows", "final_norm", tokens, 256, pack(out, x, norm, None, eps, H, first, 2 * H))

    def head(self, logits: CudaBuffer, hidden: CudaBuffer, weight: CudaMatrix) -> None:
        self._products(STORE_F32, (logits,), hidden, None, (weight,))

    # gated attention
    def attention_prepare(
        self,
        q: CudaBuffer,
        k: CudaBuffer,
        v: CudaBuffer,
        query_norm: CudaBuffer,
        key_norm: CudaBuffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        eps: float,
    ) -> None:
        tokens = rows.B * rows.W
        _want(q, "q", (tokens, shape.hq * shape.hd))
        _want(k, "k", (tokens, shape.hk * shape.hd))
        words = pack(
            q, k, v, query_norm, key_norm, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.blocks, rows.start, rows.width,
            rows.table, rows.positions, self._rotary(shape), eps, tokens, rows.W, kv.blocks.shape[1], shape.hq,
            shape.hk, shape.hd, shape.rot,
        )  # fmt: skip
        blocks = -(-tokens * (shape.hq + 2 * shape.hk) // 4)
        self._launch("attention", "attention_prepare", blocks, 128, words, 48 * shape.hd)

    def attention(
        self,
        out: CudaBuffer,
        q: CudaBuffer,
        gate: CudaBuffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        scratch: CudaBuffer,
    ) -> None:
        self._attend(out, q, gate, kv, rows, shape, scratch, (None,) * 6 + (0.0, 0, 0))

    def attend(
        self,
        out: CudaBuffer,
        q: CudaBuffer,
        k: CudaBuffer,
        v: CudaBuffer,
        gate: CudaBuffer,
        query_norm: CudaBuffer,
        key_norm: CudaBuffer,
        kv: KVPlanes,
        rows: Rows,
        shape: AttentionShape,
        eps: float,
        scratch: CudaBuffer,
    ) -> None:
        if rows.W > _NEW or shape.hd % 8 or shape.rot % 16:
            self.attention_prepare(q, k, v, query_norm, key_norm, kv, rows, shape, eps)
            self.attention(out, q, gate, kv, rows, shape, scratch)
            return
        tokens = rows.B * rows.W
        _want(q, "q", (tokens, shape.hq * shape.hd))
        _want(k, "k", (tokens, shape.hk * shape.hd))
        new = (k, v, query_norm, key_norm, rows.positions, self._rotary(shape), eps, tokens, shape.rot)
        self._attend(out, q, gate, kv, rows, shape, scratch, new)

    def _attend(
        self, out: CudaBuffer, q: CudaBuffer, gate: CudaBuffer, kv: KVPlanes, rows: Rows, shape: AttentionShape,
        scratch: CudaBuffer, new: tuple[Any, ...],
    ) -> None:  # fmt: skip
        _want(out, "out", (rows.B * rows.W, shape.hq * shape.hd))
        width = next((w for w in (64, 128, 256) if shape.hd <= w), None)
        if width is None or kv.k.dtype not in ("bf16", "i8"):
            raise InvariantError(f"heads of {shape.hd} features over {kv.k.dtype} keys")
        queries, coded = rows.W * (shape.hq // shape.hk), kv.k.dtype == "i8"
        shares_keys = queries <= _SHARED_KEYS
        page = 2 * _PAGE * (width + width // 32 if coded else 2 * width)
        wide = 2 * _PAGE * width if coded else 0  # int8 pages become a tile of bf16
        kernel, tile, shared = "rows", 64, 128 * width + page + wide
        if shares_keys:  # the warps' sums take the place of queries, keys and values
            angles = 4 * rows.W * shape.rot
            kernel, tile, shared = "keys", 16, max(32 * width + (2 if coded else 1) * page + angles, 4 * 64 * width)
        tiles = -(-queries // tile)
        units = rows.B * shape.hk * tiles
        splits = max(1, self._units // units) if shares_keys else 1
        splits = min(splits, kv.blocks.shape[1])
        scale = math.log2(math.e) / math.sqrt(shape.hd)
        left = self._products.panels.offer(out) if splits > 1 else None
        words = pack(
            out, q, gate, kv.k, kv.v, kv.k_scale, kv.v_scale, kv.blocks, rows.start, rows.width, rows.table, scratch,
            scale, rows.W, kv.blocks.shape[1], shape.hq, shape.hk, shape.hd, splits, *panel_words(left), *new,
        )  # fmt: skip
        grid = (tiles, shape.hk * splits, rows.B)
        self._launch(f"attention_{kv.k.dtype}", f"attention_{kernel}_{width}", grid, 128, words, shared)
        if splits > 1:
            threads = -(-shape.hd // 32) * 32
            self._launch("attention", "attention_merge", (rows.B * rows.W, shape.hq), threads, words, 8 * splits)
        if left:
            self._products.panels.leave(left)

    def attention_scratch(self, tokens: int, context: int, shape: AttentionShape) -> int:
        return self._units * 16 * (shape.hd + 2) * 4

    @property
    def _units(self) -> int:
        """Blocks that attention cuts a few tokens' context into, at most: as many as run at once."""
        return 2 * int(self._device.multiprocessors)

    # Gated DeltaNet
    def gdn(
        self,
        out: CudaBuffer,
        qkv: Sequence[CudaBuffer],
        z: CudaBuffer,
        a: CudaBuffer,
        b: CudaBuffer,
        convolution: CudaBuffer,
        a_log: CudaBuffer,
        dt_bias: CudaBuffer,
        norm: CudaBuffer,
        state: GdnState,
        record: GdnRecord | None,
        rows: Rows,
        shape: GdnShape,
        eps: float,
        scratch: CudaBuffer,
    ) -> None:
        _want(out, "out", (rows.B * rows.W, shape.nv * shape.dv))
        _want(convolution, "convolution", (shape.taps, shape.channels))
        inputs = (*qkv, z, a, b, convolution, a_log, dt_bias, norm)
        tickets, panels = self._area.tickets, self._products.panels
        left = panels.offer(out) if 1 < rows.W <= gdn.FEW else None
        self._delta.run(out, inputs, state, record, rows, shape, eps, scratch, tickets, left)
        if left:
            panels.leave(left)

    def gdn_scratch(self, tokens: int, shape: GdnShape) -> int:
        return self._delta.scratch(tokens, shape)

    def gdn_fold(
        self, layers: Sequence[tuple[GdnState, GdnRecord]], accepted: CudaBuffer, rows: Rows, shape: GdnShape
    ) -> None:
        self._delta.fold(layers, accepted, rows, shape)

    # mixture of experts
    def moe_route(
        self,
        u: CudaBuffer,
        ids: CudaBuffer,
        weights: CudaBuffer,
        shared: CudaBuffer,
        x: CudaBuffer,
        norm: CudaBuffer,
        router: CudaMatrix,
        shared_score: CudaMatrix,
        eps: float,
    ) -> None:
        scores = self._area.scores
        self.final_norm(u, x, norm, None, eps)
        self._experts.route(ids, weights, shared, u, router, shared_score, scores)

    def moe_swiglu(self, out: CudaBuffer, u: CudaBuffer, ids: CudaBuffer, bank: Bank) -> None:
        self._experts.swiglu(out, u, ids, bank)

    def moe_down_add(self, x: CudaBuffer, h: CudaBuffer, ids: CudaBuffer, weights: CudaBuffer, bank: Bank) -> None:
        self._experts.down_add(x, h, ids, weights, bank)

    # sampling
    def sample(
        self, out: SampleOut, logits: CudaBuffer, masks: CudaBuffer, counts: CudaBuffer, rows: SampleRows,
        scratch: CudaBuffer,
    ) -> None:  # fmt: skip
        self._sampler.sample(out, logits, masks, counts, rows, scratch)

    def accept(
        self, out: SampleOut, accepted: CudaBuffer, logits: CudaBuffer, masks: CudaBuffer, counts: CudaBuffer,
        rows: SampleRows, drafts: Drafts, scratch: CudaBuffer,
    ) -> None:  # fmt: skip
        self._sampler.accept(out, accepted, logits, masks, counts, rows, drafts, scratch)

    def sample_scratch(self, positions: int, vocab: int) -> int:
        return self._sampler.scratch(positions, vocab)

    def count(self, counts: CudaBuffer, lanes: CudaBuffer, tokens: CudaBuffer, width: CudaBuffer) -> None:
        self._sampler.count(counts, lanes, tokens, width)

    def draft_rows(
        self, index: CudaBuffer, start: CudaBuffer, width: CudaBuffer, positions: CudaBuffer, accepted: CudaBuffer,
        rows: Rows, limit: int,
    ) -> None:  # fmt: skip
        out = (index, start, width, positions)
        words = pack(*out, accepted, rows.start, rows.positions, rows.B, rows.W, start.shape[0], limit)
        self._launch("rows", "draft_rows", -(-rows.B // 32), 32, words)

    def scatter(self, dst: CudaBuffer, src: CudaBuffer, index: CudaBuffer) -> None:
        self._move("scatter", dst, src, index)

    def gather(self, dst: CudaBuffer, src: CudaBuffer, index: CudaBuffer) -> None:
        self._move("gather", dst, src, index)

    # -- own

    def _move(self, symbol: str, dst: CudaBuffer, src: CudaBuffer, index: CudaBuffer) -> None:
        row = src.nbytes // max(1, src.shape[0])
        if dst.nbytes // max(1, dst.shape[0]) != row or row % 2:
            raise InvariantError(f"rows of {dst.shape} and {src.shape}")
        self._launch("rows", symbol, index.shape[0], 256, pack(dst, src, index, row // 2))

    def _rotary(self, shape: AttentionShape) -> CudaBuffer:
        """Frequency theta^(-2j/rot), rounded to fp32, and axis of every pair, as the kernel reads them."""
        known = self._frequencies.get(shape)
        if known is None:
            exponent = -2.0 * np.arange(shape.rot // 2) / shape.rot
            bits = np.power(float(shape.theta), exponent).astype(np.float32).view(np.uint32)
            words = [int(f) | axis << 32 for f, axis in zip(bits, shape.axes, strict=True)]
            known = self._frequencies[shape] = self._device.table(words)
        return known

    def _launch(self, module: str, symbol: str, grid: Any, block: int, words: bytes, shared: int = 0) -> None:
        function = self._device.function(module, symbol, shared)
        self._device.launch(function, grid, block, words, shared=shared, dependent=True)

    def _table(self, owner: Any, matrices: Sequence[CudaMatrix]) -> CudaBuffer:
        """The segments of matrices in device memory, made once for ``owner``."""
        known = self._tables.get(id(owner))
        if known is None:
            words: list[int] = []
            for matrix in matrices:
                at = 0
                for rows in matrix.parts:
                    words += [*rows.words, 0, 0, 0, at]
                    at += rows.rows
            known = self._tables[id(owner)] = (owner, self._device.table(words))
        return known[1]


def _want(buffer: CudaBuffer, name: str, shape: tuple[int, ...]) -> None:
    if buffer.shape != shape:
        raise InvariantError(f"{name} is {buffer.shape}, not {shape}")

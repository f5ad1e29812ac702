"""Mixture of experts: which kernels run, and over which tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.matrix import CudaMatrix
from ninfer._cuda.products import STORE_F32, Products, pack
from ninfer.errors import InvariantError
from ninfer.ops import Bank

_FEW_TOKENS = 8
"""Up to so many tokens, every slot (a token's choice of an expert) reads its expert on its own."""

_FEW_WARPS, _MANY_WARPS, _STAGES, _MANY_COLUMNS = 8, 4, 3, 32
_ORDER = 4 << 20
"""Bytes for the slots in the order of their experts, and their batches."""


class Experts:
    """The expert Ops over one device."""

    def __init__(self, device: Any, products: Products) -> None:
        self._device = device
        self._products = products
        self._banks: dict[int, tuple[Bank, _Tables]] = {}

    def route(
        self,
        ids: CudaBuffer,
        weights: CudaBuffer,
        shared: CudaBuffer,
        u: CudaBuffer,
        router: CudaMatrix,
        score: CudaMatrix,
        scratch: CudaBuffer,
    ) -> None:
        """Everything of ``Ops.moe_route`` but the norm; ``scratch`` f32 holds logits and scores of some tokens."""
        tokens, k = ids.shape
        most = scratch.shape[0] // (router.rows + 1)
        for begin in range(0, tokens, most):
            end = min(tokens, begin + most)
            count = end - begin
            logits = scratch.head(count, router.rows)
            scores = CudaBuffer(scratch.ptr + logits.nbytes, (count, 1), "f32")
            part = u.slice(begin, end)
            self._products(STORE_F32, (logits, scores), part, None, (router, score))
            words = pack(
                ids.slice(begin, end), weights.slice(begin, end), shared.slice(begin, end), logits, scores, count,
                router.rows, k,
            )  # fmt: skip
            self._launch("route", -(-count // 4), 128, words, 16 * (router.rows + k))

    def swiglu(self, out: CudaBuffer, u: CudaBuffer, ids: CudaBuffer, bank: Bank) -> None:
        tables = self._tables(bank)
        (tokens, k), K, rows = ids.shape, tables.hidden, tables.width
        _want(out, "out", (tokens, k, rows))
        _want(u, "u", (tokens, K))
        padded, stage = _padded(K), tables.swiglu_stage
        shared = _FEW_WARPS * _STAGES * stage + 2 * padded
        if tokens <= _FEW_TOKENS and shared <= self._device.shared_limit:
            words = self._words(out, u, ids, None, tables.gate, tables.up, tokens * k, k, tables, rows, K, stage, 0, 0)
            self._launch("experts_few_swiglu", (-(-rows // 16), tokens * k), 256, words, shared)
            return
        room = self._products.room
        for begin, end in self._runs(tokens, k, tables.experts, 2 * padded):
            operands, count = room.ptr + _ORDER, end - begin
            self._operands(operands, u.slice(begin, end), padded)
            words = self._words(
                out.slice(begin, end), operands, ids.slice(begin, end), None, tables.gate, tables.up, count * k, k,
                tables, rows, K, stage, room, 0,
            )  # fmt: skip
            self._launch("experts_sort", 1, 1024, words, 8 * tables.experts)
            grid = (-(-rows // (16 * _MANY_WARPS)), self._batches(count * k, tables.experts))
            self._launch("experts_many_swiglu", grid, 128, words, self._many_shared(stage, tables.swiglu_span))

    def down_add(self, x: CudaBuffer, h: CudaBuffer, ids: CudaBuffer, weights: CudaBuffer, bank: Bank) -> None:
        tables = self._tables(bank)
        (tokens, k), K, rows = ids.shape, tables.width, tables.hidden
        _want(h, "h", (tokens, k, K))
        _want(x, "x", (tokens, rows))
        padded, stage = _padded(K), tables.down_stage
        shared = _FEW_WARPS * (_STAGES * stage + 2 * padded)
        if tokens <= _FEW_TOKENS and shared <= self._device.shared_limit:
            words = self._words(x, h, ids, weights, tables.down, None, tokens * k, k, tables, rows, K, stage, 0, 0)
            self._launch("experts_few_down", (-(-rows // 32), tokens), 256, words, shared)
            return
        room = self._products.room
        for begin, end in self._runs(tokens, k, tables.experts, k * (2 * padded + 4 * rows)):
            count = end - begin
            operands = room.ptr + _ORDER
            sums = operands + count * k * 2 * padded
            self._operands(operands, h.slice(begin, end).head(count * k, K), padded)
            words = self._words(
                x.slice(begin, end), operands, ids.slice(begin, end), weights.slice(begin, end), tables.down, None,
                count * k, k, tables, rows, K, stage, room, sums,
            )  # fmt: skip
            self._launch("experts_sort", 1, 1024, words, 8 * tables.experts)
            grid = (-(-rows // (32 * _MANY_WARPS)), self._batches(count * k, tables.experts))
            self._launch("experts_many_down", grid, 128, words, self._many_shared(stage, tables.down_span))
            self._launch("experts_add", count, 256, words, 0)

    # -- own

    def _runs(self, tokens: int, k: int, experts: int, token_bytes: int) -> list[tuple[int, int]]:
        """Tokens [begin, end) at a time, so that the workspace holds their order and ``token_bytes`` of each."""
        order = (_ORDER // 4 - 3 * experts - 2) * 16 // (17 * k)
        most = min((self._products.room.nbytes - _ORDER) // token_bytes, order)
        if most < 1:
            raise InvariantError(f"{token_bytes} bytes a token exceed the workspace")
        return [(begin, min(tokens, begin + most)) for begin in range(0, tokens, most)]

    @staticmethod
    def _batches(slots: int, experts: int) -> int:
        """At most so many runs of ``_MANY_COLUMNS`` slots of one expert."""
        return slots // _MANY_COLUMNS + min(slots, experts)

    @staticmethod
    def _many_shared(stage: int, span: int) -> int:
        return _STAGES * (_MANY_WARPS * stage + _MANY_COLUMNS * (2 * span + 64))

    def _operands(self, out: int, x: CudaBuffer, padded: int) -> None:
        function = self._device.function("rows", "operands", 0)
        words = pack(x, None, out, None, None, 0.0, x.shape[1], padded)
        self._device.launch(function, x.shape[0], 256, words, shared=0, dependent=True)

    @staticmethod
    def _words(
        out: Any, x: Any, ids: Any, weights: Any, first: Any, second: Any, slots: int, k: int, tables: _Tables,
        rows: int, K: int, stage: int, order: Any, sums: int,
    ) -> bytes:  # fmt: skip
        return pack(out, x, ids, weights, first, second, order, sums, slots, k, tables.experts, rows, K, stage)

    def _launch(self, symbol: str, grid: Any, block: int, words: bytes, shared: int) -> None:
        function = self._device.function("moe", symbol, shared)
        self._device.launch(function, grid, block, words, shared=shared, dependent=True)

    def _tables(self, bank: Bank) -> _Tables:
        known = self._banks.get(id(bank))
        if known is None:
            known = self._banks[id(bank)] = (bank, _Tables(self._device, bank))
        return known[1]


class _Tables:
    """A bank's segments in device memory."""

    def __init__(self, device: Any, bank: Bank) -> None:
        self.experts = len(bank.gate)
        self.width, self.hidden = bank.gate[0].rows, bank.gate[0].cols
        for gate, up in zip(bank.gate, bank.up, strict=True):
            if [p.format for p in gate.parts] != [p.format for p in up.parts]:  # type: ignore[attr-defined]
                raise InvariantError("gate and up of an expert are stored in different formats")
        self.gate, self.up, self.down = (self._upload(device, m) for m in (bank.gate, bank.up, bank.down))
        self.swiglu_stage, self.swiglu_span = self._room(bank.gate)
        self.down_stage, self.down_span = self._room(bank.down)

    @staticmethod
    def _upload(device: Any, matrices: Sequence[Any]) -> CudaBuffer:
        words: list[int] = []
        for matrix in matrices:
            if len(matrix.parts) != 1:
                raise InvariantError("an expert's matrix is rows of one stored matrix")
            words += [*matrix.parts[0].words, 0, 0, 0, 0]
        buffer: CudaBuffer = device.table(words)
        return buffer

    @staticmethod
    def _room(matrices: Sequence[Any]) -> tuple[int, int]:
        parts = [matrix.parts[0] for matrix in matrices]
        return max(p.stage for p in parts), max(p.span for p in parts)


def _padded(K: int) -> int:
    return -(-K // 128) * 128


def _want(buffer: CudaBuffer, name: str, shape: tuple[int, ...]) -> None:
    if buffer.shape != shape:
        raise InvariantError(f"{name} is {buffer.shape}, not {shape}")

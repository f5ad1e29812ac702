"""Gated DeltaNet on a GPU: one launch for a few columns, three for many, and one for the fold of many layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.panels import Left, panel_words
from ninfer._cuda.products import pack
from ninfer.errors import InvariantError
from ninfer.ops import GdnRecord, GdnShape, GdnState, Rows

FEW, FEW_AT_ONCE = 16, 8
"""Up to so many columns a row, a layer is one launch; columns of it that go together."""

CHUNK, SLICE = 64, 32
"""Columns of a row that go together where there are many; columns of the state that four warps carry."""

FEATURES, TAPS = 128, 4
"""Features of a key or a value, and taps of the convolution, at most."""

_BATCH = 8
"""Rows of a batch, at most; more may need more scratch than was planned."""

_FOLDED, _HEIGHT = 64, 64
"""Layers of a launch that folds, at most, and rows of a head's state that a block of it takes."""

_WARPS = 8
_SQUARE, _GATES, _VALUES = 2 * CHUNK * CHUNK, 2 * 4 * CHUNK, 4 * CHUNK * SLICE
_KEYS = 2 * 2 * CHUNK * FEATURES
"""Bytes of a chunk: a square of a value head, its gates, a slice of its values; keys and queries of a key head."""


class DeltaNet:
    """``Ops.gdn`` and ``Ops.gdn_fold`` over one device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def run(
        self, out: CudaBuffer, inputs: tuple[CudaBuffer, ...], state: GdnState, record: GdnRecord | None, rows: Rows,
        shape: GdnShape, eps: float, room: CudaBuffer, tickets: CudaBuffer, left: Left | None = None,
    ) -> None:  # fmt: skip
        """inputs: q, k, v, z, a, b, convolution, a_log, dt_bias, norm. tickets i32: zeros, left as zeros. left: where
        ``out`` is put as well, of 2 to FEW columns."""
        _check(shape)
        if room.nbytes < self.scratch(rows.B * rows.W, shape):
            raise InvariantError(f"scratch of {room.nbytes} bytes")
        ratio, limit = shape.nv // shape.nk, self._device.shared_limit
        group = 4 if _chunk_shared(4, ratio) <= limit else 2
        words = _words(out, inputs, state, record, rows, shape, eps, room, tickets, group, left)
        if rows.W <= FEW:
            pairs = record is not None and rows.B * shape.nv <= self._device.pairs
            name, symbol, blocks, shared = _step(rows.W, shape, record is not None, pairs)
            self._launch(name, symbol, (shape.nv * blocks, rows.B), 256, words, shared)
            return
        chunks, slices = -(-rows.W // CHUNK), -(-shape.dv // SLICE)
        grid = (shape.nk, chunks, rows.B)
        self._launch("gdn_chunk", "gdn_chunk", grid, 256, words, _chunk_shared(group, ratio))
        crowded = slices > 1 and rows.B * shape.nv * slices > self._device.multiprocessors
        choices = [("32", 1, 2), ("less", 1, 1)]  # name, slices of a block, chunks on their way
        if crowded:
            choices.insert(0, ("64", 2, 2))
        name, step, stages = next(c for c in choices if _carry_shared(c[1], c[2]) <= limit or c[0] == "less")
        grid = (-(-slices // step), shape.nv, rows.B)
        self._launch("gdn_carry", f"gdn_carry_{name}", grid, step * 128, words, _carry_shared(step, stages))
        self._launch("gdn_carry", "gdn_finish", rows.B * rows.W, 256, words)

    def scratch(self, tokens: int, shape: GdnShape) -> int:
        """Bytes that ``run`` needs for up to ``tokens`` tokens."""
        if tokens <= FEW:
            return 0
        chunks = min(-(-tokens // (FEW + 1)), tokens // CHUNK + _BATCH)
        return chunks * (shape.nk * _KEYS + shape.nv * (2 * _SQUARE + _GATES + -(-shape.dv // SLICE) * _VALUES))

    def fold(
        self, layers: Sequence[tuple[GdnState, GdnRecord]], accepted: CudaBuffer, rows: Rows, shape: GdnShape
    ) -> None:
        _check(shape)
        common = (rows.start, rows.width, rows.read, rows.write, accepted, rows.W)
        geometry = (shape.nk, shape.nv, shape.dk, shape.dv, shape.taps)
        shared = 4 * (rows.W * (_HEIGHT + FEATURES + 2) + 1)
        for begin in range(0, len(layers), _FOLDED):
            some = layers[begin : begin + _FOLDED]
            words = [w for state, kept in some for w in (state.s, state.tail, kept.k, kept.d, kept.g, kept.c)]
            packed = pack(*common, *geometry, *words, *(None,) * (6 * (_FOLDED - len(some))))
            grid = (shape.nv * FEATURES // _HEIGHT, rows.B, len(some))
            self._launch("gdn_fold", f"gdn_fold{_odd(shape)}", grid, 256, packed, shared)

    def _launch(self, module: str, symbol: str, grid: Any, block: int, words: bytes, shared: int = 0) -> None:
        function = self._device.function(module, symbol, shared)
        self._device.launch(function, grid, block, words, shared=shared, dependent=True)


def _step(columns: int, shape: GdnShape, recorded: bool, pairs: bool) -> tuple[str, str, int, int]:
    """The kernel of a few columns: its module, its name, the blocks of a head, and their shared memory."""
    if columns == 1:
        return "gdn_one", f"gdn_one{_odd(shape)}", 1, 4 * (FEATURES * (FEATURES + 2 * _WARPS + 2) + 2 * shape.dv + 4)
    words = FEW_AT_ONCE * (2 * (FEATURES + 8) + 3 * _WARPS + 2 * FEW_AT_ONCE + 6)
    if pairs and columns <= FEW_AT_ONCE:
        return "gdn_few", "gdn_few_pair", 2, 4 * (words + (FEATURES - 16) * FEATURES // 2)
    words += FEATURES * FEATURES
    if not recorded or columns > FEW_AT_ONCE:  # keys, that the state is updated with
        words += FEATURES * FEW_AT_ONCE
    return "gdn_few", "gdn_few", 1, 4 * words


def _chunk_shared(group: int, ratio: int) -> int:
    return _KEYS + 4 * CHUNK * (group * (CHUNK + 4) + 2 * ratio)


def _carry_shared(slices: int, stages: int) -> int:
    return stages * (_KEYS + 2 * _SQUARE + _GATES + slices * _VALUES) + 2 * FEATURES * CHUNK + 3 * _SQUARE


def _odd(shape: GdnShape) -> str:
    """Which of two kernels: keys and rows of the state that are not whole vectors of 16 bytes take their own."""
    return "_odd" if shape.dk % 4 or shape.dv % 4 else ""


def _check(shape: GdnShape) -> None:
    if max(shape.dk, shape.dv) > FEATURES or shape.taps > TAPS:
        raise InvariantError(f"{shape}: at most {FEATURES} features of a head and {TAPS} taps")


def _words(
    out: Any, inputs: tuple[Any, ...], state: GdnState, record: GdnRecord | None, rows: Rows, shape: GdnShape,
    eps: float, room: Any, tickets: Any, group: int, left: Left | None,
) -> bytes:  # fmt: skip
    kept = (record.k, record.d, record.g, record.c) if record else (None,) * 4
    return pack(
        out, *inputs, state.s, state.tail, *kept, rows.start, rows.width, rows.read, rows.write, room, tickets,
        eps, rows.W, shape.nk, shape.nv, shape.dk, shape.dv, shape.taps, group, *panel_words(left),
    )  # fmt: skip

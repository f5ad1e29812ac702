"""Gated DeltaNet on a GPU: one launch for a few columns, three for many, and the fold of recorded columns."""

from __future__ import annotations

from typing import Any

from ninfer._cuda.buffers import CudaBuffer
from ninfer._cuda.products import pack
from ninfer.errors import InvariantError
from ninfer.ops import GdnRecord, GdnShape, GdnState, Rows

FEW = 16
"""Up to so many columns a row, a layer is one launch, column after column."""

CHUNK, SLICE, GROUP = 64, 32, 4
"""Columns of a row that go together where there are many; columns of the state that four warps carry; value heads
whose inverse a block works on at once."""

FEATURES, TAPS = 128, 4
"""Features of a key or a value, and taps of the convolution, at most."""

_BATCH = 8
"""Rows of a batch, at most; more may need more scratch than was planned."""

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
        shape: GdnShape, eps: float, room: CudaBuffer, tickets: CudaBuffer,
    ) -> None:  # fmt: skip
        """inputs: q, k, v, z, a, b, convolution, a_log, dt_bias, norm. tickets i32: zeros, left as zeros."""
        _check(shape)
        if room.nbytes < scratch(rows.B * rows.W, shape):
            raise InvariantError(f"scratch of {room.nbytes} bytes")
        words = _words(out, inputs, state, record, None, rows, shape, eps, room, tickets)
        if rows.W <= FEW:
            parts = _WARPS * (4 if rows.W > 1 else 2)  # what warps exchange: a column's and the next one's
            shared = 4 * ((FEATURES + parts) * FEATURES + rows.W * (2 * FEATURES + 3 * shape.dv + 2))
            self._launch("gdn", f"gdn_few{_odd(shape)}", (shape.nv, rows.B), 256, words, shared)
            return
        chunks, slices = -(-rows.W // CHUNK), -(-shape.dv // SLICE)
        shared = _KEYS + 4 * CHUNK * (GROUP * (CHUNK + 4) + 2 * shape.nv // shape.nk)
        self._launch("gdn_chunk", "gdn_chunk", (shape.nk, chunks, rows.B), 256, words, shared)
        wide = slices > 1 and rows.B * shape.nv * slices > self._device.multiprocessors
        step = 2 if wide else 1  # slices of a block: two where there are blocks enough
        shared = 2 * (_KEYS + 2 * _SQUARE + _GATES + step * _VALUES) + 2 * FEATURES * CHUNK + 3 * _SQUARE
        grid = (-(-slices // step), shape.nv, rows.B)
        self._launch("gdn_chunk", f"gdn_carry_{step * SLICE}", grid, step * 128, words, shared)
        self._launch("gdn_chunk", "gdn_finish", rows.B * rows.W, 256, words)

    def fold(self, state: GdnState, record: GdnRecord, accepted: CudaBuffer, rows: Rows, shape: GdnShape) -> None:
        _check(shape)
        words = _words(None, (None,) * 10, state, record, accepted, rows, shape, 0.0, None, None)
        shared = 4 * (rows.W * (FEATURES + shape.dv + 1) + 1)
        self._launch("gdn", f"gdn_fold{_odd(shape)}", (shape.nv, rows.B), 256, words, shared)

    def _launch(self, module: str, symbol: str, grid: Any, block: int, words: bytes, shared: int = 0) -> None:
        function = self._device.function(module, symbol, shared)
        self._device.launch(function, grid, block, words, shared=shared, dependent=True)


def scratch(tokens: int, shape: GdnShape) -> int:
    """Bytes that ``run`` needs for up to ``tokens`` tokens."""
    if tokens <= FEW:
        return 0
    chunks = min(-(-tokens // (FEW + 1)), tokens // CHUNK + _BATCH)
    return chunks * (shape.nk * _KEYS + shape.nv * (2 * _SQUARE + _GATES + -(-shape.dv // SLICE) * _VALUES))


def _odd(shape: GdnShape) -> str:
    """Which of two kernels: rows of the state that are not whole vectors of 16 bytes take their own."""
    return "_odd" if shape.dv % 4 else ""


def _check(shape: GdnShape) -> None:
    if max(shape.dk, shape.dv) > FEATURES or shape.taps > TAPS:
        raise InvariantError(f"{shape}: at most {FEATURES} features of a head and {TAPS} taps")


def _words(
    out: Any, inputs: tuple[Any, ...], state: GdnState, record: GdnRecord | None, accepted: Any, rows: Rows,
    shape: GdnShape, eps: float, room: Any, tickets: Any,
) -> bytes:  # fmt: skip
    kept = (record.k, record.d, record.g, record.c) if record else (None,) * 4
    return pack(
        out, *inputs, state.s, state.tail, *kept, rows.start, rows.width, rows.read, rows.write, accepted, room,
        tickets, eps, rows.W, shape.nk, shape.nv, shape.dk, shape.dv, shape.taps,
    )  # fmt: skip

"""A weight matrix as the kernels read it: addresses and strides of the stored planes, nothing decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ninfer._cpu.kernels import products as p
from ninfer.artifact.layouts import geometry
from ninfer.device import Buffer
from ninfer.errors import InvariantError
from ninfer.ops import Segment


class CpuMatrix:
    """Rows of stored matrices, in order. ``words`` int64 describes them to the kernels (see ``kernels.products``)."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise InvariantError("a matrix needs at least one segment")
        self.cols = segments[0].parent.shape[1]
        if self.cols > p.MAX_COLUMNS:
            raise InvariantError(f"{self.cols} columns exceed the {p.MAX_COLUMNS} that a tile can hold")
        self.rows = 0
        self.nbytes = 0
        self._owners: list[Buffer] = []
        parts: list[npt.NDArray[np.int64]] = []
        for segment in segments:
            if segment.parent.shape[1] != self.cols:
                raise InvariantError("segments of one matrix differ in columns")
            parts.append(self._segment(segment))
        head = np.zeros(p.HEAD, np.int64)
        head[p.HEAD_SEGMENTS], head[p.HEAD_ROWS], head[p.HEAD_COLS] = len(segments), self.rows, self.cols
        head[p.HEAD_GEMM] = p.gemm.address
        head[p.HEAD_DIRECT] = min(p.direct(segment.parent.format) for segment in segments)
        self.words = np.concatenate([head, *parts])
        self.address = self.words.ctypes.data

    def _segment(self, segment: Segment) -> npt.NDArray[np.int64]:
        parent, count = segment.parent, segment.end - segment.begin
        functions = p.FUNCTIONS.get(parent.format)
        if functions is None:
            raise InvariantError(f"{parent.format} is not a matrix format")
        rows, cols = parent.shape
        if not 0 <= segment.begin < segment.end <= rows:
            raise InvariantError(f"rows [{segment.begin}, {segment.end}) of a matrix of {rows}")
        g = geometry(parent.format, None, parent.shape)
        if parent.data.nbytes != g.nbytes:
            raise InvariantError(f"{parent.format} {parent.shape} takes {g.nbytes} bytes, not {parent.data.nbytes}")
        self._owners.append(parent.data)
        data: int = parent.data.address  # type: ignore[attr-defined]
        word = np.zeros(p.SEG, np.int64)
        word[p.SEG_BEGIN], word[p.SEG_END], word[p.SEG_FIRST] = self.rows, self.rows + count, segment.begin
        word[p.SEG_DOT], word[p.SEG_UNPACK] = functions[0].address, functions[1].address
        word[p.SEG_BASE], word[p.SEG_COLS] = data + g.codes.offset, cols
        # a direct format counts as one row of all its elements
        word[p.SEG_BASE_ROW] = g.codes.row_bytes // (rows if g.rows != rows else 1)
        word[p.SEG_HIGH], word[p.SEG_HIGH_ROW] = data, 0
        if g.high is not None:
            word[p.SEG_HIGH], word[p.SEG_HIGH_ROW] = data + g.high.offset, g.high.row_bytes
        if g.scales is not None:
            word[p.SEG_SCALE] = word[p.SEG_FACTOR] = data + g.scales.offset
            word[p.SEG_GROUPS] = g.groups
        if g.divisor is not None:
            word[p.SEG_FACTOR] = data + g.divisor.offset
        self.rows += count
        self.nbytes += g.nbytes * count // rows
        return word

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row, on average."""
        return max(1, self.nbytes // self.rows)

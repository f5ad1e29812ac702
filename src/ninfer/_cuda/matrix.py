"""A weight matrix as the kernels read it: addresses and strides of the stored planes, nothing decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ninfer.artifact.layouts import geometry
from ninfer.errors import InvariantError
from ninfer.ops import Segment

_FORMATS = (
    "bf16", "fp32", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "nvfp4", "fp8_e4m3fn_row_bf16",
)  # fmt: skip

NAMES = ("BF16", "FP32", "Q4", "Q5", "Q6", "Q8", "NVFP4", "FP8")
"""The formats as kernels name them."""

_STAGES = (4096, 8192, 2176, 2688, 3200, 2176, 2304, 2048)
"""Bytes of a chunk of 32 rows in shared memory, by format (see ``kernels/weights.cuh``)."""


@dataclass(frozen=True, slots=True)
class CudaRows:
    """Rows ``[first, first + rows)`` of a stored matrix. ``words``: the start of a ``Segment`` of ``weights.cuh``."""

    words: tuple[int, ...]
    format: int
    first: int
    rows: int

    @property
    def stage(self) -> int:
        """Bytes a warp needs to stage a chunk of 32 rows."""
        return _STAGES[self.format]

    @property
    def span(self) -> int:
        """Columns of a chunk."""
        return 128 if self.format in (2, 3, 4, 6) else 64

    @property
    def vectors(self) -> bool:
        """Rows start at multiples of 16 bytes."""
        return bool(self.words[11])

    def part(self, begin: int, end: int) -> CudaRows:
        """Rows ``[begin, end)`` counted from ``first``."""
        first, rows = self.first + begin, end - begin
        return CudaRows((*self.words[:8], first, rows, *self.words[10:]), self.format, first, rows)


class CudaMatrix:
    """Rows of stored matrices, in order."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise InvariantError("a matrix needs at least one segment")
        self.cols = segments[0].parent.shape[1]
        self.rows = self.nbytes = 0
        self._owners: list[Any] = []
        parts: list[CudaRows] = []
        for segment in segments:
            if segment.parent.shape[1] != self.cols:
                raise InvariantError("segments of one matrix differ in columns")
            parts.append(self._part(segment))
        self.parts = tuple(parts)

    def _part(self, segment: Segment) -> CudaRows:
        parent, count = segment.parent, segment.end - segment.begin
        if parent.format not in _FORMATS:
            raise InvariantError(f"{parent.format} is not a matrix format")
        rows, cols = parent.shape
        if not 0 <= segment.begin < segment.end <= rows:
            raise InvariantError(f"rows [{segment.begin}, {segment.end}) of a matrix of {rows}")
        g = geometry(parent.format, None, parent.shape)
        if parent.data.nbytes != g.nbytes:
            raise InvariantError(f"{parent.format} {parent.shape} takes {g.nbytes} bytes, not {parent.data.nbytes}")
        self._owners.append(parent.data)
        base: int = parent.data.ptr  # type: ignore[attr-defined]
        planes = [base + p.offset if p else 0 for p in (g.codes, g.high, g.scales, g.divisor)]
        # a direct format counts as one row of all its elements
        row = g.codes.row_bytes // (rows if g.rows != rows else 1)
        high, scale = (p.row_bytes if p else 0 for p in (g.high, g.scales))
        vectors = int(base % 16 == 0 and row % 16 == 0)
        format = _FORMATS.index(parent.format)
        words = (*planes, format, row, high, scale, segment.begin, count, cols, vectors)
        self.rows += count
        self.nbytes += g.nbytes * count // rows
        return CudaRows(words, format, segment.begin, count)

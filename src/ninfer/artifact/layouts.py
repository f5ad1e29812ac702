"""The four storage layouts: where an object's codes, high bits, scales and divisor lie, in bytes.

``contiguous_le_v1``          words in C order.
``row_split_k128_v1``         per group 32 bytes of low bits, then a plane of high bits (5- and 6-bit codes),
                              then one binary16 scale per group; K is padded to a multiple of 128.
``row_scale_v1``              one byte per element, then one bfloat16 per row.
``block_scale_k16_m128x4_v1`` nibbles, then E4M3 scales swizzled in tiles of 128 rows x 4 groups, then one
                              binary32.

Planes start at multiples of 256 from the object's first byte (the last divisor excepted); the gaps are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.artifact.formats import LAYOUTS, Format, format_of
from ninfer.errors import ArtifactError

TENSOR_ALIGNMENT = 256
MAX_RANK = 16
U64_MAX = 2**64 - 1
Bytes = npt.NDArray[np.uint8]


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is >= ``value``."""
    return -(-value // alignment) * alignment


@attrs.frozen
class Plane:
    """A contiguous part of an object. ``row_bytes`` is what one row takes; ``nbytes = rows * row_bytes``."""

    offset: int
    nbytes: int
    row_bytes: int


@attrs.frozen
class Geometry:
    """How one tensor is stored. ``rows`` x ``columns`` is its matrix (direct: one row of all elements).

    ``groups`` counts scale groups per row, padded ones included. ``codes`` holds the words or the low bits.
    """

    format: Format
    shape: tuple[int, ...]
    rows: int
    columns: int
    groups: int
    codes: Plane
    high: Plane | None
    scales: Plane | None
    divisor: Plane | None
    nbytes: int

    @property
    def layout(self) -> str:
        return self.format.layout

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def planes(self) -> Iterator[Plane]:
        """The planes in storage order."""
        for plane in (self.codes, self.high, self.scales, self.divisor):
            if plane is not None:
                yield plane


def geometry(format: str, layout: str | None, shape: tuple[int, ...]) -> Geometry:
    """Plane offsets and the total size of a tensor. ``layout`` None means the format's own.

    Raises ArtifactError, ``where`` being "format", "layout", "shape" or "bytes", for unknown names, a pair
    that is not registered, a shape the layout cannot hold, or a size beyond 64 bits.
    """
    f = format_of(format)
    if layout is not None and layout != f.layout:
        if layout not in LAYOUTS:
            raise ArtifactError(f"unknown layout {layout!r}", where="layout")
        raise ArtifactError(f"format {format!r} cannot be stored as {layout!r}", where="layout")
    shape = tuple(shape)
    if len(shape) > MAX_RANK or any(size < 1 for size in shape):
        raise ArtifactError(f"expected at most {MAX_RANK} positive sizes, got {list(shape)}", where="shape")
    if f.kind != "direct" and len(shape) != 2:
        raise ArtifactError(f"{format} needs a matrix, got shape {list(shape)}", where="shape")
    planned = _PLAN[f.kind](f, shape)
    if planned.nbytes > U64_MAX:
        raise ArtifactError("encoded size exceeds 64 bits", where="bytes")
    return planned


def _direct(f: Format, shape: tuple[int, ...]) -> Geometry:
    elements = math.prod(shape)
    nbytes = elements * f.bits // 8
    return Geometry(f, shape, 1, elements, 0, Plane(0, nbytes, nbytes), None, None, None, nbytes)


def _grouped(f: Format, shape: tuple[int, ...]) -> Geometry:
    rows, columns = shape
    groups = align_up(columns, 128) // f.group
    base = Plane(0, rows * groups * 32, groups * 32)
    high_row = groups * (f.bits - 4) * 8 if f.bits in (5, 6) else 0
    high = Plane(align_up(base.nbytes, TENSOR_ALIGNMENT), rows * high_row, high_row)
    scales = Plane(high.offset + align_up(high.nbytes, TENSOR_ALIGNMENT), rows * groups * 2, groups * 2)
    total = scales.offset + scales.nbytes
    return Geometry(f, shape, rows, columns, groups, base, high if high_row else None, scales, None, total)


def _row(f: Format, shape: tuple[int, ...]) -> Geometry:
    rows, columns = shape
    codes = Plane(0, rows * columns, columns)
    scales = Plane(align_up(codes.nbytes, TENSOR_ALIGNMENT), rows * 2, 2)
    return Geometry(f, shape, rows, columns, 1, codes, None, scales, None, scales.offset + scales.nbytes)


def _block(f: Format, shape: tuple[int, ...]) -> Geometry:
    rows, columns = shape
    if rows % 128 or columns % 64:
        raise ArtifactError(f"nvfp4 needs rows in multiples of 128 and columns of 64, got {list(shape)}", where="shape")
    codes = Plane(0, rows * columns // 2, columns // 2)
    scales = Plane(align_up(codes.nbytes, TENSOR_ALIGNMENT), rows * columns // 16, columns // 16)
    divisor = Plane(scales.offset + scales.nbytes, 4, 4)
    return Geometry(f, shape, rows, columns, columns // 16, codes, None, scales, divisor, divisor.offset + 4)


_PLAN = {"direct": _direct, "grouped": _grouped, "row": _row, "block": _block}


def plane_view(data: Bytes, plane: Plane, rows: slice | None = None, dtype: str = "u1") -> npt.NDArray[Any]:
    """Rows of one plane of an object's bytes as ``[rows, words per row]``; a view, never a copy."""
    first, last = (0, plane.nbytes // plane.row_bytes) if rows is None else (rows.start, rows.stop)
    begin, end = plane.offset + first * plane.row_bytes, plane.offset + last * plane.row_bytes
    return data[begin:end].view(dtype).reshape(last - first, plane.row_bytes // np.dtype(dtype).itemsize)


def swizzle_scales(natural: npt.NDArray[Any]) -> Bytes:
    """Block scales ``[N, K/16]`` (bytes, N % 128 == 0) -> their stored order, flat.

    Whole 128-row chunks can be converted one by one and concatenated.
    """
    rows, groups = natural.shape
    tiles = natural.view(np.uint8).reshape(rows // 128, 4, 32, groups // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


def unswizzle_scales(stored: Bytes, rows: int, groups: int) -> Bytes:
    """The inverse of :func:`swizzle_scales`: stored bytes -> ``[rows, groups]``."""
    tiles = stored.reshape(rows // 128, groups // 4, 32, 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, groups)

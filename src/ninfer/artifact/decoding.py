"""Stored bytes become numbers. Plain NumPy, exact; temporary memory is bounded by a block of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.artifact.formats import E2M1, E4M3, bf16_to_f32
from ninfer.artifact.layouts import Bytes, Geometry, geometry, plane_view, unswizzle_scales
from ninfer.errors import ArtifactError

_BLOCK = 1 << 20  # elements decoded at once


def decode(format: str, data: Bytes, shape: tuple[int, ...], rows: slice | None = None) -> npt.NDArray[Any]:
    """The values of a stored tensor: float32 (int32 for ``int32``), in its shape, or ``rows`` of a matrix.

    data: uint8, the object's complete bytes. Products are rounded to binary32 once, as the formats define
    them. Direct tensors give a bitwise exact result. Raises ArtifactError when the size does not fit the
    shape.
    """
    g = geometry(format, None, shape)
    if data.nbytes != g.nbytes:
        raise ArtifactError(f"{data.nbytes} bytes, {g.nbytes} expected for {format} {list(shape)}", where="bytes")
    if g.format.kind == "direct":
        whole = decode_elements(g, data, 0, g.elements).reshape(shape)
        return whole if rows is None else whole[rows]
    first, last, step = (rows or slice(None)).indices(g.rows)
    if step != 1:
        raise ArtifactError("rows must be a contiguous slice", where="rows")
    return decode_elements(g, data, first * g.columns, max(first, last) * g.columns).reshape(-1, g.columns)


def decode_elements(g: Geometry, data: Bytes, begin: int, end: int) -> npt.NDArray[Any]:
    """Elements ``[begin, end)`` of a stored tensor in C order, flat."""
    if g.format.kind == "direct":
        word = g.format.bits // 8
        words = data[begin * word : end * word].view(g.format.word)
        return bf16_to_f32(words) if g.format.name == "bf16" else words.copy()
    out = np.empty(end - begin, np.float32)
    if begin == end:
        return out
    first, last = begin // g.columns, -(-end // g.columns)
    width = max(g.columns, g.groups * g.format.group)
    step = max(128, _BLOCK // width // 128 * 128)  # whole swizzle tiles
    for row in range(first - first % 128, last, step):
        a, b = max(row, first), min(row + step, last)
        with np.errstate(all="ignore"):  # an illegal scale gives an inf or a NaN; verify reports it
            values = _DECODE[g.format.kind](g, data, slice(a, b)).reshape(-1)
        lo, hi = max(begin, a * g.columns), min(end, b * g.columns)
        out[lo - begin : hi - begin] = values[lo - a * g.columns : hi - a * g.columns]
    return out


def grouped_codes(g: Geometry, data: Bytes, rows: slice) -> npt.NDArray[np.int8]:
    """Signed codes ``[rows, groups, group]`` of a grouped matrix, padding lanes included."""
    base = plane_view(data, g.codes, rows).reshape(-1, g.groups, 32)
    if g.format.bits == 8:
        return base.view(np.int8)
    codes = np.empty((*base.shape[:2], 64), np.uint8)
    codes[..., 0::2] = base & 15
    codes[..., 1::2] = base >> 4
    if g.high is not None:
        bits = np.unpackbits(plane_view(data, g.high, rows), axis=1, bitorder="little")
        for bit, lane_bits in enumerate(np.moveaxis(bits.reshape(*codes.shape, -1), -1, 0)):
            codes |= lane_bits << np.uint8(4 + bit)
    sign = np.uint8(1 << (g.format.bits - 1))
    return ((codes ^ sign) - sign).view(np.int8)


def block_scales(g: Geometry, data: Bytes, rows: slice) -> Bytes:
    """E4M3 scale bytes ``[rows, groups]`` of an nvfp4 matrix in natural order."""
    assert g.scales is not None
    tiles = slice(rows.start - rows.start % 128, -(-rows.stop // 128) * 128)
    natural = unswizzle_scales(plane_view(data, g.scales, tiles).reshape(-1), tiles.stop - tiles.start, g.groups)
    return natural[rows.start - tiles.start : rows.stop - tiles.start]


def block_divisor(g: Geometry, data: Bytes) -> np.float32:
    """The divisor of an nvfp4 matrix."""
    assert g.divisor is not None
    return np.float32(plane_view(data, g.divisor, None, "<f4")[0, 0])


def _grouped(g: Geometry, data: Bytes, rows: slice) -> npt.NDArray[np.float32]:
    assert g.scales is not None
    scales = plane_view(data, g.scales, rows, "<f2").astype(np.float32)
    values = grouped_codes(g, data, rows).astype(np.float32)
    values *= scales[..., None]
    return values.reshape(-1, g.groups * g.format.group)[:, : g.columns]


def _row(g: Geometry, data: Bytes, rows: slice) -> npt.NDArray[np.float32]:
    assert g.scales is not None
    values: npt.NDArray[np.float32] = E4M3[plane_view(data, g.codes, rows)]
    values *= bf16_to_f32(plane_view(data, g.scales, rows, "<u2"))
    return values


def _block(g: Geometry, data: Bytes, rows: slice) -> npt.NDArray[np.float32]:
    packed = plane_view(data, g.codes, rows)
    values = np.empty((packed.shape[0], g.groups, 16), np.float32)
    flat = values.reshape(packed.shape[0], g.columns)
    flat[:, 0::2] = E2M1[packed & 15]
    flat[:, 1::2] = E2M1[packed >> 4]
    values *= E4M3[block_scales(g, data, rows)][..., None]
    flat /= block_divisor(g, data)
    return flat


_DECODE = {"grouped": _grouped, "row": _row, "block": _block}

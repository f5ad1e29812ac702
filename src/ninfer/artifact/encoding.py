"""Numbers become stored bytes, by the canonical encoder of each format.

* grouped: scale = fp16(max|x| / qmax) per group, code = round_half_even(x * fp32(1 / scale)), clamped.
* ``fp8_e4m3fn_row_bf16``: input rounded to bfloat16; scale = bf16(max|x| / 448) per row,
  code = E4M3(x * fp32(1 / scale)), or of x / scale where 1 / scale overflows.
* ``nvfp4``: divisor = 6 * 448 / max|W| over the matrix; per 16 columns scale = E4M3(max|x| * divisor / 6),
  codes are the E2M1 values nearest to x * divisor / scale.
* direct: bfloat16 rounds to nearest even, binary32 keeps the bits, int32 refuses what does not fit.

Non-finite input to any but the direct formats is refused. A matrix can be encoded whole (:func:`encode`) or
in row blocks (:func:`encode_rows`), with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.artifact.formats import E4M3, f32_to_bf16
from ninfer.artifact.layouts import Bytes, Geometry, geometry, swizzle_scales
from ninfer.errors import ArtifactError


def encode(format: str, values: npt.NDArray[Any]) -> Bytes:
    """A tensor's complete object: uint8, in the format's layout.

    values: float32 of the tensor's shape (rank 2 for all but direct formats); integers for ``int32``; other
    floating types are rounded to float32 first. bfloat16 sources stay exact. Raises ArtifactError naming the
    first element that cannot be encoded.
    """
    g = geometry(format, None, values.shape)
    data = np.zeros(g.nbytes, np.uint8)
    divisor = None
    if g.format.kind == "block":
        values = np.asarray(values, np.float32)
        divisor = nvfp4_divisor(float(max(values.max(), -values.min())))
    for offset, chunk in encode_rows(g, 0, values, divisor=divisor):
        data[offset : offset + chunk.nbytes] = chunk
    return data


def encode_rows(
    g: Geometry, first: int, values: npt.NDArray[Any], *, divisor: np.float32 | None = None
) -> Iterator[tuple[int, Bytes]]:
    """Rows ``[first, first + m)`` of a matrix, encoded: (offset in the object, bytes) per plane.

    values: ``[m, columns]``; a direct tensor counts as one row, and may be given in pieces of any length
    starting at element ``first``. Memory is bounded by the block. nvfp4 needs the matrix's ``divisor``
    (:func:`nvfp4_divisor`) and blocks of whole 128 rows. Gaps between planes are not produced; they are zero.
    """
    if g.format.kind == "direct":
        words = _direct(g, values.reshape(-1))
        yield first * words.itemsize, words.view(np.uint8)
        return
    x = np.ascontiguousarray(values, np.float32)
    if x.ndim != 2 or x.shape[1] != g.columns or first + x.shape[0] > g.rows:
        raise ArtifactError(
            f"block of shape {list(x.shape)} at row {first} does not fit {list(g.shape)}", where="values"
        )
    rows = x.shape[0]
    assert g.scales is not None
    codes = np.zeros((rows, g.codes.row_bytes), np.uint8)
    status = np.zeros(rows, np.uint8)
    planes = [(g.codes, codes)]
    from ninfer.artifact import _encoders

    if g.format.kind == "grouped":
        f = g.format
        high = np.zeros((rows, g.high.row_bytes if g.high else 0), np.uint8)
        scales = np.zeros((rows, g.groups), np.uint16)
        _encoders.grouped(x, x.view(np.uint32), codes, high, scales, status, f.bits, f.group, f.qmin, f.qmax)
        if g.high is not None:
            planes.append((g.high, high))
        planes.append((g.scales, scales.view(np.uint8)))
    elif g.format.kind == "row":
        scales = np.zeros((rows, 1), np.uint16)
        _encoders.fp8(x, x.view(np.uint32), codes, scales, status)
        planes.append((g.scales, scales.view(np.uint8)))
    else:
        if divisor is None or first % 128 or rows % 128:
            raise ArtifactError("nvfp4 rows come in whole 128-row blocks, with the divisor", where="values")
        assert g.divisor is not None
        natural = np.zeros((rows, g.groups), np.uint8)
        _encoders.nvfp4(x, x.view(np.uint32), codes, natural, status, divisor, E4M3)
        planes.append((g.scales, swizzle_scales(natural)))
        if first == 0:
            yield g.divisor.offset, np.array([divisor], "<f4").view(np.uint8)
    _check(status, first, x)
    for plane, data in planes:
        yield plane.offset + first * plane.row_bytes, data.reshape(-1)


def nvfp4_divisor(largest: float) -> np.float32:
    """The divisor of a matrix whose largest magnitude is ``largest``; 1 for a zero matrix."""
    with np.errstate(over="ignore"):
        divisor = np.float32(2688.0 / largest) if largest else np.float32(1.0)
    if not np.isfinite(largest) or not np.isfinite(divisor):
        raise ArtifactError(f"no finite divisor for largest magnitude {largest}", where="values")
    return divisor


def _direct(g: Geometry, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if g.format.name != "int32":
        x = np.ascontiguousarray(values, np.float32)
        return f32_to_bf16(x) if g.format.name == "bf16" else x.astype("<f4", copy=False)
    if values.dtype.kind not in "iu":
        raise ArtifactError(f"int32 needs integers, got {values.dtype}", where="values")
    words = values.astype("<i4")
    if (words != values).any():
        at = int(np.flatnonzero(words != values)[0])
        raise ArtifactError(f"{values[at]} is outside the 32-bit range", where=f"values[{at}]")
    return words


def _check(status: Bytes, first: int, values: npt.NDArray[np.float32]) -> None:
    if not status.any():
        return
    row = int(np.flatnonzero(status)[0])
    bad = np.flatnonzero(~np.isfinite(values[row]))
    if bad.size:
        raise ArtifactError(f"not finite: {values[row, bad[0]]}", where=f"values[{first + row}, {bad[0]}]")
    raise ArtifactError("too large for the format's scale", where=f"values[{first + row}]")

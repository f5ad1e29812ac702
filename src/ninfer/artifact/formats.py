"""The nine number formats: what a code is, what it is scaled by, which layout stores it.

A format turns stored words into numbers; a layout (:mod:`ninfer.artifact.layouts`) says where the words lie.

* direct: ``bf16``, ``fp32``, ``int32``: every bit pattern is a value.
* grouped: two's-complement codes, one binary16 multiplier per group of consecutive columns of a row.
* row: ``fp8_e4m3fn_row_bf16``: E4M3FN codes, one bfloat16 multiplier per row.
* block: ``nvfp4``: E2M1 codes, one E4M3FN scale per 16 columns, one binary32 *divisor* per matrix.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from ninfer.errors import ArtifactError

Kind = Literal["direct", "grouped", "row", "block"]


@attrs.frozen
class Format:
    """One number format. ``bits`` per code; ``group`` columns share a scale (0: direct or one scale per row).

    ``qmax``, for grouped formats, is the magnitude the encoder maps a group's largest value to.
    ``word`` is the stored type of a code (grouped codes below 8 bits are packed into bytes).
    """

    name: str
    kind: Kind
    layout: str
    bits: int
    word: str
    group: int = 0
    qmax: int = 0

    @property
    def qmin(self) -> int:
        """The smallest legal code of a grouped format; 8-bit codes leave out -128."""
        return -self.qmax if self.bits == 8 else -self.qmax - 1


FORMATS = {
    f.name: f
    for f in (
        Format("bf16", "direct", "contiguous_le_v1", 16, "<u2"),
        Format("fp32", "direct", "contiguous_le_v1", 32, "<f4"),
        Format("int32", "direct", "contiguous_le_v1", 32, "<i4"),
        Format("q4_g64_fp16", "grouped", "row_split_k128_v1", 4, "u1", 64, 7),
        Format("q5_g64_fp16", "grouped", "row_split_k128_v1", 5, "u1", 64, 15),
        Format("q6_g64_fp16", "grouped", "row_split_k128_v1", 6, "u1", 64, 31),
        Format("q8_g32_fp16", "grouped", "row_split_k128_v1", 8, "u1", 32, 127),
        Format("nvfp4", "block", "block_scale_k16_m128x4_v1", 4, "u1", 16),
        Format("fp8_e4m3fn_row_bf16", "row", "row_scale_v1", 8, "u1"),
    )
}
LAYOUTS = frozenset(f.layout for f in FORMATS.values())
RAW_ENCODING = "raw_bytes_v1"


def format_of(name: str) -> Format:
    """The registered format called ``name``; ArtifactError when there is none."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ArtifactError(f"unknown format {name!r}", where="format") from None


def _e4m3_values() -> npt.NDArray[np.float32]:
    word = np.arange(256)
    exponent, fraction = word >> 3 & 15, word & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    magnitude[word & 0x7F == 0x7F] = np.nan
    return np.where(word >> 7 == 1, -magnitude, magnitude).astype(np.float32)


E4M3 = _e4m3_values()
"""The value of each E4M3FN byte: sign, 4 exponent bits (bias 7), 3 fraction bits; 0x7F and 0xFF are NaN."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each E2M1 nibble: sign, 2 exponent bits, 1 fraction bit."""


def bf16_to_f32(words: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """bfloat16 words (uint16) -> float32, exact."""
    bits = words.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def f32_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 -> bfloat16 words, rounded to nearest even; NaNs keep their sign and upper bits."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    words = np.empty(bits.size, np.uint16)
    for begin in range(0, bits.size, 1 << 16):  # pieces that stay in the cache
        piece = bits[begin : begin + (1 << 16)]
        rounded = piece >> np.uint32(16)
        odd = rounded & np.uint32(1)
        odd += np.uint32(0x7FFF)
        odd += piece
        odd >>= np.uint32(16)
        nan = (piece & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        if nan.any():
            odd[nan] = rounded[nan] | np.uint32(0x40)
        words[begin : begin + (1 << 16)] = odd
    return words.reshape(values.shape)

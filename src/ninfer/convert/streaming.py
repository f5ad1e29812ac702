"""A parent's rows are read, checked and encoded block by block, so memory does not grow with the model."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.artifact import Geometry, encode_rows, geometry, swizzle_scales
from ninfer.artifact.formats import bf16_to_f32
from ninfer.convert.checkpoint import Checkpoint, TensorInfo
from ninfer.convert.planning import Item, Parent
from ninfer.convert.quantised import FP8, NVFP4
from ninfer.errors import ArtifactError, ConversionError

Words = npt.NDArray[Any]
Chunk = tuple[int, Words]
"""(offset within the object, bytes)"""

_BLOCK = 1 << 22  # elements read at once: 16 MiB as binary32


def encoded(parent: Parent, checkpoint: Checkpoint, read: Callable[[int], None]) -> Iterator[Chunk]:
    """The bytes of a tensor object, in chunks. ``read(n)`` is called when n bytes of the checkpoint have been read.

    Raises ConversionError naming the tensor, row and column of a value that the format cannot hold.
    """
    g = geometry(parent.format, None, parent.shape)
    rows, encode = _Rows(parent, checkpoint, read), _encoder(parent)
    for first, last in rows.blocks():
        yield from encode(rows, g, first, last)


def _encoder(parent: Parent) -> Callable[[_Rows, Geometry, int, int], Iterator[Chunk]]:
    item = parent.items[0]
    if item.stored.format is not None:
        return {FP8: _row_scaled, NVFP4: _block_scaled}[item.stored.format]
    if item.source.transposed:
        return _transposed
    return _bf16 if parent.format == "bf16" and _all_bf16(parent) else _values


def _all_bf16(parent: Parent) -> bool:
    return all(item.stored.words.dtype == "BF16" for item in parent.items)


class _Rows:
    """A parent's rows, gathered from the checkpoint. ``columns``: of the source matrices (1 for vectors)."""

    def __init__(self, parent: Parent, checkpoint: Checkpoint, read: Callable[[int], None]) -> None:
        self.columns = parent.items[0].source.columns
        self.count = sum(item.source.rows for item in parent.items)
        self.divisor = parent.items[0].stored.divisor
        self._spans = [(item, *span) for item in parent.items for span in item.source.spans]
        self._starts = list(itertools.accumulate((end - begin for _, begin, end in self._spans), initial=0))
        self._checkpoint = checkpoint
        self._read = read

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Row ranges that cover the parent, each of whole 128 rows but the last."""
        step = max(128, _BLOCK // self.columns // 128 * 128)
        for first in range(0, self.count, step):
            yield first, min(first + step, self.count)

    def segments(self, first: int, last: int) -> Iterator[tuple[Item, int, int, int]]:
        """(item, rows ``[a, b)`` of its tensor, row within the block) of each stretch of rows ``[first, last)``."""
        a, at = first, bisect_right(self._starts, first) - 1
        while a < last:
            (item, begin, end), row = self._spans[at], self._starts[at]
            b = min(last, row + end - begin)
            yield item, begin + a - row, begin + b - row, a - first
            a, at = b, at + 1

    def gather(
        self, first: int, last: int, columns: int, dtype: str, tensor: Callable[[Item], TensorInfo | None]
    ) -> Words:
        """Rows ``[first, last)`` of the items' ``tensor``, ``[m, columns]``. As "<f4" any floats are expanded."""
        from ninfer.convert import _words

        out = np.empty((last - first, columns), dtype)
        for item, a, b, row in self.segments(first, last):
            info = tensor(item)
            assert info is not None
            words = self._checkpoint.rows(info, a, b, columns)
            target = out[row : row + b - a]
            if info.dtype == "BF16" and dtype == "<f4":
                _words.expand(words.reshape(-1), target.view("<u4").reshape(-1))
            else:
                target[...] = words
            self._read(words.nbytes)
        return out

    def refusal(
        self, first: int, row: int, message: str, tensor: Callable[[Item], TensorInfo | None]
    ) -> ConversionError:
        """The error that blames the tensor from which row ``row`` of the block at ``first`` came."""
        item, at, _, _ = next(self.segments(first + row, first + row + 1))
        info = tensor(item)
        return ConversionError(f"row {at}: {message}", tensor=info.name if info else "")


def _values_of(item: Item) -> TensorInfo:
    return item.stored.words


def _scales_of(item: Item) -> TensorInfo | None:
    return item.stored.scales


def _bf16(rows: _Rows, g: Geometry, first: int, last: int) -> Iterator[Chunk]:
    """bfloat16 words, copied."""
    words = rows.gather(first, last, rows.columns, "<u2", _values_of)
    _check_finite(rows, first, words, 0x7F80)
    yield first * rows.columns * 2, words.reshape(-1)


def _values(rows: _Rows, g: Geometry, first: int, last: int) -> Iterator[Chunk]:
    """Floats, through the format's encoder."""
    values = rows.gather(first, last, rows.columns, "<f4", _values_of)
    if g.format.kind == "direct":
        _check_finite(rows, first, values.view("<u4"), _infinity(g))
        yield from encode_rows(g, first * rows.columns, values)
        return
    try:
        yield from encode_rows(g, first, values)
    except ArtifactError as error:
        _check_finite(rows, first, values.view("<u4"), _infinity(g))
        row = int(np.abs(values).max(axis=1).argmax())
        raise rows.refusal(first, row, error.reason, _values_of) from None


def _transposed(rows: _Rows, g: Geometry, first: int, last: int) -> Iterator[Chunk]:
    """A short, wide table whose columns are the checkpoint's rows."""
    values = rows.gather(first, last, rows.columns, "<f4", _values_of)
    _check_finite(rows, first, values.view("<u4"), _infinity(g))
    for tap in range(rows.columns):
        yield from encode_rows(g, tap * rows.count + first, values[:, tap])


def _row_scaled(rows: _Rows, g: Geometry, first: int, last: int) -> Iterator[Chunk]:
    """FP8 codes and row multipliers, copied."""
    assert g.scales is not None
    codes = rows.gather(first, last, rows.columns, "u1", _values_of)
    scales = rows.gather(first, last, 1, "<u2", _scales_of)
    wrong = np.flatnonzero(scales >= 0x7F80)  # infinite, NaN or negative
    if wrong.size:
        raise rows.refusal(first, int(wrong[0]), f"{bf16_to_f32(scales)[wrong[0], 0]} is not a scale", _scales_of)
    zero = np.flatnonzero(scales == 0)
    if (codes[zero] & 0x7F).any():
        raise rows.refusal(first, int(zero[0]), "a zero scale for codes that are not zero", _scales_of)
    if _largest(codes, 0x7F) == 0x7F:
        row = int(np.argwhere(codes & 0x7F == 0x7F)[0, 0])
        raise rows.refusal(first, row, "not finite", _values_of)
    yield first * g.codes.row_bytes, codes.reshape(-1)
    yield g.scales.offset + first * 2, scales.reshape(-1)


def _block_scaled(rows: _Rows, g: Geometry, first: int, last: int) -> Iterator[Chunk]:
    """NVFP4 codes and block scales, copied; scales take their place in the layout's tiles of 128 rows."""
    assert g.scales is not None
    assert g.divisor is not None
    codes = rows.gather(first, last, g.columns // 2, "u1", _values_of)
    scales = rows.gather(first, last, g.groups, "u1", _scales_of)
    if _largest(scales, 0xFF) > 0x7E:
        row = int(np.argwhere(scales > 0x7E)[0, 0])
        raise rows.refusal(first, row, "a scale is negative or not finite", _scales_of)
    yield first * g.codes.row_bytes, codes.reshape(-1)
    yield g.scales.offset + first * g.scales.row_bytes, swizzle_scales(scales)
    if first == 0:
        yield g.divisor.offset, np.array([rows.divisor], "<f4")


def _infinity(g: Geometry) -> int:
    """The least magnitude, as binary32 bits, that is not finite in the format; for bfloat16, after rounding."""
    return 0x7F7F8000 if g.format.name == "bf16" else 0x7F800000


def _check_finite(rows: _Rows, first: int, words: Words, infinity: int) -> None:
    """Refuses magnitudes from ``infinity`` up among words ``[m, columns]``: bfloat16 as uint16, binary32 as uint32."""
    magnitude = 0x7FFF if words.itemsize == 2 else 0x7FFFFFFF
    if _largest(words, magnitude) < infinity:
        return
    row, column = np.argwhere(words & magnitude >= infinity)[0]
    word = words[row, column]
    value = bf16_to_f32(word) if words.itemsize == 2 else word.view("<f4")
    rounded = " once rounded to bfloat16" if np.isfinite(value) else ""
    raise rows.refusal(first, int(row), f"column {column}: {value} is not finite{rounded}", _values_of)


def _largest(words: Words, mask: int) -> int:
    from ninfer.convert import _words

    return int(_words.largest(words.reshape(-1), words.dtype.type(mask)))

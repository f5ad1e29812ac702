"""Sets of Unicode scalar values as sorted, disjoint, half-open ranges. A surrogate is never in a set."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""``((low, high), ...)`` with ``low <= c < high``, ascending, not touching."""

END = 0x110000
SURROGATES = (0xD800, 0xE000)


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort and merge half-open ranges, without surrogates and empty ranges."""
    pieces = []
    for low, high in ranges:
        pieces.append((low, min(high, SURROGATES[0])))
        pieces.append((max(low, SURROGATES[1]), high))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(p for p in pieces if p[0] < p[1]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other scalar values."""
    out, at = [], 0
    for low, high in ranges:
        out.append((at, low))
        at = high
    return normalise([*out, (at, END)])


def union(*sets: Ranges) -> Ranges:
    return normalise(r for s in sets for r in s)


def intersection(a: Ranges, b: Ranges) -> Ranges:
    return complement(union(complement(a), complement(b)))


def single(char: str) -> Ranges:
    return normalise([(ord(char), ord(char) + 1)])


def contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code < high for low, high in ranges)


ANY: Ranges = normalise([(0, END)])
DIGIT: Ranges = normalise([(0x30, 0x3A)])
WORD: Ranges = normalise([(0x30, 0x3A), (0x41, 0x5B), (0x5F, 0x60), (0x61, 0x7B)])
SPACE: Ranges = normalise(
    [(0x09, 0x0E), (0x20, 0x21), (0xA0, 0xA1), (0x1680, 0x1681), (0x2000, 0x200B), (0x2028, 0x202A),
     (0x202F, 0x2030), (0x205F, 0x2060), (0x3000, 0x3001), (0xFEFF, 0xFF00)]
)  # fmt: skip
LINE_ENDS: Ranges = normalise([(0x0A, 0x0B), (0x0D, 0x0E), (0x2028, 0x202A)])
DOT: Ranges = complement(LINE_ENDS)

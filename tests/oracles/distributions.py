"""Whether two piles of answers are drawn from one distribution, however many answers there can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b

from scipy.stats import chi2_contingency

LEAST = 10
"""Outcomes of both piles that a cell of a table holds at least: five of each are expected where piles are equal."""
CELLS = 64
"""Most cells that outcomes too rare for one of their own share."""


def assert_same_distribution(one: Iterable[Sequence[int]], other: Iterable[Sequence[int]]) -> None:
    """Answers' tokens, compared by chi-square whole, as beginnings of every length, token by token at every position,
    and by length: one false alarm in 10,000 in all. Fails where that decides nothing: all are equal, or too few."""
    found = compared([tuple(answer) for answer in one], [tuple(answer) for answer in other])
    assert "whole" in found, "the case decides nothing"
    assert min(found.values()) > 1e-4 / len(found), found


def compared(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """The p-value of each view of the answers that has two cells at least."""
    longest = max(map(len, (*one, *other)), default=0)
    parts = {"whole": slice(None)}
    parts |= {f"first {n}": slice(n) for n in range(1, longest)}
    parts |= {f"token {n}": slice(n - 1, n) for n in range(2, longest + 1)}
    views = {name: [Counter(answer[part] for answer in pile) for pile in (one, other)] for name, part in parts.items()}
    views["length"] = [Counter(map(len, pile)) for pile in (one, other)]
    tables = {name: table(*counts) for name, counts in views.items()}
    return {name: float(chi2_contingency(rows).pvalue) for name, rows in tables.items() if len(rows[0]) > 1}


def table(one: Mapping[Hashable, int], other: Mapping[Hashable, int]) -> tuple[list[int], list[int]]:
    """Two rows of cells that hold every outcome. Frequent ones have a cell each; the rare share theirs by a hash, which
    shows in expectation whatever makes their distributions differ, as one cell for all of them would not.

    Cells depend on the sum of both piles alone, never on which pile an outcome is of.
    """
    both = {outcome: one.get(outcome, 0) + other.get(outcome, 0) for outcome in {**one, **other}}
    shared = max(1, min(CELLS, sum(n for n in both.values() if n < LEAST) // (2 * LEAST)))
    cells: dict[Hashable, tuple[int, int]] = {}
    for outcome, n in both.items():
        cell = outcome if n >= LEAST else ("shared", bucket(outcome, shared))
        a, b = cells.get(cell, (0, 0))
        cells[cell] = a + one.get(outcome, 0), b + other.get(outcome, 0)
    columns = sorted(cells.values(), key=sum, reverse=True)
    while len(columns) > 1 and sum(columns[-1]) < LEAST:
        (a, b), (c, d) = columns.pop(), columns.pop()
        columns = sorted([*columns, (a + c, b + d)], key=sum, reverse=True)
    return [a for a, _ in columns], [b for _, b in columns]


def bucket(outcome: Hashable, count: int) -> int:
    """The same in every process, as ``hash`` of text would not be."""
    return int.from_bytes(blake2b(repr(outcome).encode(), digest_size=8).digest(), "little") % count

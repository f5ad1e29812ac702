"""What decode rounds take: measured when an engine starts, then corrected by the rounds that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEARNING, LARGEST = 1 / 8, 1 / 4
"""Weight of one more round in what rounds like it are known to take, and the largest part that it may be off by and
count in full: one that takes far longer had something else in it."""
FORGETTING, EVERY = 1 / 32, 8
"""How far a price goes back to what rounds of another kind make likely, in how many of those."""
HOPE = 0.9
"""Part of the expected price for which drafts are taken to be had as long as no round with so many has run."""


class Prices:
    """choices: numbers of drafts that a round can have, ascending from 0.

    What is measured at the start lacks what the engine does between rounds, and the device may be slower later. What
    rounds that run take longer than they did then is expected of the others: as much again of larger ones, in
    proportion of smaller ones. That is the least it can be, so one that it makes seem better is tried, and then known.
    """

    __slots__ = ("_index", "_measured", "_new", "_now", "_rounds", "_seen", "choices")

    def __init__(self, choices: Sequence[int], measured: Mapping[int, Sequence[float]]) -> None:
        """measured: seconds of a round by its rows, 1 and the most among them, and by choice; between them it is taken
        to be linear. A price is never less than with fewer drafts."""
        self.choices = tuple(choices)
        self._index = [next(i for i, n in enumerate(choices) if n >= drafts) for drafts in range(choices[-1] + 1)]
        self._measured = [_between(measured, rows) for rows in range(1, max(measured) + 1)]
        self._now = [[seconds[0], *(HOPE * spent for spent in seconds[1:])] for seconds in self._measured]
        self._new = [False] + [True] * (len(self.choices) - 1)
        self._seen = [[False] * len(self.choices) for _ in self._measured]
        self._rounds = 0

    def seconds(self, rows: int) -> Sequence[float]:
        """Of a round of ``rows`` rows, by choice."""
        return self._now[rows - 1]

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """A round that verified and made ``drafts`` drafts of ``rows`` rows took ``seconds``."""
        now, seen, ran = self._now[rows - 1], self._seen[rows - 1], self._index[drafts]
        price = now[ran]
        most = LARGEST * price
        now[ran] = price + LEARNING * min(max(seconds - price, -most), most)
        self._rounds += 1
        if self._rounds % EVERY and seen[ran]:
            return
        seen[ran] = True
        if self._new[ran]:
            self._new[ran] = False
            for other, known in zip(self._now, self._seen):
                if not known[ran]:
                    other[ran] /= HOPE
        measured = self._measured[rows - 1]
        more = now[ran] - measured[ran]
        for i, start in enumerate(measured):
            if i == ran:
                continue
            share = start / measured[ran]
            likely = start + more * (share if more < 0 else min(1.0, share))
            if seen[i]:
                now[i] += FORGETTING * (likely - now[i])
            else:
                now[i] = HOPE * likely if self._new[i] else likely


def _between(measured: Mapping[int, Sequence[float]], rows: int) -> list[float]:
    """Seconds of a round of ``rows`` rows."""
    below, above = max(n for n in measured if n <= rows), min(n for n in measured if n >= rows)
    share = (rows - below) / (above - below) if above > below else 0.0
    seconds = [a + share * (b - a) for a, b in zip(measured[below], measured[above], strict=True)]
    return [max(seconds[: i + 1]) for i in range(len(seconds))]

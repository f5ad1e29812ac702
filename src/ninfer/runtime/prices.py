"""What decode rounds take: measured when an engine starts, then corrected by the rounds that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LEARNING = 1 / 16
"""Weight of one more round in what rounds like it are known to take."""
FORGETTING, EVERY = 1 / 32, 8
"""How far a price goes back to what was measured at the start, in how many rounds of another kind."""


class Prices:
    """choices: numbers of drafts that a round can have, ascending from 0.

    What is measured at the start lacks what the engine does between rounds, the same for each: that is learnt from
    whatever rounds run, so that what did not run is not taken to be free of it.
    """

    __slots__ = ("_index", "_measured", "_more", "_now", "_rounds", "_seen", "choices")

    def __init__(self, choices: Sequence[int], measured: Mapping[int, Sequence[float]]) -> None:
        """measured: seconds of a round by its rows, 1 and the most among them, and by choice; between them it is taken
        to be linear. A price is never less than with fewer drafts."""
        self.choices = tuple(choices)
        self._index = [next(i for i, n in enumerate(choices) if n >= drafts) for drafts in range(choices[-1] + 1)]
        self._rounds = 0
        self._measured = [_between(measured, rows) for rows in range(1, max(measured) + 1)]
        self._now = [list(seconds) for seconds in self._measured]
        self._seen = [[False] * len(self.choices) for _ in self._measured]
        self._more = [0.0] * len(self._measured)

    def seconds(self, rows: int) -> Sequence[float]:
        """Of a round of ``rows`` rows, by choice."""
        return self._now[rows - 1]

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        """A round that verified and made ``drafts`` drafts of ``rows`` rows took ``seconds``. One that took far longer
        than expected had something else in it."""
        measured, now, seen = self._measured[rows - 1], self._now[rows - 1], self._seen[rows - 1]
        ran = self._index[drafts]
        price = now[ran]
        now[ran] = price = price + LEARNING * (min(seconds, 2 * price) - price)
        more = self._more[rows - 1]
        self._more[rows - 1] = more = more + LEARNING * (max(price - measured[ran], 0.0) - more)
        self._rounds += 1
        if self._rounds % EVERY and seen[ran]:
            return
        seen[ran] = True
        for i, (price, was_seen) in enumerate(zip(measured, seen)):
            if i != ran:
                now[i] = now[i] + FORGETTING * (price + more - now[i]) if was_seen else price + more


def _between(measured: Mapping[int, Sequence[float]], rows: int) -> list[float]:
    """Seconds of a round of ``rows`` rows."""
    below, above = max(n for n in measured if n <= rows), min(n for n in measured if n >= rows)
    share = (rows - below) / (above - below) if above > below else 0.0
    seconds = [a + share * (b - a) for a, b in zip(measured[below], measured[above], strict=True)]
    return [max(seconds[: i + 1]) for i in range(len(seconds))]

"""How many drafts a round has, chosen from how drafts have fared and from what rounds take.

A draft counts only where all before it are kept. With ``a_j`` the share of the drafts at place j that are kept, of
those that are reached, a row with k drafts decides ``E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k`` tokens on average.
All rows of a round have as many columns as the widest, so one k is chosen for all: the one with the largest sum of
``E(k)`` over the time of a round.

What is known of a request is its own; where that is little, it is taken to be like the engine's other requests. The
choice knows committed rounds alone, not the tokens that are to be decided, so it leaves their distribution as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ninfer.runtime.prices import Prices

FADING = 0.95
"""Weight of what a request has shown so far after another round: some twenty are remembered."""
POOL_FADING, POOL_AGEING = 0.99, 0.998
"""The same of what all have shown: at a place that was reached once more; and everywhere after another round, since
places behind the first are not tried where it fails."""
PRIOR, DOUBT = 0.8, 2.0
"""Share of kept drafts that is believed of the first place before there were any, of the others that it is as of the
place before; and how many drafts seen that counts for."""
BELIEF = 5.0
"""How many drafts of its own the engine's experience counts for in a request."""
PROBING = 0.01
"""Share of the time that may be lost by trying more drafts than are expected to pay."""
HELD = 1.03
"""How much better another number has to look than the one there is: shares and prices are both uncertain."""
STANDING = 8
"""Rounds without drafts for which a choice stands: with one row it takes as long as a tenth of a short round."""


class Fared:
    """How drafts have fared: of each place, those that were reached, and kept. ``unit`` is what one counts now: it
    grows, so that what was counted before fades."""

    __slots__ = ("kept", "reached", "unit")

    def __init__(self, window: int) -> None:
        self.kept, self.reached = [0.0] * window, [0.0] * window
        self.unit = 1.0

    def age(self, weight: float) -> None:
        """What was counted so far has that weight from now on."""
        self.unit /= weight
        if self.unit > 1e9:
            self.kept, self.reached = ([n / self.unit for n in counts] for counts in (self.kept, self.reached))
            self.unit = 1.0

    def add(self, place: int, kept: bool, weight: float = 1.0) -> None:
        self.reached[place] = weight * self.reached[place] + self.unit
        self.kept[place] = weight * self.kept[place] + kept * self.unit


def expected(fared: Fared, pool: Sequence[float]) -> list[float]:
    """Tokens that a row decides with 0, 1, ... drafts, where ``pool`` are the shares kept at each place by all."""
    tokens, running, sure, belief = [1.0], 1.0, 1.0, BELIEF * fared.unit
    for kept, reached, share in zip(fared.kept, fared.reached, pool):
        sure *= (kept + belief * share) / (reached + belief)
        running += sure
        tokens.append(running)
    return tokens


def best(tokens: Sequence[float], seconds: Sequence[float], held: int) -> int:
    """The choice that decides the most tokens a second, of equal ones the last; ``held`` if no other is much better."""
    chosen = max(range(len(tokens)), key=lambda i: (tokens[i] / seconds[i], i))
    return chosen if tokens[chosen] * seconds[held] > HELD * tokens[held] * seconds[chosen] else held


class Pace:
    """Chooses for one engine. ``first`` before a row's first drafts are made, ``turn`` at the launch of each round,
    ``learn`` at its commit.

    Drafts are made in the round before the one that verifies them, so their number is chosen one round ahead. Fewer
    teach nothing about more, so now and then the next larger number is tried. What that may lose is saved up; a request
    that nothing is known of may take the last of it, others leave as much again. Rounds without drafts change little,
    so what was chosen stands for some of them.
    """

    __slots__ = ("_asked", "_held", "_news", "_passed", "_pool", "_rows", "_saved", "prices", "window")

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.window = prices.choices[-1]
        self._pool = Fared(self.window)
        self._saved = 0.0
        self._held = len(prices.choices) - 1  # what was chosen last, trying aside
        self._asked = self._rows = 0
        self._passed = 0  # rounds since the last choice
        self._news = False

    def first(self, row: Fared, alone: bool) -> int:
        """Drafts to make behind a prompt. Beside others it has as many as they have now."""
        if alone:
            self._asked = self._choose((row,), 0)
        return self._asked

    def turn(self, rows: Sequence[Fared], everything: bool = False) -> tuple[int, int]:
        """Drafts to verify in the round that starts, and drafts it is to make for the next. everything: a row has all
        drafts whatever they bring."""
        asked = self._asked
        self._passed += 1
        self._pool.age(POOL_AGEING)
        if everything:
            self._asked = self.window
        elif asked or self._news or self._passed >= STANDING or len(rows) != self._rows:
            self._asked = self._choose(rows, self._passed)
            self._passed, self._news = 0, False
        self._rows = len(rows)
        return asked, self._asked

    def learn(self, row: Fared, drafted: int, kept: int) -> None:
        """A round verified ``drafted`` drafts of a row and kept the first ``kept`` of them."""
        row.age(FADING)
        self._news = self._news or drafted > 0
        for place in range(min(kept + 1, drafted)):
            row.add(place, place < kept)
            self._pool.add(place, place < kept, POOL_FADING)

    def shares(self) -> list[float]:
        """Of the drafts at each place that are reached, how many are taken to be kept in a request like the others."""
        shares, share, doubt = [], PRIOR, DOUBT * self._pool.unit
        for kept, reached in zip(self._pool.kept, self._pool.reached):
            share = (kept + doubt * share) / (reached + doubt)
            shares.append(share)
        return shares

    def _choose(self, rows: Sequence[Fared], passed: int) -> int:
        """``passed``: rounds since the last choice."""
        shares, choices, seconds = self.shares(), self.prices.choices, self.prices.seconds(len(rows))
        each = [expected(row, shares) for row in rows]
        tokens = [sum([one[k] for one in each]) for k in choices]
        chosen = self._held = best(tokens, seconds, self._held)
        if chosen + 1 < len(choices):
            more = chosen + 1
            self._saved = min(self._saved + passed * PROBING * seconds[chosen], 2 * seconds[more])
            loss = seconds[more] - seconds[chosen] * tokens[more] / tokens[chosen]
            unknown = any(row.reached[0] < row.unit / 2 for row in rows)
            if self._saved >= (loss if unknown else 2 * loss):
                self._saved -= loss
                chosen = more
        return choices[chosen]

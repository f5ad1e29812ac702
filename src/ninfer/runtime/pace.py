"""How many drafts a request has verified in a round, chosen from how its own have fared and from what rounds cost.

A draft counts only where all before it are kept. With ``a_j`` the share of the drafts at place j that were kept, of
those that were reached, a round with k drafts decides ``E(k) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k`` tokens on
average. The k with the largest ``E(k) / cost(k)`` decides the most tokens a second.

The choice knows a request's committed rounds alone: not the tokens that are to be decided, so it leaves their
distribution as it is, nor the other rows of a batch, so a request has the same rounds in whatever company.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

FADING = 0.9
"""Weight of what a place has shown so far when it is reached once more: some ten rounds are remembered."""
PRIOR, BELIEF = 0.8, 0.5
"""Share of kept drafts that is believed of a place that was never reached, and how many drafts seen that counts for."""
PROBING = 0.02
"""Share of the time that may be lost by trying all drafts where fewer are expected to do. A round is as wide for all of
its rows, so each of them has its part of that."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a round costs. cost[k]: with k drafts, as a multiple of one without; never less than with fewer. probing:
    share of the time that one request may lose to probes."""

    cost: tuple[float, ...]
    probing: float = PROBING

    @classmethod
    def measured(cls, seconds: Sequence[float], rows: int) -> Prices:
        """From the time of a round of ``rows`` rows with 0, 1, ... drafts each, in any unit."""
        return cls(tuple(itertools.accumulate([spent / seconds[0] for spent in seconds], max)), PROBING / rows)

    def best(self, shares: Sequence[float]) -> tuple[int, float]:
        """The number of drafts that pays best where ``shares`` of each place are kept, and what a token then costs."""
        drafts, price = 0, self.cost[0]
        reached = tokens = 1.0
        for k, (share, cost) in enumerate(zip(shares, self.cost[1:], strict=True), 1):
            reached *= share
            tokens += reached
            if cost / tokens <= price:
                drafts, price = k, cost / tokens
        return drafts, price


class Pace:
    """The drafts of one request. ``turn`` at the launch of each of its rounds, ``learn`` at its commit.

    Drafts are made in the round before the one that verifies them, so their number is chosen one round ahead. Fewer
    than all teach nothing about the others. What rounds may lose to probing is saved up; a probe is paid when it is
    asked for, and gets back what the drafts it keeps would have cost without it.
    """

    __slots__ = ("_asked", "_kept", "_prices", "_saved", "_tried")

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        window = len(prices.cost) - 1
        self._kept, self._tried = [0.0] * window, [0.0] * window
        self._asked = window
        self._saved = 0.0

    def turn(self) -> tuple[int, int]:
        """Drafts to verify in the round that starts, and drafts it is to make for the next."""
        cost, now = self._prices.cost, self._asked
        drafts, _ = self._best()
        loss = cost[-1] - cost[drafts]
        if drafts < len(self._tried) and self._saved >= loss:
            self._saved -= loss
            drafts = len(self._tried)
        self._asked = drafts
        return now, drafts

    def learn(self, drafted: int, kept: int) -> None:
        """A round verified ``drafted`` drafts and kept the first ``kept`` of them."""
        for place in range(min(kept + 1, drafted)):
            self._tried[place] = FADING * self._tried[place] + 1
            self._kept[place] = FADING * self._kept[place] + (place < kept)
        best, price = self._best()
        self._saved += self._prices.probing * self._prices.cost[drafted] + (kept * price if drafted > best else 0.0)
        self._saved = min(self._saved, self._prices.cost[-1])

    def _best(self) -> tuple[int, float]:
        return self._prices.best(
            [(kept + BELIEF * PRIOR) / (tried + BELIEF) for kept, tried in zip(self._kept, self._tried, strict=True)]
        )

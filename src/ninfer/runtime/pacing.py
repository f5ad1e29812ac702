"""``Pace`` put to requests: their licences for each round, and what rounds took and kept put back to it."""

from __future__ import annotations

from collections.abc import Sequence

from ninfer.contract import UnitLicense
from ninfer.runtime.output import licence
from ninfer.runtime.pace import Fared, Pace
from ninfer.runtime.prices import Prices
from ninfer.runtime.record import RequestRecord


class Pacing:
    """A request that names its seed has all drafts in every round, so that no other decides what its tokens are."""

    __slots__ = ("_before", "_pace", "_ran", "_since")

    def __init__(self, prices: Prices) -> None:
        self._pace = Pace(prices)
        self._ran = (0, 0)  # drafts that the round verifies and makes
        self._before: list[int] = []  # rows of the last unit, if it was a round
        self._since = 0.0  # when it was committed

    def first(self, row: RequestRecord, active: Sequence[RequestRecord]) -> int:
        """Drafts to make behind the prompt of ``row``, one of the ``active``."""
        if _repeats(row):
            return self._pace.window
        alone = all(other is row or other.first_token is None for other in active)
        return self._pace.first(self._fared(row), alone)

    def licences(self, rows: Sequence[RequestRecord]) -> list[UnitLicense]:
        """For one round of ``rows``."""
        window, repeats = self._pace.window, [_repeats(row) for row in rows]
        drafts, ahead = self._pace.turn([self._fared(row) for row in rows], any(repeats))
        licences = [licence(row, window if all_ else drafts, ahead) for row, all_ in zip(rows, repeats)]
        self._ran = max([one.drafts for one in licences]), max([one.ahead or 0 for one in licences])
        return licences

    def interrupted(self) -> None:
        """Something else than a round is done."""
        self._before = []

    def committed(self, rows: Sequence[RequestRecord], now: float) -> None:
        """A decode round of ``rows`` was committed at ``now``.

        It tells a price where it made as many drafts as it verified, and was the next thing after one of the same rows.
        The last round of a request says nothing of drafts: they may have been cut off.
        """
        (drafts, ahead), ids = self._ran, [row.id for row in rows]
        if drafts == ahead and ids == self._before:
            self._pace.prices.observe(len(rows), drafts, now - self._since)
        self._before, self._since = ids, now
        for row in rows:
            if row.ending is None and row.fared is not None:
                self._pace.learn(row.fared, row.verified[0], min(row.verified))

    def _fared(self, row: RequestRecord) -> Fared:
        if row.fared is None:
            row.fared = Fared(self._pace.window)
        return row.fared


def _repeats(row: RequestRecord) -> bool:
    sampling = row.request.sampling
    return sampling.named and sampling.temperature > 0

"""Pace put to requests: which rounds tell a price, and whose drafts are counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ninfer.runtime.pacing import Pacing
from ninfer.runtime.prices import Prices


class Observed(Prices):
    def __init__(self) -> None:
        super().__init__((0, 1, 3), {1: (1.0, 1.2, 1.5), 2: (1.0, 1.2, 1.5)})
        self.seen = []

    def observe(self, rows, drafts, seconds):
        self.seen.append((rows, drafts, seconds))


def row(number: int = 1, left: int = 100, named: bool = False, temperature: float = 0.0, thinking: int | None = None):
    """A request that decodes."""
    sampling = SimpleNamespace(named=named, temperature=temperature)
    return SimpleNamespace(
        id=number, request=SimpleNamespace(sampling=sampling), left=left, fared=None, ending=None, verified=(0, 0),
        first_token=1.0, session=SimpleNamespace(licence=lambda: thinking),
    )  # fmt: skip


def drafts(licences):
    return [(one.drafts, one.ahead) for one in licences]


@pytest.fixture
def prices():
    return Observed()


@pytest.fixture
def pacing(prices):
    return Pacing(prices)


def test_budgets_bound_what_is_chosen(pacing):
    rows = [row(1), row(2, left=3)]
    assert pacing.first(rows[0], rows[:1]) == 3
    assert drafts(pacing.licences(rows)) == [(3, 3), (2, 1)]
    pacing = Pacing(Observed())
    rows = [row(1, left=1), row(2, thinking=3)]
    pacing.first(rows[0], rows[:1])
    assert drafts(pacing.licences(rows)) == [(0, 0), (2, 3)]


def test_only_rounds_that_follow_their_like_tell_a_price(pacing, prices):
    a, b = row(1), row(2)
    assert pacing.first(a, [a]) == 3

    def round_(rows, now):
        pacing.licences(rows)
        for one in rows:
            one.verified = (3, 3)
        pacing.committed(rows, now)

    round_([a], 1.0)
    assert prices.seen == [], "nothing came before it"
    round_([a], 1.5)
    assert prices.seen == [(1, 3, 0.5)]
    round_([a, b], 3.0)
    assert len(prices.seen) == 1, "other rows ran before"
    pacing.interrupted()
    round_([a, b], 4.0)
    assert len(prices.seen) == 1, "there was a prompt in between"
    round_([a, b], 4.25)
    assert prices.seen[1:] == [(2, 3, 0.25)]
    a.left = b.left = 4
    round_([a, b], 5.0)
    assert len(prices.seen) == 2, "fewer drafts were made than verified"


def test_the_last_round_of_a_request_counts_for_nothing(pacing):
    one = row()
    pacing.first(one, [one])
    pacing.licences([one])
    one.verified, one.ending = (3, 0), "stopped"
    pacing.committed([one], 1.0)
    assert one.fared.reached == [0.0] * 3
    one.ending = None
    pacing.committed([one], 2.0)
    assert one.fared.reached[0] > 0


def test_a_row_beside_one_that_decodes_begins_like_it(pacing):
    old, new = row(1), row(2)
    pacing.first(old, [old])
    for n in range(40):
        asked = pacing.licences([old])[0].drafts
        old.verified = (asked, 0)
        pacing.committed([old], float(n))
    new.first_token = None
    few = pacing.first(new, [old, new])
    assert few < 3
    new = row(3, named=True, temperature=1.0)
    assert pacing.first(new, [old, new]) == 3


def test_a_named_seed_has_all_drafts_unless_it_draws_nothing(pacing):
    poor = row(1)
    pacing.first(poor, [poor])
    for n in range(40):
        poor.verified = (pacing.licences([poor])[0].drafts, 0)
        pacing.committed([poor], float(n))
    greedy, draws = row(2, named=True), row(3, named=True, temperature=0.5)
    assert max(drafts(pacing.licences([greedy]))[0]) < 3
    assert drafts(pacing.licences([draws]))[0] == (3, 3)
    assert drafts(pacing.licences([poor, draws])) == [(3, 3), (3, 3)]

"""How many drafts rounds have: judged against fixed numbers of drafts, under scripted odds and scripted prices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.runtime.pace import BELIEF, PROBING, Fared, Pace, best, expected
from ninfer.runtime.prices import Prices

Odds = Callable[[int], list[float]]
"""With which each draft of a request's n-th round is kept, if all before it are."""

COSTS = {
    "large": ((0, 1, 3), (1.0, 1.22, 1.47), (1.3, 1.6, 1.95)),
    "small": ((0, 1, 2, 3), (1.0, 1.99, 2.47, 2.8), (4.0, 6.5, 9.0, 12.0)),
    "block": ((0, 1, 3, 7), (1.0, 1.35, 1.42, 1.5), (1.3, 1.8, 2.0, 2.35)),
}
"""Numbers of drafts, and what rounds of one row and of eight take with them."""


def true_cost(cost: str, rows: int, drafts: int) -> float:
    choices, one, eight = COSTS[cost]
    i = next(i for i, choice in enumerate(choices) if choice >= drafts)
    return one[i] + (rows - 1) / 7 * (eight[i] - one[i])


def known(cost: str) -> Prices:
    """Prices of which every one has been seen."""
    choices, one, eight = COSTS[cost]
    prices = Prices(choices, {1: one, 8: eight})
    for rows in range(1, 9):
        for _ in range(100):
            for drafts in choices:
                prices.observe(rows, drafts, true_cost(cost, rows, drafts))
    return prices


def always(share: float) -> Odds:
    return lambda n: [share] * 7


def by_turns(one: float, other: float, rounds: int) -> Odds:
    return lambda n: [other if n // rounds % 2 else one] * 7


def speed(cost: str, odds: Iterable[Odds], rows: int, drafts: int | None = None, length: int = 96) -> float:
    """Tokens a unit of time of answers of ``length`` tokens, ``rows`` at once: paced, or with ``drafts`` in each."""
    choices, one, eight = COSTS[cost]
    prices = Prices(choices, {1: one, 8: eight})
    chance, pace, window = random.Random(0), Pace(prices), choices[-1]
    waiting, active, time, tokens = list(odds), [], 0.0, 0
    while waiting or active:
        while waiting and len(active) < rows:
            fared = Fared(window)
            made = pace.first(fared, not active) if drafts is None else drafts
            active.append([waiting.pop(0), fared, length - 1, made, 0])
        asked, ahead = pace.turn([row[1] for row in active]) if drafts is None else (drafts, drafts)
        widest = 0
        for row in active:
            ways, fared, left, made, n = row
            verified, kept = min(asked, made, left - 1), 0
            while kept < verified and chance.random() < ways(n)[kept]:
                kept += 1
            pace.learn(fared, verified, kept)
            row[2:] = left - kept - 1, ahead, n + 1
            tokens += kept + 1
            widest = max(widest, verified)
        took = true_cost(cost, len(active), widest)
        if widest == ahead:
            prices.observe(len(active), widest, took)
        time += took
        active = [row for row in active if row[2] > 0]
    return tokens / time


def fixed(cost: str, odds: list[Odds], rows: int, length: int = 96) -> float:
    """The better of all drafts and none."""
    return max(speed(cost, odds, rows, drafts, length) for drafts in (0, COSTS[cost][0][-1]))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_requests_alike_run_as_fast_as_with_the_better_of_all_drafts_and_none(cost, share, rows):
    odds = [always(share)] * 48
    assert speed(cost, odds, rows) > 0.955 * fixed(cost, odds, rows)


@pytest.mark.parametrize(("cost", "gain"), [("large", 1.1), ("block", 1.1), ("small", 0.97)])
def test_requests_that_differ_run_faster(cost, gain):
    odds = [always(0.93), always(0.05)] * 24
    assert speed(cost, odds, 1) > gain * fixed(cost, odds, 1)
    assert speed(cost, odds, 8) > 0.97 * fixed(cost, odds, 8)


@pytest.mark.parametrize(("cost", "gain"), [("large", 1.02), ("small", 1.1), ("block", 0.98)])
def test_a_request_that_changes_is_followed(cost, gain):
    odds = [by_turns(0.95, 0.02, 100)] * 4
    assert speed(cost, odds, 1, length=2000) > gain * fixed(cost, odds, 1, length=2000)


def test_a_poor_round_or_two_do_not_end_drafts_that_pay():
    """The first rounds of a request weigh little beside what is known of others."""
    pace, row = Pace(known("large")), Fared(3)
    for _ in range(100):
        pace.learn(row, 3, 3)
    new = Fared(3)
    assert pace.first(new, True) == 3
    for kept in (0, 0):
        pace.learn(new, 3, kept)
        assert pace.turn([new])[1] == 3


def test_drafts_that_are_never_kept_cease_but_for_one_now_and_then():
    for prices in map(known, COSTS):
        pace, row, ran = Pace(prices), Fared(prices.choices[-1]), []
        pace.first(row, True)
        for _ in range(3000):
            asked, _ = pace.turn([row])
            pace.learn(row, asked, 0)
            ran.append(asked)
        assert set(ran[1000:]) == {0, 1}
        cost = dict(zip(prices.choices, prices.seconds(1)))
        lost = sum(cost[k] - cost[0] for k in ran[1000:])
        assert 0.5 * PROBING < lost / 2000 < 1.5 * PROBING


def test_all_rows_of_a_round_have_one_number():
    """Where one of eight drafts well, the others' columns cost more than its drafts bring; not so where five do."""
    prices = known("large")
    for good, drafts in ((1, 0), (5, 3)):
        pace, rows = Pace(prices), [Fared(3) for _ in range(8)]
        for _ in range(40):
            for i, row in enumerate(rows):
                pace.learn(row, 3, 3 if i < good else 0)
        assert [pace.turn(rows)[1] for _ in range(3)][-1] == drafts


def test_a_row_beside_others_begins_with_as_many_as_they_have():
    pace, old, new = Pace(known("large")), Fared(3), Fared(3)
    assert pace.first(old, True) == 3
    for _ in range(60):
        pace.learn(old, 3, 0)
    assert pace.turn([old]) == (3, 0)
    assert pace.first(new, False) == 0
    assert pace.turn([old, new])[0] == 0


def test_a_row_that_has_all_drafts_widens_the_round_of_all():
    pace, row = Pace(known("large")), Fared(3)
    for _ in range(60):
        pace.learn(row, 3, 0)
    assert pace.turn([row], everything=True)[1] == 3
    assert pace.turn([row], everything=True) == (3, 3)
    assert pace.turn([row]) == (3, 0)


def test_a_number_is_held_unless_another_is_much_better():
    assert best((1.0, 2.5, 5.0), (1.0, 2.0, 4.0), 0) == 2, "of equal ones the last"
    assert best((1.0, 2.2, 3.0), (1.0, 2.0, 3.0), 0) == 1
    assert best((1.0, 2.04, 3.0), (1.0, 2.0, 3.0), 0) == 0
    assert best((1.0, 2.04, 3.0), (1.0, 2.0, 3.0), 2) == 2


def test_tokens_that_a_row_is_expected_to_decide():
    row = Fared(2)
    assert expected(row, (0.5, 0.25)) == [1.0, 1.5, 1.625]
    for _ in range(int(BELIEF)):
        row.add(0, True)
    assert expected(row, (0.5, 0.25)) == [1.0, 1.75, 1.9375]


def test_a_place_that_was_never_reached_is_taken_to_be_like_the_one_before():
    pace, row = Pace(known("block")), Fared(7)
    for _ in range(400):
        pace.learn(row, 1, 1)
    assert min(pace.shares()) > 0.95
    for _ in range(400):
        pace.learn(row, 1, 0)
    assert max(pace.shares()) < 0.1


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60), st.integers(1, 7))
def test_any_history_gives_numbers_that_exist(history, window):
    choices = range(window + 1)
    pace, row = Pace(Prices(choices, {1: [1 + 0.2 * k for k in choices]})), Fared(window)
    last = pace.first(row, True)
    for drafted, kept in history:
        asked, ahead = pace.turn([row])
        assert asked == last
        assert 0 <= ahead <= window
        last, drafted = ahead, min(drafted, asked)
        pace.learn(row, drafted, min(kept, drafted))
        assert all(0 <= share <= 1 for share in pace.shares())

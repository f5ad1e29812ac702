"""How many drafts a request has verified: judged against the best number that never changes, under known odds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.runtime.pace import PROBING, Pace, Prices

GPU = Prices((1.0, 1.12, 1.3, 1.3))
CPU = Prices((1.0, 1.6, 2.0, 2.5))
BLOCK = Prices((1.0, 1.45, 1.5, 1.5, 1.7, 1.7, 1.7, 1.7))


def run(prices: Prices, odds, rounds: int, seed: int = 0) -> tuple[list[int], int, float]:
    """Drafts of each round, tokens decided and time spent, where draft j is kept by ``odds[j]``."""
    random_ = random.Random(seed)
    pace, made, drafts = Pace(prices), len(prices.cost) - 1, []
    tokens, spent = 0, 0.0
    for _ in range(rounds):
        asked, ahead = pace.turn()
        assert asked <= made
        made = ahead
        kept = 0
        while kept < asked and random_.random() < odds[kept]:
            kept += 1
        pace.learn(asked, kept)
        drafts.append(asked)
        tokens += kept + 1
        spent += prices.cost[asked]
    return drafts, tokens, spent


def fixed(prices: Prices, odds) -> float:
    """Tokens a unit of time of the best number of drafts, had it been known."""
    return 1 / prices.best(odds)[1]


@pytest.mark.parametrize("prices", [GPU, CPU, BLOCK])
def test_drafts_that_are_always_kept_are_all_made(prices):
    window = len(prices.cost) - 1
    drafts, tokens, _ = run(prices, [1.0] * window, 60)
    assert drafts[5:] == [window] * 55
    assert tokens == sum(drafts) + 60


@pytest.mark.parametrize("prices", [GPU, CPU, BLOCK])
def test_drafts_that_are_never_kept_cease_but_for_probes(prices):
    window = len(prices.cost) - 1
    drafts, _, _ = run(prices, [0.0] * window, 1000)
    settled = drafts[30:]
    assert set(settled) == {0, window}
    lost = sum(prices.cost[k] - 1 for k in settled)
    assert 0.5 * PROBING * len(settled) < lost < 1.2 * PROBING * len(settled)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_of_a_batch_share_what_probes_may_cost(rows):
    """A probe of one widens the round of all."""
    paces, prices = [Pace(Prices(CPU.cost, PROBING / rows)) for _ in range(rows)], CPU
    for n in range(2000):
        asked = [pace.turn()[0] for pace in paces]
        for pace, drafts in zip(paces, asked):
            pace.learn(drafts, 0)
        if n == 30:
            lost = 0.0
        elif n > 30:
            lost += prices.cost[max(asked)] - 1
    assert lost < 1.2 * PROBING * 1970


@pytest.mark.parametrize("prices", [GPU, CPU, BLOCK])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.7, 0.9, 0.98])
def test_the_speed_is_near_that_of_the_best_number(prices, share):
    odds = [share] * (len(prices.cost) - 1)
    reached = [tokens / spent for _, tokens, spent in (run(prices, odds, 300, seed) for seed in range(20))]
    assert sum(reached) / 20 > 0.9 * fixed(prices, odds)


@pytest.mark.parametrize("prices", [GPU, CPU, BLOCK])
def test_a_change_is_noticed(prices):
    """Text that drafts well after text that does not."""
    window, pace = len(prices.cost) - 1, Pace(prices)
    drafts = []
    for n in range(600):
        asked, _ = pace.turn()
        pace.learn(asked, asked if n >= 100 else 0)
        drafts.append(asked)
    assert sum(drafts[60:100]) <= window * 4
    assert drafts[-100:] == [window] * 100


def test_a_number_between_is_found():
    """Where every draft is verified at a price of its own and the first are good: as many as pay."""
    prices = Prices((1.0, 1.1, 1.2, 1.6, 2.0, 2.4, 2.8, 3.2))
    odds = [0.9, 0.9, 0.2, 0.2, 0.2, 0.2, 0.2]
    drafts, _, _ = run(prices, odds, 400)
    assert prices.best(odds)[0] == 2
    assert sum(n == 2 for n in drafts[100:]) > 200


def test_prices_never_fall():
    assert Prices.measured([10, 14, 13, 20], 4) == Prices((1.0, 1.4, 1.4, 2.0), PROBING / 4)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60), st.integers(1, 7))
def test_the_choice_follows_from_the_history_alone(history, window):
    """Two requests with the same history have the same rounds; a round of fewer drafts than asked for is learnt from
    as it was."""
    prices = Prices(tuple(1 + 0.2 * k for k in range(window + 1)))
    one, other = Pace(prices), Pace(prices)
    for drafted, kept in history:
        (asked, ahead), again = one.turn(), other.turn()
        assert (asked, ahead) == again
        assert 0 <= ahead <= window
        drafted = min(drafted, asked)
        for pace in (one, other):
            pace.learn(drafted, min(kept, drafted))

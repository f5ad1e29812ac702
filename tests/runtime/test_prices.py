"""What rounds are taken to cost: from a start that knows Program alone, and from rounds as they come."""

from __future__ import annotations

import random

import pytest

from ninfer.runtime.prices import HOPE, Prices


def hoped(seconds, *seen):
    """What rounds are taken to cost of which only those at ``seen`` have run."""
    return pytest.approx([spent * (HOPE if i and i not in seen else 1) for i, spent in enumerate(seconds)])


def test_between_what_was_measured_it_is_linear():
    prices = Prices((0, 1, 3), {1: (1.0, 2.0, 3.0), 5: (5.0, 4.0, 11.0)})
    assert prices.seconds(1) == hoped([1.0, 2.0, 3.0])
    assert prices.seconds(3) == hoped([3.0, 3.0, 7.0])
    assert prices.seconds(5) == hoped([5.0, 5.0, 11.0]), "more drafts never cost less"


@pytest.mark.parametrize(
    ("drafts", "took", "likely"),
    [
        (0, 1.5, [1.5, 4.5, 5.5]),  # what the engine adds to each round
        (3, 6.0, [1.2, 4.8, 6.0]),  # no more of one without drafts than it would be if all were slower
        (1, 4.4, [1.1, 4.4, 5.4]),
        (0, 0.8, [0.8, 3.2, 4.0]),  # the start was slow
    ],
)
def test_what_did_not_run_is_expected_to_take_the_least_that_what_ran_makes_likely(drafts, took, likely):
    prices = Prices((0, 1, 3), {1: (1.0, 4.0, 5.0)})
    for _ in range(300):
        prices.observe(1, drafts, took)
    assert prices.seconds(1) == hoped(likely, {0: 0, 1: 1, 3: 2}[drafts])


def test_rounds_that_ran_have_prices_of_their_own():
    prices, noise = Prices((0, 1, 3), {1: (1.0, 4.0, 5.0), 2: (1.0, 4.0, 5.0)}), random.Random(0)
    for _ in range(400):
        prices.observe(1, 0, 1.2 * noise.uniform(0.8, 1.2))
        prices.observe(1, 2, 3.0 * noise.uniform(0.8, 1.2))
    assert prices.seconds(1)[0] == pytest.approx(1.2, rel=0.1)
    assert prices.seconds(1)[2] == pytest.approx(3.0, rel=0.1), "two drafts run in a round of three"
    assert prices.seconds(2) == hoped([1.0, 4.0, 5.0], 2), "of other rows nothing is known but that it can be had"


def test_a_round_with_something_else_in_it_says_little():
    prices = Prices((0, 1), {1: (1.0, 2.0)})
    prices.observe(1, 0, 1000.0)
    assert prices.seconds(1)[0] == pytest.approx(1 + 1 / 32)


def test_what_was_seen_long_ago_is_forgotten():
    prices = Prices((0, 1), {1: (1.0, 2.0)})
    for _ in range(200):
        prices.observe(1, 1, 10.0)
    assert prices.seconds(1)[1] > 9
    for _ in range(5000):
        prices.observe(1, 0, 1.0)
    assert prices.seconds(1) == pytest.approx([1.0, 2.0], abs=0.05)

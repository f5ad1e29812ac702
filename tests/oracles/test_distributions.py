"""The comparison of distributions finds what differs, and nothing where nothing does."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.distributions import CELLS, LEAST, assert_same_distribution, compared, table

MANY = 420
"""Tokens, of which three make more answers than are ever drawn twice."""


def drawn(seed: int, count: int = 2000, tokens: int = MANY, length: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tokens, (count, length))


@pytest.mark.parametrize(("count", "tokens", "length"), [(2000, MANY, 3), (2000, 8, 3), (100, 3, 2), (100, MANY, 4)])
def test_equal_distributions_pass(count, tokens, length):
    for seed in range(8):
        assert_same_distribution(*(drawn(2 * seed + i, count, tokens, length) for i in range(2)))


def test_answers_of_several_lengths_pass():
    rng = np.random.default_rng(1)
    assert_same_distribution(*([tuple(a[: rng.integers(0, 4)]) for a in drawn(i)] for i in range(2)))


def a_token_is_likelier(answers):
    answers[::15, 1] = 7
    return answers


def half_the_tokens_are_likelier(answers):
    """Of which each is drawn a few times only."""
    answers[::2, 2] //= 2
    return answers


def tokens_repeat(answers):
    """Every position's tokens are as likely as before."""
    answers[::4, 1] = answers[::4, 0]
    return answers


def answers_end_early(answers):
    return [answer[: 2 + (i % 50 > 0)] for i, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("tokens", "changed", "where"),
    [
        (MANY, a_token_is_likelier, "token 2"), (MANY, half_the_tokens_are_likelier, "token 3"),
        (MANY, answers_end_early, "length"), (30, tokens_repeat, "first 2"), (8, tokens_repeat, "whole"),
    ],
)  # fmt: skip
def test_what_differs_is_found(tokens, changed, where):
    one, other = drawn(0, tokens=tokens), drawn(1, tokens=tokens)
    assert_same_distribution(one, other)
    with pytest.raises(AssertionError):
        assert_same_distribution(one, changed(other))
    assert compared(*([tuple(answer) for answer in pile] for pile in (one, changed(other))))[where] < 1e-5


@pytest.mark.parametrize("answers", [[], [(1, 2, 3)] * 100, [()] * 100, [(n,) for n in range(LEAST - 1)]])
def test_nothing_to_compare_fails(answers):
    with pytest.raises(AssertionError, match="decides nothing"):
        assert_same_distribution(answers, answers)


def test_every_outcome_is_in_a_cell_of_some_mass():
    one, other = dict.fromkeys(range(700), 1), dict.fromkeys(range(350, 1000), 1) | {"often": 40, "seldom": 2}
    rows = table(one, other)
    assert [sum(row) for row in rows] == [700, 692]
    assert min(map(sum, zip(*rows))) >= LEAST
    assert CELLS - 5 <= len(rows[0]) <= CELLS + 1

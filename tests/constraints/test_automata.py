"""Automata operations against brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.automata import Dfa
from ninfer.constraints.chars import ANY, complement, contains, intersection, normalise, union
from ninfer.constraints.limits import Work
from ninfer.constraints.regex import parse
from ninfer.errors import ConstraintLimit

WORDS = ["".join(w) for n in range(6) for w in itertools.product("ab<", repeat=n)]


def regex(pattern: str) -> Dfa:
    return Dfa.from_regex(parse(pattern), search=False)


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x110000)), max_size=5), st.integers(0, 0x10FFFF))
def test_sets_are_boolean(ranges, code):
    a = normalise((low, high) for low, high in ranges if low < high)
    b = normalise([(0x61, 0x7B)])
    scalar = contains(ANY, code)
    assert contains(complement(a), code) == (scalar and not contains(a, code))
    assert contains(union(a, b), code) == (contains(a, code) or contains(b, code))
    assert contains(intersection(a, b), code) == (contains(a, code) and contains(b, code))
    assert complement(complement(a)) == a


@given(low=st.integers(0, 4), extra=st.one_of(st.none(), st.integers(-1, 3)))
def test_length(low, extra):
    high = None if extra is None else low + extra
    machine = Dfa.length(low, high)
    for word in WORDS:
        assert machine.accepts(word) == (low <= len(word) and (high is None or len(word) <= high))


@given(word=st.text("ab<", min_size=1, max_size=4))
def test_without(word):
    machine = Dfa.without(word)
    for text in WORDS:
        assert machine.accepts(text) == (word not in text)


@given(
    parts=st.lists(
        st.sampled_from(["a*b", "(ab|a)*", ".*<.*", "[^<]*", "a{1,3}", "(a|b|<){2,4}"]), min_size=1, max_size=3
    )
)
def test_product_is_intersection_and_minimal(parts):
    machines = [regex(p) for p in parts]
    both = machines[0].product(*machines[1:])
    small = both.minimise()
    for word in WORDS:
        assert both.accepts(word) == small.accepts(word) == all(m.accepts(word) for m in machines)
    # Minimal: no two states accept the same suffixes.
    futures = set()
    for state in range(len(small.trans)):
        row = []
        for word in WORDS:
            at = state
            for char in word:
                at = -1 if at == -1 else small.step(at, ord(char))
            row.append(at != -1 and bool(small.accept[at]))
        futures.add(tuple(row))
    assert len(futures) == len(small.trans)


def test_edges_cover_the_row():
    machine = regex("[a-c]x|b")
    edges = dict(machine.edges(0))
    assert sorted(r for ranges in edges.values() for r in ranges) == [(0x61, 0x62), (0x62, 0x63), (0x63, 0x64)]


def test_empty_language_and_limits():
    nothing = regex("a").product(regex("b"))
    assert nothing.empty
    assert not nothing.accepts("")
    assert nothing.product(regex("a")).empty
    with pytest.raises(ConstraintLimit):
        Dfa.length(0, 40).product(regex(".*a.{9}"), limit=100)
    with pytest.raises(ConstraintLimit):
        regex("(a|b)*a(a|b){12}").minimise(Work(1000))


def test_no_surrogate_is_ever_accepted():
    for machine in (regex("."), regex("[^a]"), Dfa.length(1, 1), Dfa.without("ab")):
        assert not machine.accepts("\ud800")

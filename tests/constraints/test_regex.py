"""The ECMAScript subset: refusals with their offsets, and languages against Python's own engine."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.automata import Dfa
from ninfer.constraints.limits import MAX_REPEAT
from ninfer.constraints.regex import parse
from ninfer.errors import ConstraintLimit, InvalidRegex


def full(pattern: str) -> Dfa:
    return Dfa.from_regex(parse(pattern), search=False)


@pytest.mark.parametrize(
    ("pattern", "offset"),
    [
        (r"(a)\1", 3), ("(?=a)", 0), ("(?<!a)b", 0), (r"\bx", 0), (r"\p{L}", 0), ("(?i)a", 0), ("a^b", 1), (r"\q", 0),
        (r"\ud83d\ude00", 0), ("[z-a]", 1), ("a{3,1}", 1), ("a**", 2), ("(", 0), ("[]", 0), ("[^]", 0), ("*a", 0),
        ("a)", 1), ("[a", 0), ("a{", 1), ("a{x}", 1), ("{2}", 0), ("a}", 1), ("a]", 1), (r"\u{61}", 0), (r"\u12", 0),
        (r"[\d-z]", 1), ("(a$)", 2), ("(^a)", 1), ("a$b", 1), ("a{8193}", 1), ("a{99999999999999999999}", 1),
        ("(?<=a)", 0), ("(?<1>a)", 0), ("a+?*", 3), ("\ud800", 0), ("ab\\", 2), (r"\01", 0), (r"[\s\S]x[^\s\S]", 7),
    ],
)  # fmt: skip
def test_refusals_name_the_offset(pattern, offset):
    with pytest.raises(InvalidRegex) as error:
        parse(pattern)
    assert error.value.offset == offset


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", [""], ["a"]),
        ("a.b", ["axb", "a😀b"], ["a\nb", "a\u2028b", "ab"]),
        (r"\d+", ["19"], ["\u0661", ""]),
        (r"\w", ["_", "Z"], ["é", "-"]),
        (r"\s", ["\u3000", "\ufeff", "\t", "\u00a0"], ["a", "\u200b"]),
        (r"\S\D\W", ["ax-"], ["a1-", " x-"]),
        ("^a$|^b$", ["a", "b"], ["ab"]),
        ("a{2,3}?", ["aa", "aaa"], ["a", "aaaa"]),
        ("x(?:yz*)?", ["x", "xy", "xyzz"], ["xz"]),
        ("[^a]", ["é", "\n"], ["a", ""]),
        (r"\x41\u4e2d\/\-", ["A中/-"], ["A中/"]),
        ("(?<n>a|)(|b){2}", ["", "a", "bb", "ab"], ["bbb", "ba"]),
        (r"[\]\\a-c-]", ["]", "\\", "b", "-"], ["d"]),
        (r"\cJ\0\t", ["\n\0\t"], ["J0t"]),
        ("[a-]", ["a", "-"], ["b"]),
        ("a{0}b{2,}", ["bb", "bbbb"], ["b", "abb"]),
    ],
)
def test_full_match(pattern, yes, no):
    machine = full(pattern)
    assert all(machine.accepts(text) for text in yes)
    assert not any(machine.accepts(text) for text in no)


def test_search_matches_inside_unless_anchored():
    for pattern, yes, no in [("b", "abc", "ac"), ("^a|b$", "ax", "xa"), ("^a|b$", "xb", "bx"), ("", "anything", None)]:
        machine = Dfa.from_regex(parse(pattern), search=True)
        assert machine.accepts(yes)
        assert no is None or not machine.accepts(no)


atoms = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", "1", "(?:ab|c)", "(a|)", "(?:b)"])
quantified = st.builds(str.__add__, atoms, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "??"]))
sequences = st.lists(quantified, max_size=4).map("".join)
nested = st.builds("({}){}".format, sequences, st.sampled_from(["", "*", "?", "{2}"]))
alternatives = st.builds(
    "{}{}{}".format, st.sampled_from(["", "^"]), st.lists(st.one_of(sequences, nested), max_size=3).map("".join),
    st.sampled_from(["", "$"]),
)  # fmt: skip
patterns = st.lists(alternatives, min_size=1, max_size=3).map("|".join)
texts = st.lists(st.text("abc1", max_size=7), min_size=1, max_size=12)


@given(pattern=patterns, candidates=texts, search=st.booleans())
def test_language_equals_pythons(pattern, candidates, search):
    machine = Dfa.from_regex(parse(pattern), search=search)
    small = machine.minimise()
    assert len(small.trans) <= len(machine.trans)
    # `$` of Python also matches before a final newline; the texts hold none.
    match = re.compile(pattern).search if search else re.compile(f"(?:{pattern})").fullmatch
    for text in candidates:
        assert machine.accepts(text) == small.accepts(text) == bool(match(text)), (pattern, text)


def test_counts_up_to_the_limit_are_exact_and_expansions_are_bounded():
    machine = full(f"a{{{MAX_REPEAT}}}")
    assert machine.accepts("a" * MAX_REPEAT)
    assert not machine.accepts("a" * (MAX_REPEAT - 1))
    with pytest.raises(ConstraintLimit):
        full("(?:(?:a{1000}){1000}){1000}")
    with pytest.raises(ConstraintLimit):
        Dfa.from_regex(parse("a.{20}b"), search=True).product(Dfa.from_regex(parse("b.{21}a"), search=True))

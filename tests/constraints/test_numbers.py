"""Number grammars against the definition, checked with Decimal and binary64 on texts near every bound."""

from __future__ import annotations

import math
import re
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ninfer.constraints.ir import Grammar
from ninfer.constraints.numbers import Bounds, integer, number
from ninfer.constraints.recognise import Machine


def machine(node):
    return Machine(Grammar({"root": node}))


def is_integer(text: str) -> bool:
    return bool(re.fullmatch(r"0|-?[1-9][0-9]*", text)) and -(2**63) <= int(text) < 2**63


def is_number(text: str, bounds: Bounds) -> bool:
    """The definition, independent of the grammar."""
    if re.fullmatch(r"-?[0-9]+", text):
        return is_integer(text) and bounds.holds(Decimal(text))
    plain = re.fullmatch(r"(-?)(0|[1-9][0-9]*)\.([0-9]+)", text)
    scientific = re.fullmatch(r"(-?)([1-9])(?:\.([0-9]+))?[eE][+-]?(0|[1-9][0-9]*)", text)
    if not plain and not scientific:
        return False
    value = Decimal(text)
    digits = re.sub(r"[eE].*|[-.]", "", text).lstrip("0")
    if plain and not value:
        return not plain[1] and len(plain[3]) <= 17 and bounds.holds(value)
    if len(digits) > 17 or (plain and not Decimal("1e-7") <= abs(value) < Decimal("1e17")):
        return False
    parsed = float(text)
    if not math.isfinite(parsed) or parsed == 0:
        return False
    return bounds.holds(value) and bounds.holds(Decimal(repr(parsed)))


@pytest.mark.parametrize(
    ("bounds", "yes", "no"),
    [
        ((0, 10), "0 10", "-1 11 5.0 1e1 -0 007"),
        (("0.5", "10.7"), "1 10", "0 11"),
        ((None, None), "9223372036854775807 -9223372036854775808 0", "9223372036854775808 -9223372036854775809 -0 +1"),
        ((-105, -7), "-7 -105 -99 -10", "-6 -106 7 -07"),
        ((5, 3), "", "3 4 5"),
        (("0.2", "0.8"), "", "0 1"),
        ((9223372036854775808, None), "", "9223372036854775808"),
    ],
)
def test_integers(bounds, yes, no):
    low, high = (None if b is None else Decimal(b) for b in bounds)
    m = machine(integer(Bounds(low, False, high, False)))
    assert [t for t in yes.split() if not m.accepts(t)] == []
    assert [t for t in no.split() if m.accepts(t)] == []


def test_integers_exclusive():
    m = machine(integer(Bounds(Decimal(0), True, Decimal(3), True)))
    assert [t for t in ["-1", "0", "1", "2", "3", "4"] if m.accepts(t)] == ["1", "2"]


@pytest.mark.parametrize(
    ("bounds", "yes", "no"),
    [
        (
            Bounds(Decimal(0), False, Decimal(1), False),
            "0 1 0.5 1e-3 5E-1 1.0 0.0 1e-300",
            "1.5 -0.1 1.0000001 1e1 -0.0",
        ),
        (Bounds(Decimal(0), True, Decimal(1), True), "0.9999999999999999 5e-324", "0.0 1e-400 0.99999999999999999 1.0"),
        (Bounds(Decimal("1e300")), "1e300 1.5e300 1e+300", "9e299 1e309 1"),
        (
            Bounds(Decimal("0.1"), False, Decimal("0.3"), False),
            "0.1 0.3 0.2999",
            "0.30000000000000001 0.31 0.123456789012345678",
        ),
        (
            Bounds(Decimal(9007199254740993)),
            "9007199254740993 9007199254740994.0",
            "9007199254740993.0 9007199254740992",
        ),
        (Bounds(), "-1.5e3 0 1.7976931348623157e308 1e0 1e-0", "01 1. -0 1e400 1.8e308 1e05 .5 0e1 2e-324"),
    ],
)
def test_numbers(bounds, yes, no):
    m = machine(number(bounds))
    assert [t for t in yes.split() if not m.accepts(t)] == []
    assert [t for t in no.split() if m.accepts(t)] == []


def near(x: float) -> list[float]:
    return [x, math.nextafter(x, math.inf), math.nextafter(x, -math.inf), x / 2, -x, x * 1.5]


spellings = st.sampled_from(
    ["{!r}", "{:.17g}", "{:.16e}", "{:.3e}", "{:.1f}", "{:.17f}", "{:.0f}", "{:.18g}", "{:.16g}"]
)
magnitudes = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1000, 1000),
    st.sampled_from(
        [0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 1e17, 1e16, 1e-7, 1.0, 0.1, 0.3, 2.0**53]
    ),
)


def clean(text: str) -> str:
    return re.sub(r"([eE][+-]?)0+(?=[0-9])", r"\1", text)


@given(
    ends=st.tuples(st.one_of(st.none(), magnitudes), st.one_of(st.none(), magnitudes)),
    opens=st.tuples(st.booleans(), st.booleans()),
    spelling=spellings,
    other=magnitudes,
)
@example(ends=(5e-324, None), opens=(True, False), spelling="{!r}", other=1.0)
@example(ends=(None, 1.7976931348623157e308), opens=(False, True), spelling="{:.17g}", other=1.0)
def test_texts_near_the_bounds_follow_the_definition(ends, opens, spelling, other):
    low, high = (None if e is None else Decimal(repr(e)) for e in ends)
    if low is not None and high is not None and low > high:
        low, high = high, low
    bounds = Bounds(low, opens[0], high, opens[1])
    m = machine(number(bounds))
    for base in (*ends, other):
        if base is None:
            continue
        for value in near(base):
            if not math.isfinite(value):
                continue
            text = clean(spelling.format(value))
            for candidate in (text, text.replace("e", "E"), text.rstrip("0"), text + "0"):
                assert m.accepts(candidate) == is_number(candidate, bounds), (candidate, bounds)


@given(low=st.integers(-1200, 1200), size=st.integers(-2, 400))
def test_integer_ranges_are_exact(low, size):
    m = machine(integer(Bounds(Decimal(low), False, Decimal(low + size), False)))
    for n in {low - 1, low, low + 1, low + size - 1, low + size, low + size + 1, 0, -low, low * 10}:
        assert m.accepts(str(n)) == (low <= n <= low + size)

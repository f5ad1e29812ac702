"""Grammars of the integers and numbers inside exact bounds.

Integers are int64, written canonically. A number is such an integer, or a decimal of at most 17 significant digits that
a binary64 can hold: plain (with a fraction) for 0 and 1e-7 <= |x| < 1e17, scientific for every finite magnitude. Bounds
hold for the decimal as written and for what a reader prints after parsing it to binary64, so the decimals are cut where
rounding would cross a bound. Bounds are compared digit by digit; nothing is enumerated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from functools import lru_cache

from ninfer.constraints.chars import normalise
from ninfer.constraints.ir import EMPTY, NOTHING, Class, Lit, Node, Rep, alt, optional, seq

INT64 = (-(2**63), 2**63 - 1)
DIGITS = 17
PLAIN_EXPONENTS = range(-7, 17)

_EXACT = Context(prec=2500, Emin=-9999, Emax=9999)
_SMALLEST = 5e-324
_LARGEST = 1.7976931348623157e308


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval of reals; None is unbounded."""

    low: Decimal | None = None
    low_open: bool = False
    high: Decimal | None = None
    high_open: bool = False

    @property
    def empty(self) -> bool:
        """Whether no real number lies inside."""
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def holds(self, x: Decimal) -> bool:
        above = self.low is None or x > self.low or (x == self.low and not self.low_open)
        return above and (self.high is None or x < self.high or (x == self.high and not self.high_open))

    def mirrored(self) -> Bounds:
        """The interval of the negated numbers."""
        return Bounds(
            None if self.high is None else -self.high,
            self.high_open,
            None if self.low is None else -self.low,
            self.low_open,
        )

    def met(self, other: Bounds) -> Bounds:
        """The numbers inside both intervals."""
        lows = [(x.low, x.low_open) for x in (self, other) if x.low is not None]
        highs = [(-x.high, x.high_open) for x in (self, other) if x.high is not None]
        low, low_open = max(lows, default=(None, False))
        high, high_open = max(highs, default=(None, False))
        return Bounds(low, low_open, None if high is None else -high, high_open)

    def whole(self) -> tuple[int | None, int | None]:
        """The first and last integer inside, None where unbounded; the first is larger when there is none."""
        low = high = None
        if self.low is not None:
            low = math.floor(self.low) + 1 if self.low_open else math.ceil(self.low)
        if self.high is not None:
            high = math.ceil(self.high) - 1 if self.high_open else math.floor(self.high)
        return low, high

    def integers(self) -> tuple[int, int]:
        """The first and last int64 inside; the first is larger when there is none."""
        low, high = self.whole()
        return (
            INT64[0] if low is None else max(low, INT64[0]),
            INT64[1] if high is None else min(high, INT64[1]),
        )  # fmt: skip


@lru_cache(maxsize=64)
def integer(bounds: Bounds) -> Node:
    """The canonical int64 texts inside the bounds."""
    low, high = bounds.integers()
    options: list[Node] = []
    if low < 0:
        options.append(seq("-", naturals(max(1, -high), -low)))
    options.append(naturals(max(0, low), high))
    return alt(options)


@lru_cache(maxsize=64)
def number(bounds: Bounds) -> Node:
    """The integer and decimal texts inside the bounds."""
    options = [integer(bounds)]
    if bounds.holds(Decimal(0)):
        options.append(seq("0.", Rep(Lit("0"), 1, DIGITS)))
    options.append(_positive(bounds))
    options.append(seq("-", _positive(bounds.mirrored())))
    return alt(options)


# -- integers


def _digit(low: int, high: int) -> Node:
    return Lit(str(low)) if low == high else Class(normalise([(0x30 + low, 0x31 + high)]))


def _digits(count: int) -> Node:
    return Rep(_digit(0, 9), count, count) if count else EMPTY


def naturals(low: int, high: int) -> Node:
    """The decimal texts of ``low..high``, both >= 0."""
    options: list[Node] = [Lit("0")] if low == 0 <= high else []
    low = max(low, 1)
    lengths = range(len(str(low)), len(str(max(high, 0))) + 1)
    # Lengths of which every number lies inside are one alternative together.
    full = [n for n in lengths if low <= 10 ** (n - 1) and 10**n - 1 <= high]
    if full:
        options.append(seq(_digit(1, 9), Rep(_digit(0, 9), full[0] - 1, full[-1] - 1)))
    for length in lengths:
        first, last = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        if length not in full and first <= last:
            options.append(_fixed(str(first), str(last), tight_low=True, tight_high=True))
    return alt(options)


def _fixed(low: str, high: str, *, tight_low: bool, tight_high: bool) -> Node:
    """Digit strings of one length between two of the same length; a side that is not tight does not bind."""
    tight_low = tight_low and bool(low.strip("0"))
    tight_high = tight_high and bool(high.strip("9"))
    if not low or not (tight_low or tight_high):
        return _digits(len(low))
    first, last = (int(low[0]) if tight_low else 0), (int(high[0]) if tight_high else 9)
    options = []
    if first == last:
        return seq(
            low[0] if tight_low else high[0], _fixed(low[1:], high[1:], tight_low=tight_low, tight_high=tight_high)
        )
    if tight_low:
        options.append(seq(low[0], _fixed(low[1:], high[1:], tight_low=True, tight_high=False)))
        first += 1
    if tight_high:
        options.append(seq(high[0], _fixed(low[1:], high[1:], tight_low=False, tight_high=True)))
        last -= 1
    if first <= last:
        options.append(seq(_digit(first, last), _digits(len(low) - 1)))
    return alt(options)


# -- decimals


def _positive(bounds: Bounds) -> Node:
    """Plain and scientific texts of positive decimals inside the bounds."""
    ends = _decimal_ends(bounds)
    if ends is None:
        return NOTHING
    (low_exponent, low), (high_exponent, high) = ends
    options: list[Node] = []
    for exponent in PLAIN_EXPONENTS:
        if low_exponent <= exponent <= high_exponent:
            options.append(
                _plain(exponent, low if exponent == low_exponent else None, high if exponent == high_exponent else None)
            )
    if low_exponent == high_exponent:
        options.append(seq(_mantissa(low, high), _exponent(low_exponent, high_exponent)))
    else:
        options.append(seq(_mantissa(low, None), _exponent(low_exponent, low_exponent)))
        options.append(seq(_mantissa(None, high), _exponent(high_exponent, high_exponent)))
        if low_exponent + 1 < high_exponent:
            options.append(seq(_mantissa(None, None), _exponent(low_exponent + 1, high_exponent - 1)))
    return alt(options)


def _exponent(low: int, high: int) -> Node:
    e = Class(normalise([(0x45, 0x46), (0x65, 0x66)]))
    options = []
    if high >= 0:
        options.append(seq(optional("+"), naturals(max(0, low), high)))
    if low <= 0:
        options.append(seq("-", naturals(max(0, -high), -low)))
    return seq(e, alt(options))


def _plain(exponent: int, low: str | None, high: str | None) -> Node:
    """``int.frac`` texts whose first significant digit stands at ``10**exponent``."""
    if exponent < 0:
        return seq("0." + "0" * (-exponent - 1), _significant(low, high, point=0, least=1))
    if exponent + 1 >= DIGITS:
        return NOTHING
    return _significant(low, high, point=exponent + 1, least=exponent + 2)


def _mantissa(low: str | None, high: str | None) -> Node:
    """``d`` or ``d.ddd``."""
    return _significant(low, high, point=1, least=1)


def _significant(low: str | None, high: str | None, *, point: int, least: int) -> Node:
    """Digits of a fraction d1d2d3..., d1 not 0, at least ``least`` and at most DIGITS of them, between two bounds of
    DIGITS digits; a point stands before digit ``point`` (0: none is written)."""

    def tail(at: int, low: str | None, high: str | None) -> Node:
        options: list[Node] = []
        # Ending here means that all further digits are 0, which a lower bound may not allow.
        if at >= least and not (low and low[at:].strip("0")):
            options.append(EMPTY)
        if at < DIGITS:
            more = following(at, low, high)
            options.append(seq(".", more) if point and at == point else more)
        return alt(options)

    def following(at: int, low: str | None, high: str | None) -> Node:
        if at and low and not low[at:].strip("0"):
            low = None
        if high and not high[at:].strip("9"):
            high = None
        first = int(low[at]) if low else int(at == 0)
        last = int(high[at]) if high else 9
        options: list[Node] = []
        if low and high and first == last:
            return seq(low[at], tail(at + 1, low, high))
        if low:
            options.append(seq(low[at], tail(at + 1, low, None)))
            first += 1
        if high:
            options.append(seq(high[at], tail(at + 1, None, high)))
            last -= 1
        if first <= last:
            options.append(seq(_digit(first, last), free(at + 1)))
        return alt(options)

    def free(at: int) -> Node:
        if not point or at > point:
            return Rep(_digit(0, 9), max(0, least - at), DIGITS - at)
        fraction = seq(".", Rep(_digit(0, 9), max(1, least - point), DIGITS - point))
        return seq(_digits(point - at), optional(fraction) if point >= least else fraction)

    return following(0, low, high)


# -- where rounding to binary64 cuts the decimals

End = tuple[int, str]
"""A decimal of DIGITS significant digits: its exponent (of the first digit) and the digits."""


def _decimal_ends(bounds: Bounds) -> tuple[End, End] | None:
    """The smallest and largest positive DIGITS-digit decimals that satisfy the bounds before and after rounding."""
    with localcontext(_EXACT):
        low, high = _double_ends(bounds)
        if low is None or high is None or low > high:
            return None
        below, above = math.nextafter(low, 0.0), math.nextafter(high, math.inf)
        middle_low = (Decimal(below) + Decimal(low)) / 2
        # Beyond the largest double lies 2**1024, which has no binary64 of its own.
        beyond = Decimal(2) ** 1024 if math.isinf(above) else Decimal(above)
        middle_high = (Decimal(high) + beyond) / 2
        least = _inward(middle_low, not _even(low), up=True)
        most = _inward(middle_high, not _even(high), up=False)
        if bounds.low is not None and bounds.low > 0:
            least = max(least, _inward(bounds.low, bounds.low_open, up=True))
        if bounds.high is not None:
            most = min(most, _inward(bounds.high, bounds.high_open, up=False))
        return (_end(least), _end(most)) if least <= most else None


def _double_ends(bounds: Bounds) -> tuple[float | None, float | None]:
    """The smallest and largest positive doubles whose shortest decimal satisfies the bounds."""
    if bounds.high is not None and bounds.high <= 0:
        return None, None
    low = _SMALLEST
    if bounds.low is not None and bounds.low > 0:
        low = _near(bounds.low)
        low = math.nextafter(math.nextafter(low, 0.0), 0.0) or _SMALLEST
        while not (bounds.low < _shown(low) or (bounds.low == _shown(low) and not bounds.low_open)):
            low = math.nextafter(low, math.inf)
            if math.isinf(low):
                return None, None
    high = _LARGEST
    if bounds.high is not None:
        high = min(math.nextafter(math.nextafter(_near(bounds.high), math.inf), math.inf), _LARGEST)
        while not (bounds.high > _shown(high) or (bounds.high == _shown(high) and not bounds.high_open)):
            high = math.nextafter(high, 0.0)
            if high == 0.0:
                return None, None
    return low, high


def _near(x: Decimal) -> float:
    """The double nearest to a positive decimal, kept finite and positive."""
    return min(max(float(x), _SMALLEST), _LARGEST)


def _shown(x: float) -> Decimal:
    """What a reader prints: the shortest decimal that parses to the same double."""
    return Decimal(repr(x))


def _even(x: float) -> bool:
    """Whether ties round to this double."""
    mantissa, _ = math.frexp(x)
    if x >= 2.2250738585072014e-308:
        return int(mantissa * 2**53) % 2 == 0
    return int(x / _SMALLEST) % 2 == 0


def _inward(x: Decimal, open_end: bool, *, up: bool) -> Decimal:
    """The nearest DIGITS-digit decimal inside an end: at or above it, or at or below it; strictly where open."""
    context = Context(prec=DIGITS, rounding=ROUND_CEILING if up else ROUND_FLOOR, Emin=-9999, Emax=9999)
    rounded = context.plus(x)
    if open_end and rounded == x:
        rounded = context.next_plus(x) if up else context.next_minus(x)
    return rounded


def _end(x: Decimal) -> End:
    digits = "".join(map(str, x.as_tuple().digits)).lstrip("0")
    return x.adjusted(), digits.ljust(DIGITS, "0")[:DIGITS]

"""Sets of JSON values as unions of branches, each about one JSON type, closed under intersection.

What a branch says about the values inside it (members, items) stays a list of schemas that must all hold, each affirmed
or denied; nothing is expanded until it is needed. So recursive schemas stay finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ninfer.constraints.numbers import Bounds
from ninfer.constraints.schema import NEVER, Schema
from ninfer.constraints.source import Json

_T = TypeVar("_T")
_UNBOUNDED = Bounds()


@dataclass(frozen=True, slots=True)
class Claim:
    """A schema affirmed, or denied."""

    schema: Schema
    holds: bool = True

    @property
    def hopeless(self) -> bool:
        """Whether it plainly allows no value."""
        return self.holds and self.schema.boolean is False


Claims = tuple[Claim, ...]
"""Claims that must all hold; none of them allows any value."""

NOTHING: Claims = (Claim(NEVER),)


def both(*groups: Claims) -> Claims:
    """The claims of all groups, each once, without those that say nothing."""
    merged = dict.fromkeys(c for group in groups for c in group if not (c.holds and c.schema.trivial))
    return tuple(merged)


def place(claims: Claims, keyword: str = "") -> str:
    """Where the latest of the claims stands, or the latest that has the keyword itself."""
    for claim in reversed(claims):
        if keyword in claim.schema.keywords:
            return claim.schema.at(keyword)
    return claims[-1].schema.pointer if claims else ""


@dataclass(frozen=True, slots=True)
class Finite:
    """Exactly these values, of any types."""

    values: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Numeric:
    """Numbers inside bounds; with ``integral`` only integers; multiples of ``divisor``."""

    bounds: Bounds = _UNBOUNDED
    integral: bool = False
    divisor: int = 1
    kind = "number"

    @property
    def empty(self) -> bool:
        """Whether no number at all lies inside."""
        if not self.integral or self.bounds.empty:
            return self.bounds.empty
        low, high = self.bounds.whole()
        return low is not None and high is not None and -(-low // self.divisor) * self.divisor > high


@dataclass(frozen=True, slots=True)
class Text:
    """A property of strings: a pattern that matches somewhere, or a format; or that it does not."""

    keyword: str
    value: str
    holds: bool
    place: Json = field(compare=False)

    def __invert__(self) -> Text:
        return Text(self.keyword, self.value, not self.holds, self.place)


@dataclass(frozen=True, slots=True)
class Textual:
    """Strings of ``low`` to ``high`` characters with all the properties, and not among the banned."""

    low: int = 0
    high: int | None = None
    texts: tuple[Text, ...] = ()
    banned: frozenset[str] = frozenset()
    kind = "string"

    @property
    def empty(self) -> bool:
        return self.high is not None and self.low > self.high


@dataclass(frozen=True, slots=True)
class Listed:
    """Arrays of ``low`` to ``high`` items: claims for the first positions, then ``tail`` for each further one.
    ``unique`` says that no two items are equal."""

    prefix: tuple[Claims, ...] = ()
    tail: Claims = ()
    low: int = 0
    high: int | None = None
    unique: bool = False
    kind = "array"

    def item(self, index: int) -> Claims:
        return self.prefix[index] if index < len(self.prefix) else self.tail

    @property
    def empty(self) -> bool:
        return self.high is not None and self.low > self.high


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """What one schema says about an object's members: the declared ones, those whose names match a pattern, and the
    others."""

    declared: dict[str, Claims]
    patterns: tuple[tuple[Text, Claims], ...]
    others: Claims


@dataclass(frozen=True, slots=True)
class Keyed:
    """Objects whose every member satisfies every one of ``names``, with the required members (names and where they are
    required), and ``low`` to ``high`` members."""

    names: tuple[Names, ...] = ()
    required: tuple[tuple[str, Json], ...] = ()
    low: int = 0
    high: int | None = None
    kind = "object"

    @property
    def empty(self) -> bool:
        return self.high is not None and max(self.low, len(self.required)) > self.high


@dataclass(frozen=True, slots=True)
class Opaque:
    """Values of one type that satisfy a claim no branch can express, and belong to the branch ``inside`` if given."""

    kind: str
    claim: Claim
    keyword: str
    inside: Typed | None = None


Typed = Numeric | Textual | Listed | Keyed | Opaque
Branch = Finite | Typed


def met(a: Typed, b: Typed) -> Typed | None:
    """The values of both branches; None when their assertions leave none. Neither is finite."""
    if a.kind != b.kind:
        return None
    if isinstance(a, Opaque):
        inside = b if a.inside is None else met(a.inside, b)
        return None if inside is None else Opaque(a.kind, a.claim, a.keyword, inside)
    if isinstance(b, Opaque):
        return met(b, a)
    merged: Numeric | Textual | Listed | Keyed
    if isinstance(a, Numeric):
        assert isinstance(b, Numeric)
        merged = Numeric(a.bounds.met(b.bounds), a.integral or b.integral, math.lcm(a.divisor, b.divisor))
    elif isinstance(a, Textual):
        assert isinstance(b, Textual)
        merged = Textual(
            max(a.low, b.low), _least(a.high, b.high), _once((*a.texts, *b.texts)), a.banned | b.banned
        )  # fmt: skip
    elif isinstance(a, Listed):
        assert isinstance(b, Listed)
        positions = range(max(len(a.prefix), len(b.prefix)))
        merged = Listed(
            tuple(both(a.item(i), b.item(i)) for i in positions), both(a.tail, b.tail),
            max(a.low, b.low), _least(a.high, b.high), a.unique or b.unique,
        )  # fmt: skip
    else:
        assert isinstance(b, Keyed)
        required = tuple({**dict(b.required), **dict(a.required)}.items())
        merged = Keyed(_once((*a.names, *b.names)), required, max(a.low, b.low), _least(a.high, b.high))
    return None if merged.empty else merged


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _once(items: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(items))

"""What a pushdown reading is made of: stacks, what a state reads, the points in between, and their masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer.constraints.chars import Ranges, union
from ninfer.constraints.content import Content
from ninfer.constraints.content import State as Inner
from ninfer.constraints.ir import Tok
from ninfer.constraints.recognise import State
from ninfer.constraints.tokentrie import Bits
from ninfer.errors import InvariantError

FEW = 64
"""Sets of no more than these are looked at one by one."""


States = frozenset[State]
"""Points of one rule, or of rules it ends with, that are reached together."""


@dataclass(frozen=True, slots=True, eq=False)
class Return:
    """Where to go on when a rule ends. Equal ones are one object."""

    states: States
    below: Return | None


HOLE = Return(frozenset(), None)
"""Below a rule that is read whatever called it."""

NO_TOKENS: Mapping[int, States] = {}


@dataclass(slots=True, eq=False)
class Reader:
    """What some states read: single characters, wider sets, ids that are no text. ranges: all characters. run: the one
    text that can be read, up to a state."""

    single: Mapping[str, States]
    wide: tuple[tuple[Ranges, State], ...]
    tokens: Mapping[int, States]
    ranges: Ranges
    run: tuple[str, State] | None

    @classmethod
    def of(cls, states: States) -> Reader:
        single: dict[str, dict[State, None]] = {}
        tokens: dict[int, dict[State, None]] = {}
        wide = []
        for state in states:
            for ranges, target in state.chars:
                if sum(high - low for low, high in ranges) > FEW:
                    wide.append((ranges, target))
                    continue
                for low, high in ranges:
                    for code in range(low, high):
                        single.setdefault(chr(code), {})[target] = None
            for terminal, target in state.tokens:
                if not isinstance(terminal, Tok):
                    raise InvariantError("excluded tokens in a grammar of our own")
                for token in terminal.ids:
                    tokens.setdefault(token, {})[target] = None
        known: dict[States, States] = {}  # equal sets are one object

        def shared(targets: Iterable[State]) -> States:
            found = frozenset(targets)
            return known.setdefault(found, found)

        sets = [ranges for state in states for ranges, _ in state.chars]
        return cls(
            {char: shared(targets) for char, targets in single.items()}, tuple(wide),
            {token: shared(targets) for token, targets in tokens.items()} or NO_TOKENS,
            sets[0] if len(sets) == 1 else union(*sets), next(iter(states)).run if len(states) == 1 else None,
        )  # fmt: skip

    @property
    def targets(self) -> Iterator[States]:
        """The states behind whatever is read."""
        yield from self.single.values()
        yield from self.tokens.values()
        yield from (frozenset((target,)) for _, target in self.wide)

    def read(self, char: str) -> States | None:
        """The states behind a character."""
        found = self.single.get(char)
        if self.wide:
            code = ord(char)
            more = [target for ranges, target in self.wide if any(a <= code < b for a, b in ranges)]
            if more:
                return (found or frozenset()).union(more)
        return found


@dataclass(slots=True, eq=False)
class Spread:
    """What is reached from some states without reading: what reads, calls (rule start, states behind), whole strings;
    and whether the rule may end."""

    reader: Reader | None = None
    calls: tuple[tuple[States, States], ...] = ()
    strings: tuple[tuple[Content, States], ...] = ()
    ends: bool = False


Plain = tuple[Reader, Return | None]
Entry = tuple[States, Return | None]
String = tuple[Content, Inner, States, Return | None]


@dataclass(slots=True, eq=False)
class Point:
    """All the ways to go on. complete: the text may end here. leaves: the rule may, whose caller is not known."""

    plain: tuple[Plain, ...]
    strings: tuple[String, ...]
    complete: bool
    leaves: bool = False
    after: dict[str | int, Point | None] = field(default_factory=dict)
    """What follows a character, or a token that is no text; None: it cannot come."""
    mask: Mask | None = None
    within: dict[bytes, Mask] | None = None
    """Masks by the bytes of an unfinished character already read."""
    first: frozenset[str] | None = None
    """The characters that may come first."""
    texts: tuple[int, ...] | None = None
    """Places of the tokens that can be read."""
    endings: dict[str, npt.NDArray[np.bool_]] | None = None
    """Which endings of tokens can be read, by their first character. Like the masks, these are known once asked for."""


UNKNOWN = Point((), (), False)


@dataclass(frozen=True, slots=True)
class Mask:
    """Legal tokens: those that stay inside strings, whose masks are kept elsewhere, and single words of others. some:
    whether there is one."""

    inside: tuple[tuple[Content, Inner, frozenset[str]], ...]
    places: npt.NDArray[np.intp]
    words: Bits
    some: bool

    @classmethod
    def of(cls, inside: list[tuple[Content, Inner, frozenset[str]]], tokens: list[int]) -> Mask:
        words: dict[int, int] = {}
        for token in tokens:
            words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
        some = bool(words) or any(content.inside(inner, follow).bits.any() for content, inner, follow in inside)
        return cls(tuple(inside), np.array(list(words), np.intp), np.array(list(words.values()), np.uint32), some)

    def write(self, out: Bits) -> None:
        if not self.inside:
            out[:] = 0
        for i, (content, inner, follow) in enumerate(self.inside):
            bits = content.inside(inner, follow).bits
            if i == 0:
                out[:] = bits
            else:
                out |= bits
        out[self.places] |= self.words


def beyond_ascii(point: Point) -> bool:
    """Whether a character other than ASCII may come next."""
    return bool(point.strings) or any(bool(reader.ranges) and reader.ranges[-1][1] > 0x80 for reader, _ in point.plain)


def first_chars(point: Point) -> frozenset[str]:
    """The characters that may come first. Behind a string there are few."""
    if point.first is None:
        if point.strings or any(reader.wide for reader, _ in point.plain):
            raise InvariantError("a string is followed by what may be inside it")
        point.first = frozenset(char for reader, _ in point.plain for char in reader.single)
    return point.first

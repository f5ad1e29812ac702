"""What a pushdown reading is made of: stacks, what a state reads, the points in between, and their masks."""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True, eq=False)
class Return:
    """Where to go on when a rule ends. Equal ones are one object."""

    state: State
    below: Return | None


@dataclass(slots=True, eq=False)
class Reader:
    """What one state reads: single characters, wider sets, ids that are no text. ranges: all characters. run: the one
    text that can be read, up to a state."""

    single: dict[str, list[State]]
    wide: list[tuple[Ranges, State]]
    tokens: dict[int, list[State]]
    ranges: Ranges
    run: tuple[str, State] | None

    @classmethod
    def of(cls, state: State) -> Reader:
        sets = [ranges for ranges, _ in state.chars]
        reader = cls({}, [], {}, sets[0] if len(sets) == 1 else union(*sets), state.run)
        for ranges, target in state.chars:
            if sum(high - low for low, high in ranges) > FEW:
                reader.wide.append((ranges, target))
                continue
            for low, high in ranges:
                for code in range(low, high):
                    reader.single.setdefault(chr(code), []).append(target)
        for terminal, target in state.tokens:
            if not isinstance(terminal, Tok):
                raise InvariantError("excluded tokens in a grammar of our own")
            for token in terminal.ids:
                reader.tokens.setdefault(token, []).append(target)
        return reader

    @property
    def targets(self) -> Iterator[State]:
        """The states behind whatever is read."""
        yield from (target for _, target in self.wide)
        for reads in (self.single, self.tokens):
            for targets in reads.values():
                yield from targets

    def read(self, char: str) -> list[State]:
        """The states behind a character."""
        found = self.single.get(char, [])
        if self.wide:
            code = ord(char)
            found = found + [target for ranges, target in self.wide if any(a <= code < b for a, b in ranges)]
        return found


@dataclass(slots=True, eq=False)
class Spread:
    """What is reached from a state without reading: readers, calls (rule start, state behind), whole strings; and
    whether the rule may end."""

    readers: list[Reader] = field(default_factory=list)
    calls: list[tuple[State, State]] = field(default_factory=list)
    strings: list[tuple[Content, State]] = field(default_factory=list)
    ends: bool = False


Plain = tuple[Reader, Return | None]
Entry = tuple[State, Return | None]
String = tuple[Content, Inner, State, Return | None]


@dataclass(slots=True, eq=False)
class Point:
    """All the ways to go on. complete: the text may end here. leaves: the rule may, whose caller is not known."""

    plain: tuple[Plain, ...]
    strings: tuple[String, ...]
    complete: bool
    leaves: bool = False
    after: dict[str | int, Point | None] = field(default_factory=dict)
    """What follows a character, or a token that is no text; None: it cannot come."""
    first: frozenset[str] | None = None
    """The characters that may come first, where they were asked for."""
    texts: list[int] | None = None
    """Places of the tokens that can be read, where they were asked for."""
    endings: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    masks: dict[bytes, Mask] = field(default_factory=dict)
    """By the bytes of an unfinished character already read."""


UNKNOWN = Point((), (), False)


@dataclass(frozen=True, slots=True)
class Region:
    """What can be read in one rule: the places of whole texts, and the beginnings of texts behind which it may end."""

    places: list[int]
    exits: list[str]


@dataclass(frozen=True, slots=True)
class Mask:
    """Legal tokens: those that stay inside strings, whose masks are kept elsewhere, and single words of others."""

    inside: tuple[tuple[Content, Inner, frozenset[str]], ...]
    places: npt.NDArray[np.intp]
    words: Bits

    @classmethod
    def of(cls, inside: list[tuple[Content, Inner, frozenset[str]]], tokens: list[int]) -> Mask:
        words: dict[int, int] = {}
        for token in tokens:
            words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
        return cls(tuple(inside), np.array(list(words), np.intp), np.array(list(words.values()), np.uint32))

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

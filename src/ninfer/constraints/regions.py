"""Which texts can be read next, found in parts that do not depend on the stack.

A region is what can be read within one rule, whatever called it: whole texts, and the beginnings of texts behind which
the rule may end. Going on from there is the same question asked of the rule below. So what a value, a number or the
rest of an object may be is found once, not once for every place it occurs in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ninfer.constraints.lexicon import Lexicon
from ninfer.constraints.points import FEW, HOLE, Plain, Point, String, beyond_ascii
from ninfer.constraints.recognise import State

if TYPE_CHECKING:
    from ninfer.constraints.pushdown import Pushdown

Region = tuple[tuple[int, ...], tuple[str, ...]]
"""Places of texts in a lexicon, and the beginnings of texts behind which the rule may end."""


class Regions:
    """The regions of one language, remembered."""

    def __init__(self, language: Pushdown) -> None:
        self._language = language
        self._known: dict[object, Region] = {}

    def __len__(self) -> int:
        return len(self._known)

    def texts(self, entries: Iterable[Plain], lexicon: Lexicon) -> list[int]:
        """The places of the texts that can be read from any of some entries: within their rules, and behind them."""
        places: list[int] = []
        agenda: list[tuple[Plain | String, str]] = [(entry, "") for entry in entries]
        seen = set(agenda)
        for entry, prefix in agenda:
            *reads, below = entry
            found, exits = self.region(tuple(reads), lexicon, prefix)
            places += found
            if below is not None:
                for text in exits:
                    behind = self._language.behind(below.states, below.below)
                    ways: tuple[Plain | String, ...] = (*behind.plain, *behind.strings)
                    more = [(way, text) for way in ways if (way, text) not in seen]
                    seen.update(more)
                    agenda += more
        return places

    def region(self, reads: tuple[Any, ...], lexicon: Lexicon, prefix: str) -> Region:
        """What an entry reads of the texts behind a prefix, whatever its stack."""
        key = *reads, lexicon, prefix
        found = self._known.get(key)
        if found is None:
            entry = (*reads, HOLE)
            alone = self._language.point([entry], []) if len(entry) == 2 else self._language.point([], [entry])
            found = self._known[key] = self._explore(alone, lexicon, prefix)
        return found

    def _explore(self, point: Point, lexicon: Lexicon, prefix: str) -> Region:
        places: list[int] = []
        exits: list[str] = []
        first, last = lexicon.span(prefix)
        run = point.plain[0][0].run if len(point.plain) == 1 and not point.strings else None
        if run is not None or last - first > FEW:
            last = lexicon.exact(prefix) if prefix or beyond_ascii(point) else first
            further = self._run(*run, lexicon, prefix) if run else self._branches(point, lexicon, prefix)
            for found, left in further:
                places += found
                exits += left
        for place in range(first, last):
            text, at = lexicon.texts[place], point
            for end in range(len(prefix) + 1, len(text) + 1):
                following = self._language.follow(at, text[end - 1])
                if following is None:
                    break
                at = following
                if at.leaves:
                    exits.append(text[:end])
            else:
                if place not in lexicon.tails or self._language.admits(at, lexicon.tails[place]):
                    places.append(place)
        return tuple(places), tuple(text for text in dict.fromkeys(exits) if lexicon.goes_on(text))

    def _branches(self, point: Point, lexicon: Lexicon, prefix: str) -> Iterator[Region]:
        """By the next character."""
        chars, certain = self._readable(point, lexicon, prefix)
        for char in chars:
            first, last = lexicon.span(prefix + char)
            if first == last:
                continue
            if certain and not lexicon.goes_on(prefix + char):
                yield tuple(range(first, last)), ()
            elif following := self._language.follow(point, char):
                yield self._entered(following, lexicon, prefix + char)

    def _run(self, text: str, end: State, lexicon: Lexicon, prefix: str) -> Iterator[Region]:
        """Along a text that must come, and behind it."""
        for i in range(1, len(text)):
            read = prefix + text[:i]
            first, last = lexicon.span(read)
            if first == last:
                return
            exact = range(first, lexicon.exact(read))
            yield tuple(p for p in exact if text[i].encode().startswith(lexicon.tails.get(p, b""))), ()
        if lexicon.holds(prefix + text):
            yield self._entered(self._language.behind(frozenset((end,)), HOLE), lexicon, prefix + text)

    def _entered(self, point: Point, lexicon: Lexicon, prefix: str) -> Region:
        places, exits = self._explore(point, lexicon, prefix)
        return places, (prefix, *exits) if point.leaves else exits

    def _readable(self, point: Point, lexicon: Lexicon, prefix: str) -> tuple[Iterable[str], bool]:
        """The characters behind a prefix that a point may read; whether it does read each of them."""
        if point.strings:
            return lexicon.nexts(prefix), False
        if any(reader.wide for reader, _ in point.plain):
            return [char for char in lexicon.nexts(prefix) if any(reader.read(char) for reader, _ in point.plain)], True
        return dict.fromkeys(char for reader, _ in point.plain for char in reader.single), True

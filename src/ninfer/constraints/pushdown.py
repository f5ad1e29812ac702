"""Grammars we write ourselves, read by a pushdown automaton that is made deterministic as it is used.

A point of the reading is the set of all ways it can go on, each with its own stack; points and what follows them are
remembered, so text that was read before costs a lookup a character, and a mask seen before a copy. Strings stay whole:
their automata decide whole vocabularies at once (``content``). Not for left-recursive grammars, whose stacks grow
without reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.constraints.content import Content, CountedContent, JsonContent, RawContent
from ninfer.constraints.insides import ContentIndex
from ninfer.constraints.ir import Auto, Counted, Grammar
from ninfer.constraints.points import (
    HOLE,
    UNKNOWN,
    Entry,
    Mask,
    Plain,
    Point,
    Reader,
    Return,
    Spread,
    States,
    String,
    first_chars,
)
from ninfer.constraints.recognise import Machine
from ninfer.constraints.regions import Regions
from ninfer.constraints.tokentrie import code_range, split_text
from ninfer.constraints.warmup import warm
from ninfer.errors import InvariantError

_MAX_POINTS = 30_000
_POINT_BYTES = 1000
"""Of a point, and of what is reached from some states; as measured, like those of a region."""
_REGION_BYTES = 500
_MAX_CLOSURE = 200_000


class Pushdown:
    """A language over one vocabulary. Safe from any thread: what two threads find out at once is the same."""

    def __init__(self, grammar: Grammar, index: ContentIndex, stop: Iterable[int]) -> None:
        self.index = index
        self._stop = tuple(stop)
        self._machine = Machine(grammar, whole_strings=True)
        self._contents: dict[Auto | Counted, Content] = {}
        self._readers: dict[States, Reader] = {}
        self._spreads: dict[States, Spread] = {}
        self._returns: dict[tuple[States, Return | None], Return] = {}
        self._points: dict[object, Point] = {}
        self._follow: dict[tuple[States, Return | None], Point] = {}
        self.regions = Regions(self)
        self.root = frozenset((self._machine.root,))
        self.start = self._close([(self.root, None)], ())

    @property
    def nbytes(self) -> int:
        """About what it holds, bytes."""
        return (len(self._points) + len(self._spreads)) * _POINT_BYTES + len(self.regions) * _REGION_BYTES

    def parser(self) -> PointParser:
        return PointParser(self)

    def warm(self, seconds: float) -> None:
        """Look ahead for about so long, of this thread's time: what is seen now costs nothing later."""
        warm(self, seconds)

    # -- reading -------------------------------------------------------------------------------------------------

    def step(self, point: Point, char: str) -> Point | None:
        """What follows a character."""
        agenda = [(states, below) for reader, below in point.plain if (states := reader.read(char))]
        strings = []
        for content, inner, after, below in point.strings:
            following = content.step(inner, char)
            if following is not None:
                strings.append((content, following, after, below))
                if content.may_end(following):
                    agenda.append((after, below))
        return self._remember(point, char, agenda, strings)

    def take(self, point: Point, token: int) -> Point | None:
        """What follows a token that is no text."""
        agenda = [(states, below) for reader, below in point.plain if (states := reader.tokens.get(token))]
        return self._remember(point, token, agenda, [])

    def _remember(self, point: Point, read: str | int, agenda: list[Entry], strings: list[String]) -> Point | None:
        found = self._close(agenda, strings) if agenda or strings else None
        point.after[read] = found
        return found

    def follow(self, point: Point, text: str) -> Point | None:
        """What follows a text."""
        at: Point | None = point
        for char in text:
            if at is None:
                return None
            known = at.after.get(char, UNKNOWN)
            at = self.step(at, char) if known is UNKNOWN else known
        return at

    def reads(self, point: Point, text: str, tail: bytes) -> bool:
        """Whether text can be read, and then a character that begins with ``tail``."""
        at = self.follow(point, text)
        return at is not None and (not tail or self.admits(at, tail))

    def admits(self, point: Point, tail: bytes) -> bool:
        """Whether a character that begins with these bytes can be read."""
        span = code_range(tail)
        if span is None:
            return False
        low, high = span
        return any(begin <= high and low < end for reader, _ in point.plain for begin, end in reader.ranges) or any(
            content.admits(inner, low, high) for content, inner, _, _ in point.strings
        )

    def _close(self, agenda: list[Entry], strings: Iterable[String]) -> Point:
        """Follow calls and returns to everything that reads."""
        agenda = list(agenda)
        seen: set[Entry] = set()
        plain: dict[Plain, None] = {}
        inside = dict.fromkeys(strings)
        complete = leaves = False
        while agenda:
            entry = agenda.pop()
            if entry in seen:
                continue
            seen.add(entry)
            if len(seen) > _MAX_CLOSURE:
                raise InvariantError("a left-recursive grammar")
            states, below = entry
            spread = self.spread_of(states)
            if spread.reader is not None:
                plain[spread.reader, below] = None
            for start, after in spread.calls:
                agenda.append((start, self._push(after, below)))
            for content, after in spread.strings:
                inner = content.start()
                if inner is not None:
                    inside[content, inner, after, below] = None
                    if content.may_end(inner):
                        agenda.append((after, below))
            if spread.ends:
                if below is None:
                    complete = True
                elif below is HOLE:
                    leaves = True
                else:
                    agenda.append((below.states, below.below))
        return self.point(plain, inside, complete, leaves)

    def point(
        self, plain: Collection[Plain], strings: Collection[String], complete: bool = False, leaves: bool = False
    ) -> Point:
        """The one point of these ways to go on."""
        entries, inside = tuple(plain), tuple(strings)
        ways: Any = frozenset((*entries, *inside)) if len(entries) + len(inside) > 1 else entries or inside
        key = ways, complete, leaves
        found = self._points.get(key)
        if found is None:
            if len(self._points) + len(self.regions) >= _MAX_POINTS:
                self._forget()
            found = self._points.setdefault(key, Point(entries, inside, complete, leaves))
        return found

    def spread_of(self, states: States) -> Spread:
        return self._spreads.get(states) or self._spread(states)

    def _spread(self, begin: States) -> Spread:
        agenda, seen = list(begin), set(begin)
        reading, calls, strings, ends = [], [], [], False
        while agenda:
            state = self._machine.ready(agenda.pop())
            near = list(state.silent)
            for rule, after in state.calls:
                start = self._machine.starts[rule]
                if self._machine.ready(after).final:  # the last thing of its rule: nothing to come back to
                    near.append(start)
                else:
                    calls.append((frozenset((start,)), frozenset((after,))))
            for target in near:
                if target not in seen:
                    seen.add(target)
                    agenda.append(target)
            if state.chars or state.tokens:
                reading.append(state)
            strings += [(self._content(node), frozenset((after,))) for node, after in state.strings]
            ends |= state.final
        reader = self._reader(begin if len(reading) == len(begin) == len(seen) else frozenset(reading))
        return self._spreads.setdefault(begin, Spread(reader, tuple(calls), tuple(strings), ends))

    def _reader(self, states: States) -> Reader | None:
        found = self._readers.get(states)
        return self._readers.setdefault(states, Reader.of(states)) if found is None and states else found

    def _push(self, states: States, below: Return | None) -> Return:
        """A stack with one return more."""
        key = states, below
        found = self._returns.get(key)
        return self._returns.setdefault(key, Return(states, below)) if found is None else found

    def _content(self, node: Auto | Counted) -> Content:
        found = self._contents.get(node)
        if found is None:
            if isinstance(node, Counted):
                found = CountedContent(node.low, node.high, self.index)
            else:
                found = (RawContent if node.spelling == "raw" else JsonContent)(node.dfa, self.index)
            self._contents[node] = found
        return found

    def _forget(self) -> None:
        """Drop what is remembered. Points in use stay good; they learn anew."""
        points = list(self._points.values())
        self._points, self._returns, self._follow, self._readers, self._spreads = {}, {}, {}, {}, {}
        self.regions = Regions(self)
        for point in points:
            point.after, point.mask, point.within, point.texts, point.endings = {}, None, None, None, None

    # -- masks -------------------------------------------------------------------------------------------------

    def mask(self, point: Point, pending: bytes) -> Mask:
        """The legal tokens behind a point and the beginning of a character."""
        if not pending:
            if point.mask is None:
                point.mask = self._mask(point)
            return point.mask
        if point.within is None:
            point.within = {}
        found = point.within.get(pending)
        if found is None:
            found = point.within[pending] = self._mask_within(point, pending)
        return found

    def _mask(self, point: Point) -> Mask:
        trie = self.index.trie
        tokens = [token for reader, _ in point.plain for token in reader.tokens]
        if point.complete:
            tokens += self._stop
        places: list[int] = []
        inside = []
        others = dict.fromkeys(point.plain)
        for content, inner, after, below in point.strings:
            behind = self.behind(after, below)
            follow = first_chars(behind)
            inside.append((content, inner, follow))
            for char, past in content.inside(inner, follow).past.items():
                at = trie.occurrences(char)
                legal = self._legal_endings(behind, char)[at.ending[past]]
                places += at.place[past[legal]].tolist()
            if content.may_end(inner):
                if behind.texts is None:
                    behind.texts = tuple(self.regions.texts(behind.plain, trie.lexicon))
                places += behind.texts
                for entry in behind.plain:
                    others.pop(entry, None)
        places += self.regions.texts(others, trie.lexicon)
        return Mask.of(inside, tokens + trie.ids[places].tolist())

    def _mask_within(self, point: Point, pending: bytes) -> Mask:
        """Tokens that go on inside a character."""
        trie = self.index.trie
        legal = []
        for token in trie.stray:
            if self.reads(point, *split_text(pending + trie.data[token])):
                legal.append(token)
        return Mask.of([], legal)

    def behind(self, states: States, below: Return | None) -> Point:
        """What may follow a string, or a rule."""
        key = states, below
        found = self._follow.get(key)
        if found is None:
            found = self._follow[key] = self._close([key], ())
        return found

    def _legal_endings(self, behind: Point, char: str) -> npt.NDArray[np.bool_]:
        """Which endings of tokens, from ``char`` on, can be read behind a string."""
        if behind.endings is None:
            behind.endings = {}
        found = behind.endings.get(char)
        if found is None:
            endings = self.index.trie.occurrences(char).endings
            found = np.zeros(len(endings.texts), np.bool_)
            found[self.regions.texts(behind.plain, endings)] = True
            behind.endings[char] = found
        return found


class PointParser:
    """One reading of a language, token by token."""

    def __init__(self, language: Pushdown) -> None:
        self._language = language
        self._trie = language.index.trie
        self._path: list[tuple[Point, bytes]] = [(language.start, b"")]

    @property
    def complete(self) -> bool:
        point, pending = self._path[-1]
        return point.complete and not pending

    def accept(self, token: int) -> bool:
        trie = self._trie
        point, pending = self._path[-1]
        text = trie.texts[token]
        if text is None and token not in trie.stray:
            return not pending and self._go_on(self._language.take(point, token), b"")
        if pending or text is None:
            return self.accept_bytes(trie.data[token])
        return self._go_on(self._language.follow(point, text), trie.tails.get(token, b""))

    def accept_bytes(self, data: bytes) -> bool:
        point, pending = self._path[-1]
        text, tail = split_text(pending + data)
        return self._go_on(self._language.follow(point, text), tail)

    def _go_on(self, point: Point | None, pending: bytes) -> bool:
        if point is None or (pending and not self._language.admits(point, pending)):
            return False
        self._path.append((point, pending))
        return True

    def rollback(self, steps: int) -> None:
        del self._path[len(self._path) - steps :]

    def fill(self, words: npt.NDArray[np.uint32]) -> bool:
        point, pending = self._path[-1]
        mask = point.mask if point.mask is not None and not pending else self._language.mask(point, pending)
        mask.write(words)
        return mask.some

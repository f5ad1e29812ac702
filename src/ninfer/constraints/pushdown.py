"""Grammars we write ourselves, read by a pushdown automaton that is made deterministic as it is used.

A point of the reading is the set of all ways it can go on, each with its own stack; points and what follows them are
remembered, so text that was read before costs a lookup a character, and a mask seen before a copy. Strings stay whole:
their automata decide whole vocabularies at once (``content``). Not for left-recursive grammars, whose stacks grow
without reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from time import thread_time
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer.constraints.content import Content, ContentIndex, CountedContent, JsonContent, RawContent
from ninfer.constraints.ir import Auto, Counted, Grammar
from ninfer.constraints.lexicon import Lexicon
from ninfer.constraints.points import (
    FEW,
    UNKNOWN,
    Entry,
    Mask,
    Plain,
    Point,
    Reader,
    Region,
    Return,
    Spread,
    States,
    String,
    beyond_ascii,
    first_chars,
)
from ninfer.constraints.recognise import Machine, State
from ninfer.constraints.tokentrie import code_range, split_text
from ninfer.errors import InvariantError

_MAX_POINTS = 30_000
_POINT_BYTES = 1000
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
        self._regions: dict[object, Region] = {}
        self._hole = Return(frozenset(), None)
        """Below a rule that is read whatever called it."""
        self._root = frozenset((self._machine.root,))
        self.start = self._close([(self._root, None)], ())

    @property
    def nbytes(self) -> int:
        """About what it holds, bytes."""
        return len(self._points) * _POINT_BYTES + len(self._regions) * _REGION_BYTES

    def parser(self) -> PointParser:
        return PointParser(self)

    def warm(self, seconds: float) -> None:
        """Look ahead for about so long, of this thread's time: what is seen now costs nothing later."""
        begin = thread_time()
        strings = self._warm_rules(begin + 0.6 * seconds)
        self._warm_strings(strings, begin + 0.8 * seconds)
        self._warm_points(begin + seconds)

    def _warm_rules(self, deadline: float) -> dict[tuple[Content, frozenset[str]], None]:
        """What every part of every rule reads; what is certain to come before what is chosen. Returns the strings met,
        with the characters that may follow them."""
        strings: dict[tuple[Content, frozenset[str]], None] = {}
        trie = self.index.trie
        waiting, seen = deque([self._root]), {self._root}
        while waiting and thread_time() < deadline:
            spread = self._spread_of(waiting.popleft())
            certain = [after for _, after in (*spread.calls, *spread.strings)]
            chosen = [start for start, _ in spread.calls]
            if (reader := spread.reader) is not None:
                self._region((reader,), trie.lexicon, "")
                (certain if reader.run else chosen).extend(reader.targets)
            for content, after in spread.strings:
                if (reader := self._spread_of(after).reader) is not None:
                    strings[content, frozenset(reader.single)] = None
                    for char in reader.single:
                        self._region((reader,), trie.occurrences(char).endings, "")
            for states in certain:
                if states not in seen:
                    waiting.appendleft(states)
            waiting.extend(states for states in chosen if states not in seen)
            seen.update(certain, chosen)
        return strings

    def _warm_strings(self, strings: Iterable[tuple[Content, frozenset[str]]], deadline: float) -> None:
        """The insides of strings, those of their automata near the start first."""
        waiting = deque((content, follow, state) for content, follow in strings if (state := content.start()))
        seen = set(waiting)
        while waiting and thread_time() < deadline:
            content, follow, state = waiting.popleft()
            content.inside(state, follow)
            for after in content.after(state):
                if (content, follow, after) not in seen:
                    seen.add((content, follow, after))
                    waiting.append((content, follow, after))

    def _warm_points(self, deadline: float) -> None:
        """Where answers are likely to go."""
        lexicon = self.index.trie.lexicon
        waiting, seen = deque([self.start]), {self.start}
        while waiting and thread_time() < deadline:
            point = waiting.popleft()
            self.mask(point, b"")
            following = [self._behind(states, below) for _, _, states, below in point.strings]
            if not point.strings:
                texts = [lexicon.texts[place] for place in sorted(set(self._texts(point.plain, lexicon)))]
                longest = [a for a, b in zip(texts, [*texts[1:], ""]) if not b.startswith(a)]
                following += [found for text in longest if (found := self.follow(point, text))]
                tokens = [token for reader, _ in point.plain for token in reader.tokens]
                following += [found for token in tokens if (found := self.take(point, token))]
            for found in following:
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)

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
            spread = self._spread_of(states)
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
                elif below is self._hole:
                    leaves = True
                else:
                    agenda.append((below.states, below.below))
        return self._point(plain, inside, complete, leaves)

    def _point(
        self, plain: Collection[Plain], strings: Collection[String], complete: bool = False, leaves: bool = False
    ) -> Point:
        """The one point of these ways to go on."""
        entries, inside = tuple(plain), tuple(strings)
        ways: Any = frozenset((*entries, *inside)) if len(entries) + len(inside) > 1 else entries or inside
        key = ways, complete, leaves
        found = self._points.get(key)
        if found is None:
            if len(self._points) + len(self._regions) >= _MAX_POINTS:
                self._forget()
            found = self._points.setdefault(key, Point(entries, inside, complete, leaves))
        return found

    def _spread_of(self, states: States) -> Spread:
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
        self._points, self._returns, self._follow, self._regions = {}, {}, {}, {}
        self._readers, self._spreads = {}, {}
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
            behind = self._behind(after, below)
            follow = first_chars(behind)
            inside.append((content, inner, follow))
            for char, past in content.inside(inner, follow).past.items():
                at = trie.occurrences(char)
                legal = self._legal_endings(behind, char)[at.ending[past]]
                places += at.place[past[legal]].tolist()
            if content.may_end(inner):
                if behind.texts is None:
                    behind.texts = tuple(self._texts(behind.plain, trie.lexicon))
                places += behind.texts
                for entry in behind.plain:
                    others.pop(entry, None)
        places += self._texts(others, trie.lexicon)
        return Mask.of(inside, tokens + trie.ids[places].tolist())

    def _mask_within(self, point: Point, pending: bytes) -> Mask:
        """Tokens that go on inside a character."""
        trie = self.index.trie
        legal = []
        for token in trie.stray:
            if self.reads(point, *split_text(pending + trie.data[token])):
                legal.append(token)
        return Mask.of([], legal)

    def _behind(self, states: States, below: Return | None) -> Point:
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
            found[self._texts(behind.plain, endings)] = True
            behind.endings[char] = found
        return found

    def _texts(self, entries: Iterable[Plain], lexicon: Lexicon) -> list[int]:
        """The places of the texts that can be read from any of some entries: within their rules, and behind them."""
        places: list[int] = []
        agenda: list[tuple[Plain | String, str]] = [(entry, "") for entry in entries]
        seen = set(agenda)
        for entry, prefix in agenda:
            *reads, below = entry
            found, exits = self._region(tuple(reads), lexicon, prefix)
            places += found
            if below is not None:
                for text in exits:
                    behind = self._behind(below.states, below.below)
                    ways: tuple[Plain | String, ...] = (*behind.plain, *behind.strings)
                    more = [(way, text) for way in ways if (way, text) not in seen]
                    seen.update(more)
                    agenda += more
        return places

    def _region(self, reads: tuple[Any, ...], lexicon: Lexicon, prefix: str) -> Region:
        """What an entry reads of the texts behind a prefix, whatever its stack."""
        key = *reads, lexicon, prefix
        found = self._regions.get(key)
        if found is None:
            entry = (*reads, self._hole)
            alone = self._point([entry], []) if len(entry) == 2 else self._point([], [entry])
            found = self._regions[key] = self._explore(alone, lexicon, prefix)
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
                following = self.follow(at, text[end - 1])
                if following is None:
                    break
                at = following
                if at.leaves:
                    exits.append(text[:end])
            else:
                if place not in lexicon.tails or self.admits(at, lexicon.tails[place]):
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
            elif following := self.follow(point, char):
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
            yield self._entered(self._behind(frozenset((end,)), self._hole), lexicon, prefix + text)

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

"""Grammars we write ourselves, read by a pushdown automaton that is made deterministic as it is used.

A point of the reading is the set of all ways it can go on, each with its own stack; points and what follows them are
remembered, so text that was read before costs a lookup a character, and a mask seen before a copy. Strings stay whole:
their automata decide whole vocabularies at once (``content``). Not for left-recursive grammars, whose stacks grow
without reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ninfer.constraints.content import Content, ContentIndex, CountedContent, JsonContent, RawContent
from ninfer.constraints.ir import Auto, Counted, Grammar
from ninfer.constraints.points import (
    FEW,
    UNKNOWN,
    Entry,
    Mask,
    Plain,
    Point,
    Reader,
    Return,
    Spread,
    String,
    beyond_ascii,
    first_chars,
)
from ninfer.constraints.recognise import Machine, State
from ninfer.constraints.tokentrie import code_range, split_text
from ninfer.errors import InvariantError

_MAX_POINTS = 30_000
_POINT_BYTES = 1000
_MAX_CLOSURE = 200_000


class Pushdown:
    """A language over one vocabulary. Safe from any thread: what two threads find out at once is the same."""

    def __init__(self, grammar: Grammar, index: ContentIndex, stop: Iterable[int]) -> None:
        self.index = index
        self._stop = tuple(stop)
        self._machine = Machine(grammar, whole_strings=True)
        self._contents: dict[Auto | Counted, Content] = {}
        self._spreads: dict[State, Spread] = {}
        self._returns: dict[tuple[State, Return | None], Return] = {}
        self._points: dict[object, Point] = {}
        self._follow: dict[tuple[State, Return | None], Point] = {}
        self.start = self._close([(self._machine.root, None)], ())

    @property
    def nbytes(self) -> int:
        """About what it holds, bytes."""
        return len(self._points) * _POINT_BYTES

    def parser(self) -> PointParser:
        return PointParser(self)

    def warm(self, seconds: float) -> None:
        """Look ahead where answers are likely to go, for at most so long: what is seen now costs nothing later."""
        deadline = perf_counter() + seconds
        waiting, seen = deque([self.start]), {self.start}
        while waiting and perf_counter() < deadline:
            point = waiting.popleft()
            self.mask(point, b"")
            following = [self._behind(state, below) for _, _, state, below in point.strings]
            if any(not isinstance(content, CountedContent) for content, *_ in point.strings):
                following += [found for char in "aA 0" if (found := self.follow(point, char))]
            if not point.strings:
                texts = sorted(self.index.trie.texts[token] or "" for token in self._texts(point))
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
        agenda = [(target, below) for reader, below in point.plain for target in reader.read(char)]
        strings = []
        for content, inner, state, below in point.strings:
            following = content.step(inner, char)
            if following is not None:
                strings.append((content, following, state, below))
                if content.may_end(following):
                    agenda.append((state, below))
        return self._remember(point, char, agenda, strings)

    def take(self, point: Point, token: int) -> Point | None:
        """What follows a token that is no text."""
        agenda = [(target, below) for reader, below in point.plain for target in reader.tokens.get(token, ())]
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
        complete = False
        while agenda:
            entry = agenda.pop()
            if entry in seen:
                continue
            seen.add(entry)
            if len(seen) > _MAX_CLOSURE:
                raise InvariantError("a left-recursive grammar")
            state, below = entry
            spread = self._spreads.get(state) or self._spread(state)
            for reader in spread.readers:
                plain[reader, below] = None
            for start, after in spread.calls:
                agenda.append((start, self._push(after, below)))
            for content, after in spread.strings:
                inner = content.start()
                if inner is not None:
                    inside[content, inner, after, below] = None
                    if content.may_end(inner):
                        agenda.append((after, below))
            if spread.ends and below is None:
                complete = True
            elif spread.ends and below is not None:
                agenda.append((below.state, below.below))
        key = frozenset(plain), frozenset(inside), complete
        found = self._points.get(key)
        if found is None:
            if len(self._points) >= _MAX_POINTS:
                self._forget()
            found = self._points.setdefault(key, Point(tuple(plain), tuple(inside), complete))
        return found

    def _spread(self, start: State) -> Spread:
        spread, agenda, seen = Spread(), [start], {start}
        while agenda:
            state = self._machine.ready(agenda.pop())
            for target in state.silent:
                if target not in seen:
                    seen.add(target)
                    agenda.append(target)
            if state.chars or state.tokens:
                spread.readers.append(Reader.of(state))
            spread.calls += [(self._machine.starts[rule], after) for rule, after in state.calls]
            spread.strings += [(self._content(node), after) for node, after in state.strings]
            spread.ends |= state.final
        return self._spreads.setdefault(start, spread)

    def _push(self, state: State, below: Return | None) -> Return | None:
        """A stack with one return more; none for a call that is the last thing its rule does."""
        if self._machine.ready(state).final:
            return below
        key = state, below
        found = self._returns.get(key)
        return self._returns.setdefault(key, Return(state, below)) if found is None else found

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
        points, self._points, self._returns, self._follow = list(self._points.values()), {}, {}, {}
        for point in points:
            point.after, point.texts, point.endings, point.masks = {}, None, {}, {}

    # -- masks ---------------------------------------------------------------------------------------------------

    def mask(self, point: Point, pending: bytes) -> Mask:
        """The legal tokens behind a point and the beginning of a character."""
        found = point.masks.get(pending)
        if found is None:
            found = self._mask(point) if not pending else self._mask_within(point, pending)
            point.masks[pending] = found
        return found

    def _mask(self, point: Point) -> Mask:
        trie = self.index.trie
        tokens = [token for reader, _ in point.plain for token in reader.tokens]
        if point.complete:
            tokens += self._stop
        inside = []
        others = dict.fromkeys(point.plain)
        for content, inner, state, below in point.strings:
            behind = self._behind(state, below)
            follow = first_chars(behind)
            inside.append((content, inner, follow))
            for char, places in content.inside(inner, follow).past.items():
                at = trie.occurrences(char)
                legal = self._legal_endings(behind, char)[at.ending[places]]
                tokens += trie.ids[at.place[places[legal]]].tolist()
            if content.may_end(inner):
                tokens += self._texts(behind)
                for entry in behind.plain:
                    others.pop(entry, None)
        if others:
            tokens += self._texts(Point(tuple(others), (), False) if point.strings else point)
        return Mask.of(inside, tokens)

    def _texts(self, point: Point) -> list[int]:
        """The text tokens that can be read from a point that is in no string."""
        if point.texts is None:
            point.texts = self._below(point, 0, 0)
        return point.texts

    def _mask_within(self, point: Point, pending: bytes) -> Mask:
        """Tokens that go on inside a character."""
        trie = self.index.trie
        legal = []
        for token in trie.stray:
            if self.reads(point, *split_text(pending + trie.data[token])):
                legal.append(token)
        return Mask.of([], legal)

    def _behind(self, state: State, below: Return | None) -> Point:
        """What may follow a string."""
        key = state, below
        found = self._follow.get(key)
        if found is None:
            found = self._follow[key] = self._close([key], ())
        return found

    def _legal_endings(self, behind: Point, char: str) -> npt.NDArray[np.bool_]:
        """Which endings of tokens, from ``char`` on, can be read behind a string."""
        found = behind.endings.get(char)
        if found is None:
            endings = self.index.trie.occurrences(char).endings
            starts = {start: self.follow(behind, start) for start in {text[:2] for text, _ in endings}}
            legal = [(at := starts[text[:2]]) is not None and self.reads(at, text[2:], tail) for text, tail in endings]
            found = behind.endings[char] = np.array(legal, np.bool_)
        return found

    def _below(self, point: Point, node: int, depth: int) -> list[int]:
        """The tokens below a trie node that can be read on from a point, at depth ``depth``."""
        trie = self.index.trie
        first, last = int(trie.first[node]), int(trie.last[node])
        found: list[int] = []
        if last - first <= FEW:
            for token in trie.ids[first:last].tolist():
                text = trie.texts[token]
                assert text is not None
                if self.reads(point, text[depth:], trie.tails.get(token, b"")):
                    found.append(token)
            return found
        begin, end = int(trie.child[node]), int(trie.child[node + 1])
        here = first + int(np.searchsorted(trie.ends[first:last] != node, True))
        for token in trie.ids[first:here].tolist() if depth or beyond_ascii(point) else ():
            if self.reads(point, "", trie.tails.get(token, b"")):
                found.append(token)
        for child, char in self._readable(point, begin, end):
            following = self.follow(point, char)
            if following is not None:
                found += self._below(following, child, depth + 1)
        return found

    def _readable(self, point: Point, begin: int, end: int) -> Iterator[tuple[int, str]]:
        """The children in a range whose characters a point may read."""
        trie = self.index.trie
        codes = trie.alphabet[trie.char[begin:end]]
        wanted = np.zeros(end - begin, np.bool_)
        if point.strings:
            wanted[:] = True
        for low, high in {span for reader, _ in point.plain for span in reader.ranges}:
            wanted[np.searchsorted(codes, low) : np.searchsorted(codes, high)] = True
        for child in np.flatnonzero(wanted).tolist():
            yield begin + child, chr(codes[child])


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
        if steps:
            del self._path[-steps:]

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        self._language.mask(*self._path[-1]).write(words.view(np.uint32))

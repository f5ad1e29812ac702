"""What may come next inside a string: its automaton is run over the whole vocabulary at once.

Three kinds of string: the texts of an automaton as they are (``RawContent``); the same as a canonical JSON string
writes them (``JsonContent``); any JSON string of a bounded number of characters (``CountedContent``). Each has states
of its own, reads single characters, and says for a state which tokens stay inside and which run past a possible end.
A state is (automaton state or count, how far an escape has been read); all states can be completed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ninfer.constraints.automata import DEAD, Dfa
from ninfer.constraints.chars import END, normalise
from ninfer.constraints.insides import ContentIndex, Inside
from ninfer.constraints.reading import BROKEN, ESCAPES, NOTHING, PREFIXES, Reading, read_escape
from ninfer.constraints.tokentrie import Flags, Ints, stretched

_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Lengths that are told apart; for each, the longer tokens are looked up once."""

State = tuple[int, int]
Places = npt.NDArray[np.signedinteger]


class Content(Protocol):
    """One kind of string."""

    def start(self) -> State | None:
        """The first state; None when the string has no text at all."""
        ...

    def may_end(self, state: State) -> bool: ...

    def step(self, state: State, char: str) -> State | None:
        """The state behind a character; None where it cannot be read."""
        ...

    def after(self, state: State) -> Iterable[State]:
        """The states behind whole characters, where it is worth knowing them before they come."""
        ...

    def admits(self, state: State, low: int, high: int) -> bool:
        """Whether one of the characters ``low..high``, none of them ASCII, can be read."""
        ...

    def inside(self, state: State, follow: frozenset[str]) -> Inside:
        """What each token does from a state, when one of ``follow`` comes behind the string."""
        ...


class RawContent:
    """The texts of an automaton."""

    def __init__(self, dfa: Dfa, index: ContentIndex) -> None:
        self.dfa = dfa
        self.index = index
        self.trans = np.array(dfa.trans, np.int32).reshape(len(dfa.trans), len(dfa.cuts))
        self.accept = np.frombuffer(bytes(dfa.accept), np.bool_)
        size = len(dfa.trans)
        self._moves = np.full((size + 1, len(dfa.cuts) + 1), DEAD, np.intp)
        self._moves[:size, :-1] = self.trans
        self._moves[:, -1] = [*range(size), DEAD]
        """As ``trans``; the last row is that of DEAD, the last column reads nothing."""
        self._columns: dict[int, npt.NDArray[np.intp]] = {}
        """The symbols of ``trie.long``, by reading."""
        self.symbol = (np.searchsorted(dfa.cuts, index.trie.alphabet, side="right") - 1).astype(np.int32)
        unused = ~_scalar(dfa.cuts)
        loops = ((self.trans == np.arange(len(self.trans))[:, None]) | unused).all(axis=1)
        self.free = int(np.argmax(loops)) if loops.any() else NOTHING
        """The state, if there is one, in which anything may come and nothing changes."""
        common = _common(self.trans, unused)
        self.sure = _sure(self.trans, unused | ~common, index.trie.longest)
        """int [states]: so many common characters can be read from there on; no token takes more than the largest."""
        self.open = bool((common | unused).all())
        """Whether all characters are common."""
        self.common = tuple(span for span, kept in zip(zip(dfa.cuts, [*dfa.cuts[1:], END]), common) if kept)

    def start(self) -> State | None:
        return None if self.dfa.empty else (0, 0)

    def may_end(self, state: State) -> bool:
        return bool(self.dfa.accept[state[0]])

    def step(self, state: State, char: str) -> State | None:
        target = self.dfa.step(state[0], ord(char))
        return None if target == DEAD else (target, 0)

    def after(self, state: State) -> Iterable[State]:
        return [(target, 0) for target in dict.fromkeys(self.dfa.trans[state[0]]) if target != DEAD]

    def admits(self, state: State, low: int, high: int) -> bool:
        row, cuts = self.dfa.trans[state[0]], self.dfa.cuts
        return any(target != DEAD for target in row[bisect_right(cuts, low) - 1 : bisect_right(cuts, high)])

    def inside(self, state: State, follow: frozenset[str]) -> Inside:
        return self.index.keep((self.dfa, state, follow), lambda: self._inside(state[0], follow))

    def _inside(self, state: int, follow: frozenset[str]) -> Inside:
        walk = self.walk(state, self.index.plain, follow)
        return self.index.packed(self.index.plain, self.stays(state, walk, self.index.plain), follow, walk.ends)

    def walk(self, state: int, reading: Reading, follow: frozenset[str]) -> Walk:
        """Read the trie from a state on: the ways to ``follow``, and to tokens that are not certain to be read. All
        of it within an escape, where few can be read."""
        trie = self.index.trie
        wanted = None if reading.escape else self.index.ways(follow, int(self.sure[state]), self.common, reading)
        free: list[Ints] = []
        seen: list[tuple[Ints, Ints]] = []
        nodes = np.zeros(1, np.int32)
        states = np.array([state], np.int32)
        while len(nodes):
            opened = states == self.free
            free.append(nodes[opened])
            nodes, states = nodes[~opened], states[~opened]
            seen.append((nodes, states))
            begin, end = trie.child[nodes], trie.child[nodes + 1]
            nodes = stretched(begin, end)
            states, read = np.repeat(states, end - begin), reading.decoded[nodes]
            states = np.where(read == NOTHING, states, self.trans[states, self.symbol[read]])
            alive = (states != DEAD) & (reading.escapes[nodes] != BROKEN)
            if wanted is not None:
                alive &= wanted[nodes]
            nodes, states = nodes[alive], states[alive]
        reached, at = (np.concatenate(part) for part in zip(*seen))
        first, last = (np.sort(ends[np.concatenate(free)]) for ends in (trie.first, trie.last))
        return Walk(self, reading, reached, at, first, last)

    def stays(self, state: int, walk: Walk, reading: Reading) -> Flags:
        """The places in ``trie.ids`` whose tokens are content of the automaton from a state on."""
        trie, sure = self.index.trie, self.sure[state]
        if sure >= trie.longest and self.open:
            return reading.whole
        if reading.escape or not sure:
            flags = np.zeros(len(trie.ids), np.bool_)
        else:
            flags = (trie.lengths <= sure) & ~reading.foreign(trie, self.common)
        flags[trie.long] |= self._long(state, reading)
        cut = ~flags[trie.cut]
        flags[stretched(trie.first[walk.nodes], trie.here[walk.nodes])] = True
        cut &= flags[trie.cut]
        if cut.any():
            states = walk.states_at(trie.ends[trie.cut[cut]])
            flags[trie.cut[cut]] = self._reads(states, trie.low[cut], trie.high[cut])
        flags[stretched(walk.first, walk.last)] = True
        return flags & reading.whole

    def _long(self, state: int, reading: Reading) -> Flags:
        """Which of ``trie.long`` are content from a state on: all are read side by side."""
        trie = self.index.trie
        columns = self._columns.get(id(reading))
        if columns is None:
            read = reading.decoded[trie.long_nodes]
            columns = np.where(read == NOTHING, len(self.dfa.cuts), self.symbol[read]).astype(np.intp)
            self._columns[id(reading)] = columns
        states = np.full(len(trie.long), state, np.intp)
        for depth, (column, count) in enumerate(zip(columns, trie.long_counts)):
            states[:count] = self._moves[states[:count], column[:count]]
            if depth % 8 == 1 and (states == DEAD).all():
                break
        return states != DEAD

    def _reads(self, states: Ints, low: Ints, high: Ints) -> Flags:
        """Whether each state reads one of the characters ``low..high``."""
        first = np.searchsorted(self.dfa.cuts, low, side="right") - 1
        last = np.searchsorted(self.dfa.cuts, high, side="right")
        kinds, kind = np.unique(states, return_inverse=True)
        alive = np.zeros((len(kinds), len(self.dfa.cuts) + 1), np.int32)
        np.cumsum(self.trans[kinds] != DEAD, axis=1, out=alive[:, 1:])
        return alive[kind, last] > alive[kind, first]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """The trie read from one state on. nodes, states: where an automaton was, ascending. first, last: tokens below
    nodes from which anything can be read."""

    content: RawContent
    reading: Reading
    nodes: Ints
    states: Ints
    first: Ints
    last: Ints

    def states_at(self, nodes: Ints) -> Ints:
        """The state at each node, DEAD where there is none or the node is free."""
        at = np.searchsorted(self.nodes, nodes)
        return np.where(np.append(self.nodes, -1)[at] == nodes, np.append(self.states, DEAD)[at], DEAD)

    def free(self, places: Places) -> Flags:
        """Which tokens are free from some node on."""
        at = np.searchsorted(self.first, places, side="right") - 1
        return (at >= 0) & (places < np.append(self.last, 0)[at])

    def ends(self, nodes: Ints, places: Ints) -> Flags:
        """Whether the string may end at nodes, on the way to tokens at places in ``trie.ids``."""
        states = self.states_at(nodes)
        return np.where(states == DEAD, self.free(places), self.content.accept[states]) & (
            self.reading.escapes[nodes] == 0
        )


class JsonContent:
    """The texts of an automaton as canonical JSON strings write them."""

    def __init__(self, dfa: Dfa, index: ContentIndex) -> None:
        self.raw = RawContent(dfa, index)
        self.index = index

    def start(self) -> State | None:
        return self.raw.start()

    def may_end(self, state: State) -> bool:
        return state[1] == 0 and self.raw.may_end(state)

    def step(self, state: State, char: str) -> State | None:
        at, escape = state
        code, following = read_escape(escape, char)
        if code is not None:
            return self.raw.step((at, 0), chr(code))
        return (at, following) if following is not None and self._completes(at, following) else None

    def after(self, state: State) -> Iterable[State]:
        return self.raw.after(state)

    def admits(self, state: State, low: int, high: int) -> bool:
        return state[1] == 0 and self.raw.admits(state, low, high)

    def _completes(self, at: int, escape: int) -> bool:
        prefix = PREFIXES[escape]
        return any(w.startswith(prefix) and self.raw.dfa.step(at, code) != DEAD for w, code in ESCAPES.items())

    def inside(self, state: State, follow: frozenset[str]) -> Inside:
        return self.index.keep((self.raw.dfa, "json", state, follow), lambda: self._inside(*state, follow))

    def _inside(self, state: int, escape: int, follow: frozenset[str]) -> Inside:
        trie, raw, reading = self.index.trie, self.raw, self.index.reading(escape)
        walk = raw.walk(state, reading, follow)
        stays = raw.stays(state, walk, reading)
        if stays is not reading.whole:
            within = reading.unfinished[stays[reading.unfinished]]
            within = within[~walk.free(within)]
            nodes = trie.ends[within]
            begun = reading.escapes[nodes].tolist()
            stays[within] = [self._completes(*pair) for pair in zip(walk.states_at(nodes).tolist(), begun)]
        return self.index.packed(reading, stays, follow, walk.ends)


class CountedContent:
    """Any JSON string of ``low`` to ``high`` characters; an escape counts once."""

    def __init__(self, low: int, high: int | None, index: ContentIndex) -> None:
        self.low = low
        self.high = high
        self.index = index

    def start(self) -> State | None:
        return None if self.high is not None and self.high < self.low else (0, 0)

    def may_end(self, state: State) -> bool:
        return state[1] == 0 and state[0] >= self.low

    def step(self, state: State, char: str) -> State | None:
        """Counts characters, an unfinished one included; with no upper bound, only as far as the lower one."""
        count, before = state
        _, escape = read_escape(before, char)
        if escape is None:
            return None
        if before == 0 and count == self.high:
            return None
        if before == 0 and (self.high is not None or count < self.low):
            count += 1
        return count, escape

    def after(self, state: State) -> Iterable[State]:
        return ()

    def admits(self, state: State, low: int, high: int) -> bool:
        return state[1] == 0 and state[0] != self.high

    def inside(self, state: State, follow: frozenset[str]) -> Inside:
        count, escape = state
        longest = len(self.index.trie.levels)  # no token has as many characters
        room = longest if self.high is None else min(self.high - count, longest)
        lacking = min(max(self.low - count, 0), longest)
        key = (CountedContent, room, lacking, escape, follow)
        return self.index.keep(key, lambda: self._inside(room, lacking, escape, follow))

    def _inside(self, room: int, lacking: int, escape: int, follow: frozenset[str]) -> Inside:
        trie, reading = self.index.trie, self.index.reading(escape)
        counts, used = reading.counted(trie)
        past = {}
        for char in follow:
            at = trie.occurrences(char)
            count = counts[at.node]
            ends = (reading.escapes[at.node] == 0) & (count >= lacking) & (count <= room)
            past[char] = np.flatnonzero(ends & (used[trie.ids[at.place]] > room))
        return Inside(np.packbits(used <= room, bitorder="little").view(np.uint32), past)


def _common(trans: Ints, unused: Flags) -> Flags:
    """The symbols that most texts are made of: those behind which the broadest state can still read what it reads."""
    alive = (trans != DEAD) & ~unused
    if not len(trans):
        return ~unused
    broadest = int(np.argmax(alive.sum(axis=1)))
    reads = alive[broadest]
    return reads & (alive[trans[broadest]] >= reads).all(axis=1)


def _sure(trans: Ints, unused: Flags, most: int) -> Ints:
    """How many characters can be read from each state, whichever are used: a level, or ``most`` for any number."""
    sure = np.zeros(len(trans), np.int32)
    able = np.ones(len(trans), np.bool_)
    for count in range(1, most + 1):
        narrower = (((trans != DEAD) & able[trans]) | unused).all(axis=1)
        if (narrower == able).all():
            sure[able] = most
            break
        sure[narrower] = count
        able = narrower
        if count == _LEVELS[-1] or not able.any():
            break
    levels = np.array([*_LEVELS, most], np.int32)
    return np.where(sure < most, levels[np.searchsorted(_LEVELS, sure, side="right") - 1], most)


def _scalar(cuts: list[int]) -> Flags:
    """Which intervals hold a scalar value."""
    highs = [*cuts[1:], END]
    return np.array([bool(normalise([span])) for span in zip(cuts, highs)], np.bool_)

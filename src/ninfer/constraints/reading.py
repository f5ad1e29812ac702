"""The vocabulary read as the inside of a string: the escape each node of its trie is in, the character it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer.constraints.ir import ESCAPED
from ninfer.constraints.tokentrie import Bits, Flags, Ints, TokenTrie

ESCAPES = {"\\" + tail: code for code, tail in ESCAPED.items()}
PREFIXES = ["", *dict.fromkeys(written[:i] for written in sorted(ESCAPES) for i in range(1, len(written)))]
"""What may have been read of an escape; a state holds the place of its prefix here. 0: not in an escape."""
BROKEN = len(PREFIXES)
NOTHING = -1
_ENDLESS = 1 << 30
_MOST_COMMON = 32

Spans = tuple[tuple[int, int], ...]
"""Code points, ``low <= c < high``."""


@dataclass(slots=True, eq=False)
class Reading:
    """The trie read as content. escapes: the escape state at each node, BROKEN where it is no content. decoded: the
    alphabet index of the character that ends at a node, or NOTHING. whole: which places in ``trie.ids`` are content;
    unfinished: those that end inside an escape. escape: the state it begins in.
    """

    escapes: Ints
    decoded: Ints
    whole: Flags
    unfinished: npt.NDArray[np.intp]
    escape: int = 0
    bits: Bits | None = None
    counts: tuple[Ints, Ints] | None = None
    foreigners: dict[Spans, Flags] = field(default_factory=dict)

    @classmethod
    def plain(cls, trie: TokenTrie) -> Reading:
        """Of text that is no JSON: every character stands for itself."""
        return cls(np.zeros_like(trie.char), trie.char, np.ones(len(trie.ids), np.bool_), np.zeros(0, np.intp))

    @classmethod
    def json(cls, trie: TokenTrie, escape: int) -> Reading:
        """Of JSON string content, from an escape state on."""
        following, meaning = _escape_tables(trie.alphabet)
        escapes = np.full(len(trie.parent), escape, np.int32)
        decoded = np.full(len(trie.parent), NOTHING, np.int32)
        for begin, end in zip(trie.levels[1:], trie.levels[2:]):
            above, char = escapes[trie.parent[begin:end]], trie.char[begin:end]
            escapes[begin:end] = following[above, char]
            decoded[begin:end] = meaning[above, char]
        whole = escapes[trie.ends] != BROKEN
        whole[trie.cut] &= escapes[trie.ends[trie.cut]] == 0
        return cls(escapes, decoded, whole, np.flatnonzero(whole & (escapes[trie.ends] != 0)), escape)

    @property
    def nbytes(self) -> int:
        arrays = [self.escapes, self.decoded, self.whole, *(self.counts or ()), *tuple(self.foreigners.values())]
        return sum(array.nbytes for array in arrays)

    def foreign(self, trie: TokenTrie, common: Spans) -> Flags:
        """Which places in ``trie.ids`` hold a character, or the beginning of one, that may be in none of some spans."""
        found = self.foreigners.get(common)
        if found is None:
            known = np.zeros(len(trie.alphabet) + 1, np.bool_)
            known[-1] = True  # nothing decoded
            for low, high in common:
                known[slice(*np.searchsorted(trie.alphabet, (low, high)))] = True
            nodes = ~known[self.decoded]
            nodes[0] = False
            for begin, end in zip(trie.levels[1:], trie.levels[2:]):
                nodes[begin:end] |= nodes[trie.parent[begin:end]]
            found = nodes[trie.ends]
            within = np.zeros(len(trie.cut), np.bool_)
            for low, high in common:
                within |= (low <= trie.low) & (trie.high < high)
            found[trie.cut] |= ~within
            found[self.unfinished] = True
            if len(self.foreigners) >= _MOST_COMMON:
                self.foreigners = {}
            self.foreigners[common] = found
        return found

    def counted(self, trie: TokenTrie) -> tuple[Ints, Ints]:
        """How many characters begin above each node or at it; how many each id takes, _ENDLESS if it is no content."""
        if self.counts is None:
            nodes = np.zeros(len(trie.parent), np.int32)
            for begin, end in zip(trie.levels[1:], trie.levels[2:]):
                above = trie.parent[begin:end]
                nodes[begin:end] = nodes[above] + (self.escapes[above] == 0)
            used = nodes[trie.ends]
            used[trie.cut] += 1
            ids = np.full(32 * trie.words, _ENDLESS, np.int32)
            ids[trie.ids] = np.where(self.whole, used, _ENDLESS)
            self.counts = nodes, ids
        return self.counts


def read_escape(escape: int, char: str) -> tuple[int | None, int | None]:
    """One more character of JSON string content: the code point it completes, if any, and the escape state behind it;
    (None, None) where it is not content."""
    if escape == 0 and char != "\\":
        return (None, None) if char < " " or char == '"' else (ord(char), 0)
    written = PREFIXES[escape] + char
    code = ESCAPES.get(written)
    if code is not None:
        return code, 0
    return None, PREFIXES.index(written) if written in PREFIXES else None


def _escape_tables(alphabet: Ints) -> tuple[Ints, Ints]:
    """``read_escape`` for every escape state, the broken one too, and character of the alphabet."""
    following = np.full((BROKEN + 1, len(alphabet)), BROKEN, np.int32)
    decoded = np.full((BROKEN + 1, len(alphabet)), NOTHING, np.int32)
    following[0], decoded[0] = 0, np.arange(len(alphabet))
    place = {int(code): i for i, code in enumerate(alphabet[:128])}
    for escape in range(BROKEN):
        for code in range(128):
            whole, state = read_escape(escape, chr(code))
            following[escape, place[code]] = BROKEN if state is None else state
            decoded[escape, place[code]] = NOTHING if whole is None else place[whole]
    return following, decoded

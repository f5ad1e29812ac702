"""Masks of the insides of strings, and what all strings of a vocabulary share to make them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from ninfer.constraints.reading import PREFIXES, Reading, Spans
from ninfer.constraints.tokentrie import Bits, Flags, Ints, TokenTrie

_MOST_WAYS = 64
_MANY = 20_000
"""Tokens that are written one by one into a mask."""


@dataclass(frozen=True, slots=True)
class Inside:
    """bits: the tokens that stay inside. past: of the characters that may follow, the indices of their Occurrences
    before which the string may end, in tokens that do not stay inside."""

    bits: Bits
    past: dict[str, npt.NDArray[np.intp]]


class ContentIndex:
    """What all strings of a vocabulary share: the trie, its JSON reading, and masks kept up to a budget of bytes."""

    def __init__(self, trie: TokenTrie, budget: int) -> None:
        self.trie = trie
        self._budget = budget
        self._kept: OrderedDict[Hashable, Inside] = OrderedDict()
        self._lock = Lock()
        self._readings: dict[int, Reading] = {}
        self.reading(0).counted(trie)  # the common ones now, not under somebody's first answer
        self.reading(PREFIXES.index("\\")).counted(trie)
        trie.occurrences('"')
        self._ways: dict[tuple[frozenset[str], int, Spans, Reading], Flags] = {}
        self.plain = Reading.plain(trie)

    @property
    def nbytes(self) -> int:
        """About what it holds beside the trie, bytes."""
        kept = len(self._kept) * (4 * self.trie.words + 1024)
        ways = sum(flags.nbytes for flags in self._ways.values())
        return kept + ways + sum(reading.nbytes for reading in self._readings.values())

    def keep(self, key: Hashable, make: Callable[[], Inside]) -> Inside:
        """The mask under a key, made if it is not at hand. The least recently used are dropped."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) * 4 * self.trie.words > self._budget and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return made

    def packed(
        self, reading: Reading, stays: Flags, follow: frozenset[str], ends: Callable[[Ints, Ints], Flags]
    ) -> Inside:
        """From the places in ``trie.ids`` that stay inside, and whether a string may end at given nodes, on the way to
        tokens at given places."""
        past = {}
        for char in follow:
            at = self.trie.occurrences(char)
            past[char] = np.flatnonzero(ends(at.node, at.place) & ~stays[at.place])
        if reading.bits is None:
            reading.bits = self.trie.bits(reading.whole)
        if stays is reading.whole:
            return Inside(reading.bits, past)
        if np.count_nonzero(stays) < len(stays) - _MANY:
            return Inside(self.trie.bits(stays), past)
        missing = np.flatnonzero(reading.whole & ~stays)
        bits, ids = reading.bits.copy(), self.trie.ids[missing].astype(np.uint32)
        np.bitwise_and.at(bits, ids >> 5, ~(np.uint32(1) << (ids & 31)))
        return Inside(bits, past)

    def ways(self, chars: frozenset[str], length: int, common: Spans, reading: Reading) -> Flags:
        """bool [nodes]: on the way to an occurrence of one of the characters, or to a token of more than ``length``
        characters or of others than the common ones, that is not in ``trie.long``."""
        key = chars, length, common, reading
        found = self._ways.get(key)
        if found is None:
            trie = self.trie
            found = np.zeros(len(trie.parent), np.bool_)
            far = (trie.lengths > length) | reading.foreign(trie, common)
            far[trie.long] = False
            found[trie.ends[far]] = True
            for char in chars:
                found[trie.occurrences(char).node] = True
            for begin, end in zip(trie.levels[-2:0:-1], trie.levels[:1:-1]):
                found[trie.parent[begin:end][found[begin:end]]] = True
            if len(self._ways) >= _MOST_WAYS:
                self._ways = {}
            self._ways[key] = found
        return found

    def reading(self, escape: int) -> Reading:
        """The trie read as JSON string content, from an escape state on."""
        found = self._readings.get(escape)
        if found is None:
            found = self._readings[escape] = Reading.json(self.trie, escape)
        return found

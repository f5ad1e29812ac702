"""The text tokens of a vocabulary as a trie of characters, laid out in arrays so that automata walk it in bulk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ninfer.constraints.lexicon import Lexicon

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Bits = npt.NDArray[np.uint32]


LONG = 16
"""Of tokens with more characters there are few, and one walk down the trie would be long for them."""


class TokenTrie:
    """Built once from the bytes of every id and which ids are text; immutable. Nodes are numbered level by level, in
    text order; node 0 is the root.

    data: the bytes of each id. texts: its whole characters, None for ids that are no text or begin inside a character.
    tails: the bytes of the unfinished character behind them. stray: ids that begin inside a character. An id in none of
    these is in no text.

    ids, ends: text tokens in text order, and the node of each one's whole characters. lexicon: their texts. cut: places
    in ``ids`` of tokens with a tail; low, high: the code points it may become. parent, char: of each node, ``char`` as
    an index into ``alphabet`` (code points that occur, ascending, with all of ASCII). child: [nodes + 1], where the
    children of each node begin. first, here, last: the tokens below each node, as places in ``ids``, those that end at
    it before ``here``. levels: where each level begins, and the end. lengths: the characters each of ``ids`` takes, an
    unfinished one included; longest: the most. long: the places of the tokens of more than LONG characters, without
    tails and backslashes, the longest first; long_nodes: [longest, len(long)], the node of each of their characters;
    long_counts: how many have so many characters.
    """

    def __init__(self, data: Sequence[bytes], is_text: Flags) -> None:
        self.data = data
        self.size = len(data)
        self.words = (self.size + 31) // 32
        texts: list[str | None] = [None] * self.size
        self.tails: dict[int, bytes] = {}
        stray = []
        for token in np.flatnonzero(is_text).tolist():
            try:
                texts[token] = data[token].decode()
            except UnicodeDecodeError:
                text, tail = split_text(data[token])
                if code_range(tail) is not None:
                    texts[token], self.tails[token] = text, tail
                elif 0x80 <= data[token][0] < 0xC0:
                    stray.append(token)
        self.stray = frozenset(stray)
        self.texts = tuple(texts)
        known = [token for token, text in enumerate(texts) if text is not None]
        known.sort(key=texts.__getitem__)  # type: ignore[arg-type]
        ordered = tuple(texts[token] or "" for token in known)
        codes = np.frombuffer("".join(ordered).encode("utf-32-le"), np.uint32).astype(np.int32)
        lengths = np.fromiter(map(len, ordered), np.int32, len(ordered))
        self.ids = np.array(known, np.int32)
        self.lexicon = Lexicon(ordered, {p: self.tails[token] for p, token in enumerate(known) if token in self.tails})
        self.alphabet = np.union1d(codes, np.arange(128, dtype=np.int32))
        self.ends = np.zeros(len(known), np.int32)
        self._grow(lengths, np.searchsorted(self.alphabet, codes).astype(np.int32))
        self.cut = np.array(list(self.lexicon.tails), np.int32)
        spans = np.array([code_range(tail) for tail in self.lexicon.tails.values()], np.int32).reshape(-1, 2)
        self.low, self.high = spans[:, 0], spans[:, 1]
        self.lengths = lengths
        self.lengths[self.cut] += 1
        self.longest = int(self.lengths.max(initial=0))
        self._line_up()
        self.here = self.first + np.bincount(self.ends, minlength=len(self.parent)).astype(np.int32)
        self._occurrences: dict[str, Occurrences] = {}

    def _grow(self, lengths: Ints, chars: Ints) -> None:
        parents, codes, firsts, lasts, self.levels = [], [], [], [], [0]
        for parent, char, first, last, place, node in _levels(lengths, chars):
            base = self.levels[-1]
            parents.append(parent)
            codes.append(char)
            firsts.append(first)
            lasts.append(last)
            self.ends[place] = base + node
            self.levels.append(base + len(parent))
        bases = [0, 0, *self.levels[1:]]
        self.parent = np.concatenate([parent + base for parent, base in zip(parents, bases)])
        self.char, self.first, self.last = map(np.concatenate, (codes, firsts, lasts))
        nodes = np.arange(1, self.levels[-1] + 1, dtype=np.int32)
        self.child = np.append(1, 1 + np.searchsorted(self.parent[1:], nodes)).astype(np.int32)

    def _line_up(self) -> None:
        """The nodes of every long token, those of the longest first."""
        plain = np.ones(len(self.ids), np.bool_)
        plain[self.cut] = False
        found = np.flatnonzero(plain & (self.lengths > LONG))
        found = found[["\\" not in self.lexicon.texts[place] for place in found.tolist()]].astype(np.int32)
        self.long = found[np.argsort(-self.lengths[found], kind="stable")]
        counts = self.lengths[self.long]
        self.long_nodes = np.zeros((int(counts.max(initial=0)), len(self.long)), np.int32)
        nodes = self.ends[self.long]
        for depth in range(len(self.long_nodes) - 1, -1, -1):
            there = counts > depth
            self.long_nodes[depth, there] = nodes[there]
            nodes[there] = self.parent[nodes[there]]
        self.long_counts = [int((counts > depth).sum()) for depth in range(len(self.long_nodes))]

    @property
    def nbytes(self) -> int:
        """About what it holds, bytes."""
        arrays = (self.ids, self.ends, self.parent, self.char, self.child, self.first, self.here, self.last)
        return sum(array.nbytes for array in arrays) + sum(49 + len(text) for text in self.texts if text is not None)

    def bits(self, flags: Flags) -> Bits:
        """A mask from a flag for each of ``ids``."""
        ids = self.ids[flags]
        if len(ids) < 4096:
            bits, few = np.zeros(self.words, np.uint32), ids.astype(np.uint32)
            np.bitwise_or.at(bits, few >> 5, np.uint32(1) << (few & 31))
            return bits
        whole = np.zeros(32 * self.words, np.bool_)
        whole[ids] = True
        return np.packbits(whole, bitorder="little").view(np.uint32)

    def occurrences(self, char: str) -> Occurrences:
        """Where tokens have a character behind their first one."""
        found = self._occurrences.get(char)
        if found is None:
            found = self._occurrences[char] = Occurrences.of(self, char)
        return found

    def find(self, text: str) -> int:
        """The node of a text that begins some token."""
        node = 0
        for char in text:
            begin, end = self.child[node], self.child[node + 1]
            code = np.searchsorted(self.alphabet, ord(char))
            node = int(begin + np.searchsorted(self.char[begin:end], code))
        return node

    def depth(self, nodes: npt.NDArray[np.signedinteger]) -> Ints:
        """How many characters lead to each node."""
        return (np.searchsorted(self.levels, nodes, side="right") - 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Places of one character: in which token (``place`` in ids), the ``node`` before it, and which of ``endings``
    (the text from the character on, and the unfinished character behind it) follows."""

    place: Ints
    node: Ints
    ending: Ints
    endings: Lexicon

    @classmethod
    def of(cls, trie: TokenTrie, char: str) -> Occurrences:
        at = np.flatnonzero(trie.char == np.searchsorted(trie.alphabet, ord(char)))
        at = at[at >= trie.levels[2]] if len(trie.levels) > 2 else at[:0]
        place, count = stretched(trie.first[at], trie.last[at]), trie.last[at] - trie.first[at]
        begin = np.repeat(trie.depth(at) - 1, count)
        texts, tails = trie.lexicon.texts, trie.lexicon.tails
        found = [(texts[p][i:], tails.get(p, b"")) for p, i in zip(place.tolist(), begin.tolist())]
        endings = sorted(set(found))
        number = {ending: i for i, ending in enumerate(endings)}
        lexicon = Lexicon([text for text, _ in endings], {i: tail for i, (_, tail) in enumerate(endings) if tail})
        return cls(place, np.repeat(trie.parent[at], count), np.array([number[e] for e in found], np.int32), lexicon)


def stretched(first: Ints, last: Ints) -> Ints:
    """The numbers ``first..last`` of every pair, one after the other."""
    count = last - first
    return np.repeat(last - np.cumsum(count, dtype=np.int32), count) + np.arange(count.sum(), dtype=np.int32)


def _levels(lengths: Ints, chars: Ints) -> Iterator[tuple[Ints, Ints, Ints, Ints, Ints, Ints]]:
    """For each depth: parent (within the level above), char, first and last token of each node; then the tokens that
    reach this depth, and their nodes (within the level)."""
    begins = np.cumsum(lengths) - lengths
    place = np.arange(len(lengths), dtype=np.int32)
    node = np.zeros(len(lengths), np.int32)
    root = np.zeros(1, np.int32)
    yield root, root, root, np.array([len(lengths)], np.int32), place, node
    for depth in range(int(lengths.max(initial=0))):
        keep = lengths[place] > depth
        place, above = place[keep], node[keep]
        char = chars[begins[place] + depth]
        new = np.ones(len(place), np.bool_)
        new[1:] = (char[1:] != char[:-1]) | (above[1:] != above[:-1])
        starts = np.flatnonzero(new)
        node = (np.cumsum(new) - 1).astype(np.int32)
        yield above[starts], char[starts], place[starts], place[np.append(starts[1:], len(place)) - 1] + 1, place, node


def split_text(data: bytes) -> tuple[str, bytes]:
    """Whole characters, and the rest from the first byte that is not one."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]


def code_range(tail: bytes) -> tuple[int, int] | None:
    """First and last code point of the characters that begin with these bytes; None when none does."""
    low = _finished(tail, b"\x80\x90\xa0", b"\x80")
    high = _finished(tail, b"\xbf\x9f\x8f", b"\xbf")
    return None if low is None or high is None else (low, high)


def _finished(tail: bytes, nexts: bytes, rest: bytes) -> int | None:
    for byte in nexts:
        for more in range(3):
            try:
                return ord((tail + bytes([byte]) + rest * more).decode())
            except (UnicodeDecodeError, TypeError):
                continue
    return None

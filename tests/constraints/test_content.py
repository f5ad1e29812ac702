"""Whole-vocabulary walks inside strings against stepping each token character by character."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.automata import Dfa
from ninfer.constraints.content import CountedContent, JsonContent, RawContent
from ninfer.constraints.ir import json_spelled
from ninfer.constraints.reading import read_escape
from ninfer.constraints.regex import parse
from ninfer.constraints.tokentrie import TokenTrie, code_range, split_text

FOLLOW = frozenset('"')
PATTERNS = [
    ".*", "b", "^[a-z]{2,4}$", "^[^ab]+x?$", '^"\n?$', r"^[\x00-\x1f]*$", "^(?:ab)*$", "^\\\\u?$", "[é中]", "^.{0,4}$",
    "^[^a]{1,3}b?$", "^.{2}c", "^([^\n]{1,9}\n)+$", "^[a-z中]{1,30}$",
]  # fmt: skip


def ending(quotes, i):
    place = int(quotes.ending[i])
    return quotes.endings.texts[place], quotes.endings.tails.get(place, b"")


def compare(content, state):
    """Every token: staying inside, and the possible ends before a quote within it."""
    index = content.index
    trie = index.trie
    found = content.inside(state, FOLLOW)
    bits = np.unpackbits(found.bits.view(np.uint8), bitorder="little")
    quotes = trie.occurrences('"')
    past = {(int(trie.ids[quotes.place[i]]), ending(quotes, i)) for i in found.past['"']}
    expected = set()
    for token, text in enumerate(trie.texts):
        if text is None:
            assert not bits[token]
            continue
        at, tail, ends = state, trie.tails.get(token, b""), set()
        for i, char in enumerate(text):
            if at is not None and i and char == '"' and content.may_end(at):
                ends.add((token, (text[i:], tail)))
            at = None if at is None else content.step(at, char)
        stays = at is not None and (not tail or content.admits(at, *code_range(tail)))
        assert bits[token] == stays, (state, text)
        if not stays:
            expected |= ends
    assert past == expected
    assert not bits[len(trie.texts) :].any()


def reachable(content, alphabet, limit=12):
    states = {content.start()} - {None}
    for _ in range(3):
        states |= {after for state in states for char in alphabet if (after := content.step(state, char)) is not None}
    return sorted(states)[:limit]


@pytest.mark.parametrize("kind", [RawContent, JsonContent])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_automata(small_index, kind, pattern):
    content = kind(Dfa.from_regex(parse(pattern), search=True), small_index.contents())
    states = reachable(content, "ab\\nu01x中")
    assert states
    for state in states:
        compare(content, state)


@pytest.mark.parametrize(("low", "high"), [(0, None), (0, 1), (2, 3), (3, None), (0, 30), (4, 4)])
def test_counted(small_index, low, high):
    content = CountedContent(low, high, small_index.contents())
    for state in reachable(content, "a\\nu01"):
        compare(content, state)


@given(st.sampled_from(PATTERNS), st.text(alphabet='ab"\\\n\x01\x1fu0é中x', max_size=5))
def test_json_content_reads_what_is_written(small_index, pattern, text):
    dfa = Dfa.from_regex(parse(pattern), search=True)
    content = JsonContent(dfa, small_index.contents())
    state = content.start()
    for char in json_spelled(text):
        state = None if state is None else content.step(state, char)
    assert (state is not None and content.may_end(state)) == dfa.accepts(text)


@given(st.text(alphabet='ab"\\nu01f\x01é', max_size=8), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3)))
def test_counted_content_counts_decoded_characters(small_index, written, low, more):
    """Only canonical spellings are read, and each escape counts once."""
    import json

    high = None if more is None else low + more
    content = CountedContent(low, high, small_index.contents())
    state = content.start()
    for char in written:
        state = None if state is None else content.step(state, char)
    try:
        value = json.loads(f'"{written}"')
    except ValueError:
        value = None
    canonical = value is not None and json_spelled(value) == written
    expected = canonical and low <= len(value) and (high is None or len(value) <= high)
    assert (state is not None and content.may_end(state)) == expected


def test_escapes():
    assert read_escape(0, "a") == (0x61, 0)
    assert read_escape(0, '"') == read_escape(0, "\n") == (None, None)
    state = 0
    for char in "\\u001":
        code, state = read_escape(state, char)
        assert code is None
    assert read_escape(state, "f") == (0x1F, 0)
    assert read_escape(state, "F") == (None, None)


@given(st.binary(max_size=4), st.characters(exclude_categories=["Cs"]))
def test_code_ranges(tail, char):
    """A beginning stands for exactly the characters that have it."""
    data = char.encode()
    for cut in range(1, len(data)):
        low, high = code_range(data[:cut])
        assert low <= ord(char) <= high
        assert chr(low).encode()[:cut] == chr(high).encode()[:cut] == data[:cut]
    text, rest = split_text(tail + data)
    assert text.encode() + rest == tail + data


def test_the_trie_knows_every_token(small_index):
    trie = small_index.contents().trie
    assert isinstance(trie, TokenTrie)
    known = {int(i) for i in trie.ids} | trie.stray
    text = {int(i) for i in np.flatnonzero(small_index.classes.text)}
    assert all(b not in trie.stray for b in range(128))
    assert text - known == {0xC0, 0xC1, *range(0xF5, 0x100)}
    for place, token in enumerate(trie.ids.tolist()):
        whole = trie.texts[token]
        node = trie.find(whole)
        assert node == trie.ends[place]
        assert trie.first[node] <= place < trie.last[node]
        assert whole.encode() + trie.tails.get(token, b"") == trie.data[token]

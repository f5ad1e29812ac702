"""What a language finds out about itself before its first answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import thread_time
from typing import TYPE_CHECKING

from ninfer.constraints.content import Content

if TYPE_CHECKING:
    from ninfer.constraints.pushdown import Pushdown

Strings = dict[tuple[Content, frozenset[str]], None]
"""Kinds of strings, with the characters that may follow them."""


def warm(language: Pushdown, seconds: float) -> None:
    """Look ahead for about so long, of this thread's time."""
    begin = thread_time()
    strings = _rules(language, begin + 0.6 * seconds)
    _insides(strings, begin + 0.8 * seconds)
    _points(language, begin + seconds)


def _rules(language: Pushdown, deadline: float) -> Strings:
    """What every part of every rule reads; what is certain to come before what is chosen. Returns the strings met."""
    strings: Strings = {}
    trie, region = language.index.trie, language.regions.region
    waiting, seen = deque([language.root]), {language.root}
    while waiting and thread_time() < deadline:
        spread = language.spread_of(waiting.popleft())
        certain = [after for _, after in (*spread.calls, *spread.strings)]
        chosen = [start for start, _ in spread.calls]
        if (reader := spread.reader) is not None:
            region((reader,), trie.lexicon, "")
            (certain if reader.run else chosen).extend(reader.targets)
        for content, after in spread.strings:
            if (reader := language.spread_of(after).reader) is not None:
                strings[content, frozenset(reader.single)] = None
                for char in reader.single:
                    region((reader,), trie.occurrences(char).endings, "")
        for states in certain:
            if states not in seen:
                waiting.appendleft(states)
        waiting.extend(states for states in chosen if states not in seen)
        seen.update(certain, chosen)
    return strings


def _insides(strings: Iterable[tuple[Content, frozenset[str]]], deadline: float) -> None:
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


def _points(language: Pushdown, deadline: float) -> None:
    """Where answers are likely to go."""
    lexicon = language.index.trie.lexicon
    waiting, seen = deque([language.start]), {language.start}
    while waiting and thread_time() < deadline:
        point = waiting.popleft()
        language.mask(point, b"")
        following = [language.behind(states, below) for _, _, states, below in point.strings]
        if not point.strings:
            texts = [lexicon.texts[place] for place in sorted(set(language.regions.texts(point.plain, lexicon)))]
            longest = [a for a, b in zip(texts, [*texts[1:], ""]) if not b.startswith(a)]
            following += [found for text in longest if (found := language.follow(point, text))]
            tokens = [token for reader, _ in point.plain for token in reader.tokens]
            following += [found for token in tokens if (found := language.take(point, token))]
        waiting.extend(found for found in dict.fromkeys(following) if found not in seen)
        seen.update(following)

"""What a language finds out about itself before its first answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from time import thread_time
from typing import TYPE_CHECKING

from ninfer.constraints.content import Content, State
from ninfer.constraints.limits import give_way

if TYPE_CHECKING:
    from ninfer.constraints.pushdown import Pushdown

_STRETCH_SECONDS = 0.001

Inside = tuple[Content, State, frozenset[str]]
"""A kind of string, where in it, and the characters that may follow it."""


def warm(language: Pushdown, seconds: float) -> None:
    """Look ahead for about so long, of this thread's time: at the parts of rules, at answers, inside their strings, and
    at answers again."""
    clock = _Clock()
    strings = _rules(language, clock, 0.5 * seconds) | _points(language, clock, 0.55 * seconds)
    _insides(strings, clock, 0.9 * seconds)
    _points(language, clock, seconds)


class _Clock:
    """This thread's time since the start. Whoever asks lets other threads go on now and then."""

    def __init__(self) -> None:
        self._begin = self._held = thread_time()

    def before(self, end: float) -> bool:
        now = thread_time()
        if now - self._held > _STRETCH_SECONDS:
            give_way()
            self._held = now
        return now - self._begin < end


def _rules(language: Pushdown, clock: _Clock, end: float) -> dict[Inside, None]:
    """What every part of every rule reads; what is certain to come before what is chosen. Returns the beginnings of
    strings whose rule says what follows them."""
    strings: dict[Inside, None] = {}
    trie, region = language.index.trie, language.regions.region
    waiting, seen = deque([language.root]), {language.root}
    while waiting and clock.before(end):
        spread = language.spread_of(waiting.popleft())
        certain = [after for _, after in (*spread.calls, *spread.strings)]
        chosen = [start for start, _ in spread.calls]
        if (reader := spread.reader) is not None:
            region((reader,), trie.lexicon, "")
            (certain if reader.run else chosen).extend(reader.targets)
        for content, after in spread.strings:
            reader, begin = language.spread_of(after).reader, content.start()
            if reader is not None and begin is not None:
                strings[content, begin, frozenset(reader.single)] = None
                for char in reader.single:
                    region((reader,), trie.occurrences(char).endings, "")
        for states in certain:
            if states not in seen:
                waiting.appendleft(states)
        waiting.extend(states for states in chosen if states not in seen)
        seen.update(certain, chosen)
    return strings


def _insides(strings: Iterable[Inside], clock: _Clock, end: float) -> None:
    """The insides of strings, outwards from where they were seen."""
    waiting, seen = deque(strings), set(strings)
    while waiting and clock.before(end):
        content, state, follow = waiting.popleft()
        content.inside(state, follow)
        more = dict.fromkeys((content, after, follow) for after in content.after(state))
        waiting.extend(inside for inside in more if inside not in seen)
        seen.update(more)


def _points(language: Pushdown, clock: _Clock, end: float) -> dict[Inside, None]:
    """Where answers are likely to go. Returns where in strings they came."""
    strings: dict[Inside, None] = {}
    lexicon = language.index.trie.lexicon
    waiting, seen = deque([language.start]), {language.start}
    while waiting and clock.before(end):
        point = waiting.popleft()
        strings.update(dict.fromkeys(language.mask(point, b"").inside))
        following = [language.behind(states, below) for _, _, states, below in point.strings]
        if not point.strings:
            texts = {lexicon.texts[place] for place in language.regions.texts(point.plain, lexicon)}
            following += [found for text in sorted(texts) if (found := language.follow(point, text))]
            tokens = [token for reader, _ in point.plain for token in reader.tokens]
            following += [found for token in tokens if (found := language.take(point, token))]
        waiting.extend(found for found in dict.fromkeys(following) if found not in seen)
        seen.update(following)
    return strings

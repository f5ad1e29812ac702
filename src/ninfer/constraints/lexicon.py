"""Texts in order, looked up by how they begin."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence


class Lexicon:
    """texts: ascending. tails: by place, the bytes of an unfinished character behind a text; most have none."""

    def __init__(self, texts: Sequence[str], tails: Mapping[int, bytes]) -> None:
        self.texts = texts
        self.tails = tails
        self._spans: dict[str, tuple[int, int]] = {"": (0, len(texts))}
        self._nexts: dict[str, tuple[str, ...]] = {}

    def span(self, prefix: str) -> tuple[int, int]:
        """The places of the texts that begin with a prefix."""
        found = self._spans.get(prefix)
        if found is None:
            first = bisect_left(self.texts, prefix)
            last = bisect_left(self.texts, True, first, key=lambda text: not text.startswith(prefix))
            found = self._spans[prefix] = first, last
        return found

    def holds(self, prefix: str) -> bool:
        """Whether some text begins with a prefix."""
        first, last = self.span(prefix)
        return first < last

    def exact(self, text: str) -> int:
        """The place behind those of a text itself."""
        return bisect_right(self.texts, text, *self.span(text))

    def goes_on(self, prefix: str) -> bool:
        """Whether something is behind a prefix in some text."""
        first, last = self.span(prefix)
        return last > first and (self.texts[last - 1] != prefix or any(p in self.tails for p in range(first, last)))

    def nexts(self, prefix: str) -> tuple[str, ...]:
        """The characters that come behind a prefix."""
        found = self._nexts.get(prefix)
        if found is None:
            first, last = self.span(prefix)
            at = len(prefix)
            found = tuple(sorted({self.texts[i][at] for i in range(first, last) if len(self.texts[i]) > at}))
            self._nexts[prefix] = found
        return found

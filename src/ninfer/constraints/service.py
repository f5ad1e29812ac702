"""From a plan to a matcher: the compiled languages of one vocabulary."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from time import perf_counter

import attrs

from ninfer.constraints.cache import CacheOutcome, GrammarCache
from ninfer.constraints.emit import emit
from ninfer.constraints.ir import Grammar
from ninfer.constraints.matcher import Matcher
from ninfer.constraints.pushdown import Pushdown
from ninfer.constraints.vocab import TokenClasses, TokenIndex
from ninfer.constraints.xgrammar import CompiledGrammar

_WARM_SECONDS = 0.11
_WARM_SECONDS_PER_RULE = 0.0025
_MOST_WARM_SECONDS = 0.45
"""How long a new language may explore itself before its first answer."""


@attrs.frozen
class LanguagePlan:
    """A language that a request asks for. kind: what the report calls it. key: equal for equal languages. build: the
    grammar; called only when no compiled one is at hand."""

    kind: str
    key: Hashable
    build: Callable[[], Grammar]


@attrs.frozen
class Opened:
    """A matcher at the start of a request. kind: of the plan. seconds: what it took."""

    kind: str
    matcher: Matcher
    cache: CacheOutcome
    seconds: float


class ConstraintService:
    """One per vocabulary. Nothing is built before the first ``open``; safe from any thread.

    cache_bytes: compiled languages retained; two thirds for whole ones, one third for what they share. timed: have
    matchers measure their work.
    """

    def __init__(self, classes: TokenClasses, cache_bytes: int, *, timed: bool = False) -> None:
        shared = cache_bytes // 3
        self._index = TokenIndex(classes, shared)
        self._cache: GrammarCache[CompiledGrammar | Pushdown] = GrammarCache(cache_bytes - shared)
        self._timed = timed
        self._live: weakref.WeakSet[Matcher] = weakref.WeakSet()

    def open(self, plan: LanguagePlan, prefix: bytes = b"") -> Opened:
        """A matcher that has read ``prefix`` and knows its first mask. Raises ConstraintError, and what ends the
        caller's scope."""
        begin = perf_counter()
        compiled, outcome = self._cache.get(plan.key, lambda: self._compile(plan))
        matcher = Matcher(compiled.parser(), self._index, timed=self._timed)
        matcher.start(prefix)
        self._live.add(matcher)
        return Opened(plan.kind, matcher, outcome, perf_counter() - begin)

    def close(self) -> None:
        """Stop what is being compiled."""
        self._cache.close()

    def stats(self) -> dict[str, int]:
        """The cache's counters and sizes; ``index_bytes`` of the vocabulary's index (about); matchers alive and the
        tokens they have read. Index and matchers are outside the cache's budget."""
        live = list(self._live)
        return {
            **attrs.asdict(self._cache.stats()),
            "index_bytes": self._index.nbytes,
            "matchers": len(live),
            "matcher_tokens": sum(matcher.steps for matcher in live),
        }

    def _compile(self, plan: LanguagePlan) -> CompiledGrammar | Pushdown:
        grammar, classes = plan.build(), self._index.classes
        language: CompiledGrammar | Pushdown
        if grammar.free_form:
            language = self._index.compiler().compile(emit(grammar, classes.reserved))
        else:
            language = Pushdown(grammar, self._index.contents(), classes.stop)
        language.warm(min(_WARM_SECONDS + _WARM_SECONDS_PER_RULE * len(grammar.rules), _MOST_WARM_SECONDS))
        return language

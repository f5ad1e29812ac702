"""Compiled languages kept between requests: one build per key, two builds at a time, a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Literal, Protocol, TypeVar

import attrs

from ninfer.cancellation import CancelScope, checkpoint, wait_for

CacheOutcome = Literal["hit", "built", "waited"]

BUILD_SLOTS = 2
"""Builds that may run at once."""


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


@attrs.frozen
class CacheStats:
    """entries and retained_bytes now; since the start hits, builds, waits for another's build, builds abandoned because
    nobody waited any more, and evictions."""

    entries: int
    retained_bytes: int
    hits: int
    builds: int
    waits: int
    abandoned: int
    evictions: int


class _Build(Generic[T]):
    """A build under way, and how many callers wait for it. When the last one has left, it ends early."""

    def __init__(self) -> None:
        self.scope = CancelScope()
        self.waiting = 0
        self.future: Future[T]


class GrammarCache(Generic[T]):
    """Values by key, the least recently used dropped first. ``budget``: bytes that may be retained.

    A value that was dropped lives on with whoever uses it. Builds run on threads of the cache's own, so that a caller
    may leave (see ``cancellation``) and the others still get theirs. What a build raises goes to everyone who waited
    for it and is not kept. Safe from any thread; no lock is held during a build.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(BUILD_SLOTS, "ninfer-grammar")
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._building: dict[Hashable, _Build[T]] = {}
        self._hits = self._builds = self._waits = self._abandoned = self._evictions = 0

    def get(self, key: Hashable, build: Callable[[], T]) -> tuple[T, CacheOutcome]:
        """The value of a key, built for this call when nobody has or is about to. Raises what ``build`` raises, and
        what ends the caller's scope."""
        outcome: CacheOutcome
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self._hits += 1
                return kept, "hit"
            running = self._building.get(key)
            if running is None:
                outcome, running = "built", self._begin(key, build)
            else:
                outcome = "waited"
                self._waits += 1
            running.waiting += 1
        try:
            return wait_for(running.future), outcome
        finally:
            self._leave(key, running)

    def close(self) -> None:
        """End what is being built. For when the callers' scopes are over."""
        with self._lock:
            for running in self._building.values():
                running.scope.cancel()
        self._threads.shutdown(wait=False)

    def _begin(self, key: Hashable, build: Callable[[], T]) -> _Build[T]:
        running: _Build[T] = _Build()
        try:
            running.future = self._threads.submit(self._run, key, build, running)
        except RuntimeError:  # closed
            checkpoint()
            raise
        self._building[key] = running
        return running

    def _run(self, key: Hashable, build: Callable[[], T], running: _Build[T]) -> T:
        try:
            with running.scope:
                checkpoint()
                value = build()
        except BaseException:
            with self._lock:
                self._abandoned += running.scope.cancelled
                self._forget(key, running)
            raise
        with self._lock:
            self._forget(key, running)
            self._kept[key] = value
            self._builds += 1
            self._trim()
        return value

    def _leave(self, key: Hashable, running: _Build[T]) -> None:
        """One caller less; those who come after the last one start anew."""
        with self._lock:
            running.waiting -= 1
            if running.waiting == 0 and not running.future.done():
                running.scope.cancel()
                self._forget(key, running)

    def _forget(self, key: Hashable, running: _Build[T]) -> None:
        if self._building.get(key) is running:
            del self._building[key]

    def stats(self) -> CacheStats:
        with self._lock:
            counts = self._hits, self._builds, self._waits, self._abandoned, self._evictions
            return CacheStats(len(self._kept), self._retained(), *counts)

    def _retained(self) -> int:
        return sum(value.nbytes for value in self._kept.values())

    def _trim(self) -> None:
        """Drop the oldest until the rest fits. Sizes are asked for anew: values grow while they are used."""
        retained = self._retained()
        while self._kept and retained > self._budget:
            _, dropped = self._kept.popitem(last=False)
            retained -= dropped.nbytes
            self._evictions += 1

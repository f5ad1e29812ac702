"""Compiled languages kept between requests: one build per key, two builds at a time, a budget of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, Literal, Protocol, TypeVar

import attrs

CacheOutcome = Literal["hit", "built", "waited"]

BUILD_SLOTS = 2
"""Builds that may run at once."""


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


@attrs.frozen
class CacheStats:
    """entries and retained_bytes now; hits, builds, waits and evictions since the start."""

    entries: int
    retained_bytes: int
    hits: int
    builds: int
    waits: int
    evictions: int


class GrammarCache(Generic[T]):
    """Values by key, the least recently used dropped first. ``budget``: bytes that may be retained.

    A value that was dropped lives on with whoever uses it. What a build raises goes to everyone who waited for it and
    is not kept. Safe from any thread; no lock is held during a build.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(BUILD_SLOTS)
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._building: dict[Hashable, Future[T]] = {}
        self._hits = self._builds = self._waits = self._evictions = 0

    def get(self, key: Hashable, build: Callable[[], T]) -> tuple[T, CacheOutcome]:
        """The value of a key, built by this call when nobody has or is about to. Raises what ``build`` raises."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                self._hits += 1
                return kept, "hit"
            future = self._building.get(key)
            if future is None:
                mine: Future[T] = Future()
                self._building[key] = mine
        if future is not None:
            value = future.result()
            with self._lock:
                self._waits += 1
            return value, "waited"
        try:
            with self._slots:
                value = build()
        except BaseException as error:
            with self._lock:
                del self._building[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._building[key]
            self._kept[key] = value
            self._builds += 1
            self._trim()
        mine.set_result(value)
        return value, "built"

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(len(self._kept), self._retained(), self._hits, self._builds, self._waits, self._evictions)

    def _retained(self) -> int:
        return sum(value.nbytes for value in self._kept.values())

    def _trim(self) -> None:
        """Drop the oldest until the rest fits. Sizes are asked for anew: values grow while they are used."""
        retained = self._retained()
        while self._kept and retained > self._budget:
            _, dropped = self._kept.popitem(last=False)
            retained -= dropped.nbytes
            self._evictions += 1

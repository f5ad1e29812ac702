"""One build per key, two at a time, and a budget of what is retained."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

import ninfer
from ninfer.cancellation import CancelScope, checkpoint
from ninfer.constraints.cache import BUILD_SLOTS, GrammarCache


@dataclass
class Value:
    nbytes: int = 10


def in_threads(count, work):
    found = [None] * count
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, work(i))) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads, found


def join(threads):
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_one_build_for_everyone():
    cache, go, builds = GrammarCache(1000), threading.Event(), []

    def build():
        builds.append(1)
        go.wait(10)
        return Value()

    threads, found = in_threads(8, lambda _: cache.get("key", build))
    while not builds:
        pass
    go.set()
    join(threads)
    assert len(builds) == 1
    assert len({id(value) for value, _ in found}) == 1
    outcomes = sorted(outcome for _, outcome in found)
    assert outcomes.count("built") == 1
    assert set(outcomes) <= {"built", "waited", "hit"}
    assert cache.get("key", build)[1] == "hit"


def test_two_builds_at_a_time_and_hits_pass_them():
    cache, go, running, peak = GrammarCache(1000), threading.Event(), [0], [0]
    lock = threading.Lock()
    cache.get("kept", Value)

    def build():
        with lock:
            running[0] += 1
            peak[0] = max(peak[0], running[0])
        go.wait(10)
        with lock:
            running[0] -= 1
        return Value()

    threads, _ = in_threads(4, lambda i: cache.get(i, build))
    while running[0] < BUILD_SLOTS:
        pass
    assert cache.get("kept", build)[1] == "hit"
    go.set()
    join(threads)
    assert peak[0] == BUILD_SLOTS == 2


def test_failures_reach_everyone_and_are_not_kept():
    cache, go, started = GrammarCache(1000), threading.Event(), threading.Event()

    def fail():
        started.set()
        go.wait(10)
        raise ValueError("no")

    def attempt(_):
        with pytest.raises(ValueError, match="no"):
            cache.get("key", fail)
        return True

    threads, found = in_threads(3, attempt)
    started.wait(10)
    go.set()
    join(threads)
    assert found == [True] * 3
    assert cache.get("key", Value)[1] == "built"


def test_the_budget_bounds_what_is_retained():
    cache = GrammarCache(35)
    values = [cache.get(i, Value)[0] for i in range(5)]
    stats = cache.stats()
    assert (stats.entries, stats.retained_bytes, stats.evictions) == (3, 30, 2)
    assert cache.get(2, Value) == (values[2], "hit")
    assert cache.get(0, Value)[1] == "built"
    assert cache.get(2, Value)[1] == "hit", "recently used"
    assert cache.get(3, Value)[1] == "built"
    huge = cache.get("huge", lambda: Value(1000))[0]
    assert huge.nbytes == 1000, "usable, though not retained"
    assert cache.stats().entries == 0


def test_a_build_lives_as_long_as_somebody_waits_for_it():
    """Callers come and leave in every order; what was built is right, and what nobody wants ends."""
    cache, go, ended = GrammarCache(1000), threading.Event(), []

    def build():
        try:
            while not go.wait(0.001):
                checkpoint()
        except ninfer.Cancelled:
            ended.append(1)
            raise
        return Value()

    def caller(scope):
        try:
            with scope:
                return cache.get("key", build)
        except ninfer.Cancelled:
            return None

    for leaving, lives in (({0}, True), ({1, 2}, True), ({0, 1, 2}, False)):
        cache.close()
        cache, scopes = GrammarCache(1000), [CancelScope() for _ in range(3)]
        go.clear()
        ended.clear()
        threads, found = in_threads(3, lambda i, scopes=scopes: caller(scopes[i]))
        while cache.stats().waits < 2:
            pass
        for i in leaving:
            scopes[i].cancel()
            threads[i].join(10)
        assert all(found[i] is None for i in leaving)
        if lives:
            go.set()
        join(threads)
        assert all(isinstance(found[i][0], Value) for i in range(3) if i not in leaving)
        cache.close()
        end = time.monotonic() + 10
        while not (lives or cache.stats().abandoned) and time.monotonic() < end:
            time.sleep(0.001)
        assert (cache.stats().builds, cache.stats().abandoned, len(ended)) == ((1, 0, 0) if lives else (0, 1, 1))


def test_a_build_that_has_not_begun_never_does():
    cache, go, begun = GrammarCache(1000), threading.Event(), []

    def build(key):
        begun.append(key)
        go.wait(10)
        return Value()

    threads, _ = in_threads(BUILD_SLOTS, lambda i: cache.get(i, lambda: build(i)))
    while len(begun) < BUILD_SLOTS:
        pass
    with pytest.raises(ninfer.DeadlineExceeded), CancelScope(0.02):
        cache.get("late", lambda: build("late"))
    go.set()
    join(threads)
    cache.close()
    assert cache.stats().builds == BUILD_SLOTS
    assert "late" not in begun

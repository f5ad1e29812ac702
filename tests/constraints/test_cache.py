"""One build per key, two at a time, and a budget of what is retained."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

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

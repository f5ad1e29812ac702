"""Many conversations at once in little memory: each answer is the one a cold engine gives, and in the end nothing is
left anywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import ninfer
from ninfer import CacheOptions, PauseOutcome

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
WORDS = [
    "Ada", "Oslo", "seven", "weather", "hello", "plus", "what", "where", "who", "tell", "me", "about", "the", "cat",
]  # fmt: skip
GREEDY = ninfer.SamplingParams(temperature=0)
CACHES = {
    "little": CacheOptions(device_state_slots=1, host_state_slots=0, host_kv_bytes=0, retained_kv_tokens=0),
    "host": CacheOptions(device_state_slots=2, host_state_slots=6, host_kv_bytes=32 << 20, retained_kv_tokens=512),
    "roomy": CacheOptions(device_state_slots=8, host_state_slots=16, host_kv_bytes=64 << 20, retained_kv_tokens=4096),
}
USED = ("pages.main.used", "pages.main.reserved", "state_slots.used", "host_states.used", "host_bytes.used")
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {}, "int8": {"kv_dtype": "int8"}, "mtp": {"spec": "mtp"},
    "crowded": {"max_concurrency": 8, "kv_capacity": 8 * 1024 * 6 // 10},
}  # fmt: skip
"""Crowded: keys and values for six tenths of what its lanes could use."""


class Soak:
    """Conversations that grow, branch and are edited; some requests are cancelled or rest, some share a session."""

    def __init__(self, seed: int, hot: ninfer.Engine, cold: ninfer.Engine) -> None:
        self.dice = random.Random(seed)
        self.hot, self.cold = hot, cold
        self.histories = [[{"role": "system", "content": self.text(30)}] for _ in range(3)]
        self.done = self.cached = self.compared = self.rested = 0

    def text(self, words: int) -> str:
        return " ".join(self.dice.choice(WORDS) for _ in range(words))

    def batch(self) -> None:
        """Submit a few, cancel some of them, and compare what was answered from the cache."""
        submitted = []
        for _ in range(self.dice.randint(1, 8)):
            history = self.dice.choice(self.histories)
            history = history[: self.dice.choice([1, len(history), len(history)])]
            if history[-1]["role"] == "user":
                history = history[:-1]
            messages = [*history, {"role": "user", "content": self.text(self.dice.choice([2, 5, 40]))}]
            chat = ninfer.Chat(messages, thinking=self.dice.random() < 0.2)
            options = {"max_tokens": self.dice.choice([1, 4, 9, 30]), "ignore_eos": self.dice.random() < 0.3}
            session = self.dice.choice([None, None, "one", "two"])
            handle = self.hot.submit(chat, sampling=GREEDY, session=session, **options)
            submitted.append((messages, chat, options, handle))
        resting = set()
        for *_, handle in submitted:
            if self.dice.random() < 0.2:
                next(iter(handle))  # it runs
                outcome = self.hot.pause(handle, self.dice.choice(["auto", "snapshot", "replay"]))
                if outcome in (PauseOutcome.SNAPSHOT, PauseOutcome.REPLAY):
                    resting.add(handle)
            if self.dice.random() < 0.2:
                handle.cancel()
        for handle in resting:
            self.hot.resume(handle)
        self.rested += len(resting)
        for messages, chat, options, handle in submitted:
            result = handle.result(timeout=120)
            self.done += 1
            self.cached += result.usage.cached_tokens
            if result.finish_reason == "cancelled":
                continue
            if len(messages) < 7 and result.message:
                self.histories.append([*messages, result.message])
            if result.usage.cached_tokens or handle in resting:
                self.compared += 1
                assert result.token_ids == self.cold.generate(chat, sampling=GREEDY, **options).token_ids
        self.histories = self.histories[:3] + self.histories[-20:]


def run(cache: str, engine: str, requests: int, seed: int) -> Soak:
    common: dict[str, Any] = {"max_context": 1024, "progress": False, "max_concurrency": 3}
    with (
        ninfer.Engine(
            TINY, cache=CACHES[cache], concurrent_prefill=True, pause="explicit", **(common | ENGINES[engine])
        ) as hot,
        ninfer.Engine(TINY, cache=CacheOptions(enabled=False), **common, kv_dtype=hot.options.kv_dtype) as cold,
    ):
        before = hot.stats().memory
        soak = Soak(seed, hot, cold)
        while soak.done < requests:
            soak.batch()
        assert soak.compared > soak.done // 8
        assert hot.stats().finished.get("error", 0) == 0
        hot.cache.clear()
        after = hot.stats().memory
        for name in USED:
            assert after[name] == before[name] == 0
        return soak


@pytest.mark.parametrize(("cache", "engine"), [("host", "crowded"), ("little", "mtp")])
def test_answers_do_not_depend_on_what_is_kept(cache: str, engine: str) -> None:
    run(cache, engine, 40, seed=5)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cache", CACHES)
def test_soak(cache: str, engine: str) -> None:
    soak = run(cache, engine, 2000 if (cache, engine) == ("host", "crowded") else 300, seed=len(cache + engine))
    assert soak.rested > 0

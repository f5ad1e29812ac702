"""Pause and resume through the public engine, over the shipped model: answers are those of a request left alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

import ninfer
from ninfer import Chat, OutputConstraint, PauseOutcome, SamplingParams
from ninfer.constraints.matcher import Matcher

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
GREEDY = SamplingParams(temperature=0)
WARM = SamplingParams(temperature=1.2, seed=9, presence_penalty=0.7, frequency_penalty=0.2)
STORY = Chat([{"role": "user", "content": "Tell me a story."}], thinking=True)
PAUSED = (PauseOutcome.SNAPSHOT, PauseOutcome.REPLAY)


def opened(pause: str = "explicit", **options) -> ninfer.Engine:
    chosen = {"device": "cpu", "max_concurrency": 2, "max_context": 512, "progress": False, "pause": pause} | options
    return ninfer.Engine(TINY, **chosen)


@pytest.fixture(scope="module")
def engine() -> Iterator[ninfer.Engine]:
    with opened() as engine:
        yield engine


def interrupted(engine: ninfer.Engine, prompt, mode: str, places: tuple[int, ...] = (2, 5, 11), **options):
    """Events and result of a request that is paused and resumed after some of its deltas."""
    events, outcomes, deltas = [], [], 0
    with engine.submit(prompt, **options) as handle:
        for event in handle:
            events.append(event)
            deltas += isinstance(event, ninfer.Delta)
            if isinstance(event, ninfer.Delta) and deltas in places:
                outcomes.append(engine.pause(handle, mode))
                if outcomes[-1] in PAUSED:
                    engine.resume(handle)
        return events, handle.result(), outcomes


@pytest.mark.parametrize("mode", ["auto", "snapshot", "replay"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_an_answer_is_the_one_without_a_pause(engine, mode, sampling):
    want = engine.generate(STORY, max_tokens=60, sampling=sampling, logprobs=1)
    before = engine.stats()
    events, result, outcomes = interrupted(engine, STORY, mode, max_tokens=60, sampling=sampling, logprobs=1)
    assert (PauseOutcome.REPLAY if mode == "replay" else PauseOutcome.SNAPSHOT) in outcomes
    assert result.token_ids == want.token_ids
    assert result.logprobs == want.logprobs
    assert (result.text, result.finish_reason) == (want.text, want.finish_reason)
    assert sum(isinstance(event, ninfer.GenerationStart) for event in events) == 1
    said = [event for event in events if isinstance(event, ninfer.Delta)]
    assert "".join(d.text for d in said if d.channel == "content") == want.text
    after = engine.stats()
    assert after.completion_tokens - before.completion_tokens == len(want.token_ids)
    assert after.prompt_tokens - before.prompt_tokens == want.usage.prompt_tokens
    assert sum(after.context.hits.values()) - sum(before.context.hits.values()) <= 1, "a resumption is no hit"


@pytest.mark.parametrize("mode", ["snapshot", "replay"])
def test_a_constraint_is_fed_once(engine, mode):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "ages": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    options = {"constraint": OutputConstraint.json_schema(schema), "max_tokens": 120, "sampling": WARM}
    chat = Chat([{"role": "user", "content": "Who is Ada?"}], thinking=False)
    want = engine.generate(chat, **options)
    _, result, outcomes = interrupted(engine, chat, mode, (1, 3, 6), **options)
    assert any(outcome in PAUSED for outcome in outcomes)
    assert result.token_ids == want.token_ids
    assert result.constraint.complete == want.constraint.complete
    if result.finish_reason == "stop":
        jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))


@pytest.mark.parametrize("mode", ["snapshot", "replay"])
def test_a_continued_message_is_fed_once(engine, mode, monkeypatch):
    """Paused inside the JSON that the caller began: the matcher reads the beginning once, then each token once."""
    fed: dict[int, list] = {}

    def counted(name):
        work = getattr(Matcher, name)

        def call(self, *arguments):
            fed.setdefault(id(self), []).append((name, *arguments))
            return work(self, *arguments)

        monkeypatch.setattr(Matcher, name, call)

    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 90},
        },
        "required": ["name", "tags"], "additionalProperties": False,
    }  # fmt: skip
    messages = [
        {"role": "user", "content": "Who is Ada?"},
        {"role": "assistant", "content": '{"name":"Ada","tags":["a",'},
    ]
    chat = Chat(messages, thinking=False, continue_final=True)
    options = {"constraint": OutputConstraint.json_schema(schema), "max_tokens": 450, "sampling": WARM}
    want = engine.generate(chat, **options)
    for name in ("start", "preview", "commit"):
        counted(name)
    _, result, outcomes = interrupted(engine, chat, mode, (1, 2, 3, 4), **options)
    assert any(outcome in PAUSED for outcome in outcomes)
    assert result.token_ids == want.token_ids
    (calls,) = fed.values()
    assert [call[1] for call in calls if call[0] == "start"] == [messages[1]["content"].encode()]
    assert [token for name, *rest in calls if name == "preview" for token in rest[0]] == list(result.token_ids)
    assert result.finish_reason == "stop"
    jsonschema.Draft202012Validator(schema).validate(result.parsed)


def test_a_thinking_budget_goes_on_where_it_was(engine):
    for budget in (3, 4, 9):
        options = {"thinking_budget": budget, "max_tokens": 60, "sampling": GREEDY}
        want = engine.generate(STORY, **options)
        _, result, _ = interrupted(engine, STORY, "auto", (1, 2, 3, 4), **options)
        assert result.token_ids == want.token_ids


def test_a_long_prompt_is_paused_between_its_chunks():
    prompt = ninfer.TokenPrompt([17 + i * 31 % 200 for i in range(400)])
    options = {"max_tokens": 8, "sampling": GREEDY, "ignore_eos": True, "cache": "disabled"}
    with opened(prefill_chunk=8) as engine:
        want = engine.generate(prompt, **options)
        for mode in ("snapshot", "replay"):
            handle = engine.submit(prompt, **options)
            outcomes = set()
            for _ in range(20):
                outcomes.add(engine.pause(handle, mode))
                if outcomes & set(PAUSED):
                    engine.resume(handle)
            assert handle.result().token_ids == want.token_ids
            assert outcomes & set(PAUSED)
        assert engine.stats().context.entries == {"continuation": 0, "shared": 0}


def test_while_paused_nothing_comes_and_others_run(engine):
    handle = engine.submit(STORY, max_tokens=60, sampling=GREEDY)
    for event in handle:
        if isinstance(event, ninfer.Delta):
            break
    assert engine.pause(handle) in PAUSED
    assert engine.pause(handle) is PauseOutcome.NOT_PAUSABLE
    said = handle.text
    others = engine.generate([STORY] * 4, max_tokens=30, sampling=WARM)
    assert all(other.error is None for other in others)
    assert handle.text == said
    assert not handle.done
    stats = engine.stats()
    assert (stats.active, stats.outstanding) == (0, 1)
    engine.resume(handle)
    engine.resume(handle)
    assert handle.result().token_ids == engine.generate(STORY, max_tokens=60, sampling=GREEDY).token_ids
    engine.resume(handle)
    assert engine.pause(handle) is PauseOutcome.ALREADY_FINISHED


@pytest.mark.parametrize("mode", ["snapshot", "replay"])
def test_a_paused_request_can_be_cancelled_and_leaves_nothing(mode):
    with opened(cache=ninfer.CacheOptions(enabled=False)) as engine:
        at_rest = engine.stats().memory
        handle = engine.submit(STORY, max_tokens=200, sampling=WARM, ignore_eos=True)
        next(handle.text_deltas(), None)
        assert engine.pause(handle, mode) in PAUSED
        handle.cancel()
        result = handle.result(timeout=20)
        assert result.finish_reason == "cancelled"
        assert engine.pause(handle) is PauseOutcome.ALREADY_FINISHED
        engine.generate("Hello!", max_tokens=2)
        now = engine.stats().memory
        assert {k: v for k, v in now.items() if k.startswith(("pages", "state_slots"))} == {
            k: v for k, v in at_rest.items() if k.startswith(("pages", "state_slots"))
        }


def test_a_deadline_runs_on_while_paused(engine):
    handle = engine.submit(STORY, max_tokens=400, sampling=WARM, ignore_eos=True, timeout=0.6)
    next(handle.text_deltas(), None)
    assert engine.pause(handle) in PAUSED
    with pytest.raises(ninfer.DeadlineExceeded) as caught:
        handle.result(timeout=20)
    assert caught.value.partial.token_ids


def test_an_engine_closes_over_paused_requests():
    with opened() as engine:
        handles = [engine.submit(STORY, max_tokens=300, sampling=WARM, ignore_eos=True) for _ in range(2)]
        for handle, mode in zip(handles, ("snapshot", "replay")):
            next(handle.text_deltas(), None)
            assert engine.pause(handle, mode) in PAUSED
    for handle in handles:
        with pytest.raises(ninfer.EngineClosed):
            handle.result(timeout=20)


def test_others_may_claim_the_memory_of_a_paused_request():
    """Room for one request alone: the paused one's state has to go, and it reads again what it had read."""
    with opened(
        max_context=256, max_concurrency=1, kv_capacity=256, cache=ninfer.CacheOptions(device_state_slots=0)
    ) as e:
        want = e.generate(STORY, max_tokens=60, sampling=WARM)
        handle = e.submit(STORY, max_tokens=60, sampling=WARM)
        next(handle.text_deltas(), None)
        assert e.pause(handle, "snapshot") in PAUSED
        big = ninfer.TokenPrompt([5 + i % 90 for i in range(200)])
        assert e.generate(big, max_tokens=40, ignore_eos=True).error is None
        e.resume(handle)
        assert handle.result().token_ids == want.token_ids


def test_an_older_request_makes_younger_ones_wait():
    """Resumed, the older request finds its place taken; under "pressure" the younger one yields and ends after it."""
    with opened("pressure", max_concurrency=1) as engine:
        want = engine.generate(STORY, max_tokens=60, sampling=WARM)
        older = engine.submit(STORY, max_tokens=60, sampling=WARM)
        next(older.text_deltas(), None)
        assert engine.pause(older) in PAUSED
        younger = engine.submit(STORY, max_tokens=300, sampling=GREEDY, ignore_eos=True)
        next(younger.text_deltas(), None)
        engine.resume(older)
        assert older.result(timeout=60).token_ids == want.token_ids
        assert not younger.done
        assert len(younger.result(timeout=60).token_ids) == 300


def test_without_pressure_an_older_request_waits():
    with opened(max_concurrency=1) as engine:
        older = engine.submit(STORY, max_tokens=60, sampling=WARM)
        next(older.text_deltas(), None)
        engine.pause(older)
        younger = engine.submit(STORY, max_tokens=100, sampling=GREEDY, ignore_eos=True)
        next(younger.text_deltas(), None)
        engine.resume(older)
        assert len(younger.result(timeout=60).token_ids) == 100
        assert older.result(timeout=60).error is None


def test_what_a_resumed_request_leaves_is_used_as_ever():
    """The conversation goes on from the answer of a request that had been paused, as from any other."""
    chat = Chat([{"role": "user", "content": "What is 17 + 25?"}], thinking=False)
    cached = {}
    for mode in ("never", "snapshot", "replay"):
        with opened() as engine:
            places = () if mode == "never" else (1, 2)
            _, result, _ = interrupted(engine, chat, mode, places, max_tokens=60, sampling=GREEDY, session="s")
            follow = Chat([*chat.messages, result.message, {"role": "user", "content": "And 3 + 4?"}], thinking=False)
            warm = engine.generate(follow, max_tokens=60, sampling=GREEDY, session="s")
            cold = engine.generate(follow, max_tokens=60, sampling=GREEDY, cache="disabled")
            assert warm.token_ids == cold.token_ids
            cached[mode] = warm.usage.cached_tokens
    assert cached["snapshot"] == cached["never"] > 0


def test_waiting_requests_and_other_handles(engine):
    with opened(max_concurrency=1) as other:
        running = other.submit(STORY, max_tokens=200, sampling=WARM, ignore_eos=True)
        next(running.text_deltas(), None)
        waiting = other.submit(STORY, max_tokens=5)
        assert other.pause(waiting) is PauseOutcome.NOT_PAUSABLE
        with pytest.raises(ninfer.InvalidRequest, match="not paused"):
            other.resume(running)
        with pytest.raises(ninfer.StaleHandle):
            engine.pause(running)
        with pytest.raises(ninfer.InvalidRequest, match="mode"):
            other.pause(running, "later")
        with pytest.raises(ninfer.InvalidRequest, match="GenerationHandle"):
            other.pause("running")
        for handle in (running, waiting):
            handle.cancel()


def test_from_a_coroutine(engine):
    async def ask() -> tuple[PauseOutcome, ninfer.GenerationResult]:
        handle = await engine.submit_async(STORY, max_tokens=60, sampling=GREEDY)
        async for event in handle:
            if isinstance(event, ninfer.Delta):
                break
        outcome = await engine.pause_async(handle)
        engine.resume(handle)
        return outcome, await handle

    outcome, result = asyncio.run(ask())
    assert outcome in PAUSED
    assert result.token_ids == engine.generate(STORY, max_tokens=60, sampling=GREEDY).token_ids


def test_never_is_the_default():
    with opened("never") as engine:
        handle = engine.submit(STORY, max_tokens=4)
        for call in (engine.pause, engine.resume):
            with pytest.raises(ninfer.InvalidRequest) as caught:
                call(handle)
            assert caught.value.field == "pause"
        handle.result()
    assert ninfer.EngineOptions().pause == "never"
    with pytest.raises(ninfer.InvalidRequest, match="pause"):
        ninfer.EngineOptions(pause="always")


@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.full)])
def test_pauses_at_random_leave_answers_and_memory_as_they_were(seconds):
    """Several requests at once, paused, resumed and cancelled in any order."""
    import random

    dice = random.Random(7)
    with opened(cache=ninfer.CacheOptions(enabled=False), max_concurrency=3) as engine:
        prompts = [
            Chat([{"role": "user", "content": t}], thinking=False) for t in ("Hello!", "Tell me a story.", "2 + 3?")
        ]
        want = [engine.generate(p, max_tokens=40, sampling=WARM).token_ids for p in prompts]
        at_rest = engine.stats().memory
        end, done = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            running = [(i, engine.submit(prompts[i], max_tokens=40, sampling=WARM)) for i in range(3)]
            for _ in range(12):
                _, handle = dice.choice(running)
                if engine.pause(handle, dice.choice(["auto", "snapshot", "replay"])) in PAUSED and dice.random() < 0.8:
                    engine.resume(handle)
            if dice.random() < 0.2:
                dice.choice(running)[1].cancel()
            for i, handle in running:
                if not handle.done and engine.pause(handle) in PAUSED:
                    engine.resume(handle)
                elif not handle.done:
                    _resume_if_paused(engine, handle)
                result = handle.result(timeout=30)
                done += 1
                if result.finish_reason != "cancelled":
                    assert result.token_ids == want[i]
        engine.generate("Hello!", max_tokens=2)
        now = engine.stats().memory
        assert done > 3
        assert {k: v for k, v in now.items() if k.startswith(("pages", "state_slots"))} == {
            k: v for k, v in at_rest.items() if k.startswith(("pages", "state_slots"))
        }


def _resume_if_paused(engine: ninfer.Engine, handle: ninfer.GenerationHandle) -> None:
    try:
        engine.resume(handle)
    except ninfer.InvalidRequest:
        assert not handle.done or handle.result()

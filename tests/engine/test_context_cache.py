"""The context cache end to end, on the small trained model: what is reused, and that no answer shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ninfer
import ninfer.runtime.instance
from ninfer import CacheOptions, Chat, SamplingParams, TokenPrompt
from ninfer.runtime.costs import GENERIC

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
GREEDY = SamplingParams(temperature=0.0)
ROOMY = CacheOptions(device_state_slots=24, max_continuations=40, max_shared_prefixes=40)
SYSTEM = "You are terse. The code word is heliotrope. " * 4


@pytest.fixture(scope="module", autouse=True)
def fixed_prices():
    """What is chosen must not depend on how fast this machine is just now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ninfer.runtime.instance, "measure_transfers", lambda device: GENERIC.transfers)
        patch.setattr(ninfer.runtime.instance, "measure_prefill", lambda *_: GENERIC.prefill)
        yield


@pytest.fixture(scope="module")
def engine():
    with ninfer.Engine(TINY, max_context=2048, max_concurrency=2, progress=False, cache=ROOMY) as engine:
        yield engine


@pytest.fixture
def fresh(engine):
    engine.cache.clear()
    return engine


def ask(engine, prompt, **options):
    options = {"max_tokens": 12, "sampling": GREEDY, **options}
    return engine.generate(prompt, **options)


def cold(engine, prompt, **options):
    result = ask(engine, prompt, cache="disabled", **options)
    assert result.usage.cached_tokens == 0
    return result


def chat(*turns, system=SYSTEM, **fields):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return Chat([{"role": "system", "content": system}, *messages], thinking=False, **fields)


def common(engine, a, b) -> int:
    """Tokens that two prompts begin with alike."""
    first, second = engine.prepare(a).tokens, engine.prepare(b).tokens
    n = min(len(first), len(second))
    return next((i for i in range(n) if first[i] != second[i]), n)


def same(warm, reference) -> None:
    assert (warm.token_ids, warm.text, warm.finish_reason) == (
        reference.token_ids, reference.text, reference.finish_reason,
    )  # fmt: skip


def test_a_second_turn_reads_only_what_is_new(fresh):
    first = chat("Where is Ada?")
    answer = ask(fresh, first)
    second = chat("Where is Ada?", answer.text, "And Bo?")
    warm = ask(fresh, second)
    same(warm, cold(fresh, second))
    prepared = fresh.prepare(first)
    assert warm.usage.cached_tokens >= prepared.rewrite[0], "at least up to what the second turn cannot change"


@pytest.mark.parametrize(("session", "system"), [(None, ""), ("talk", ""), (None, SYSTEM), ("talk", SYSTEM)])
@pytest.mark.parametrize(
    ("device", "host"), [(1, 0), (1, 8), *(pytest.param(*pair, marks=pytest.mark.full) for pair in ((2, 0), (4, 8)))]
)
def test_every_turn_begins_where_the_last_one_could_be_changed(device, host, session, system):
    """However few states are kept: what lies before that point is read once, turn after turn."""
    cache = CacheOptions(device_state_slots=device, host_state_slots=host, host_kv_bytes=host << 22)
    with ninfer.Engine(TINY, max_context=2048, max_concurrency=1, progress=False, cache=cache) as engine:
        messages, reached = [{"role": "system", "content": system}] if system else [], 0
        for i in range(6):
            messages.append({"role": "user", "content": f"What is {i} + 4? " * 8})
            prompt = Chat(list(messages), thinking=False)
            result = ask(engine, prompt, session=session)
            assert result.usage.cached_tokens == reached
            reached = engine.prepare(prompt).rewrite[0]
            messages.append(result.message)


@pytest.mark.parametrize("suffix", [40, 400, 1300])
def test_a_shared_system_prefix_is_reused_to_the_token(fresh, suffix):
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    prompts = [chat(" ".join([str(k), *(words * suffix)[:suffix]])[: 3 * suffix]) for k in range(3)]
    boundary = fresh.prepare(prompts[0]).boundaries[0]
    results = [ask(fresh, prompt) for prompt in prompts]
    assert [r.usage.cached_tokens for r in results] == [0, boundary, boundary]
    same(results[2], cold(fresh, prompts[2]))


def test_regenerating_an_answer(fresh):
    prompt = chat("What is 3 plus 4?")
    first = ask(fresh, prompt)
    for _ in range(3):
        again = ask(fresh, prompt)
        same(again, first)
        assert again.usage.cached_tokens >= fresh.prepare(prompt).rewrite[0]
    sampled = ask(fresh, prompt, sampling=SamplingParams(temperature=1.0, seed=5))
    same(sampled, cold(fresh, prompt, sampling=SamplingParams(temperature=1.0, seed=5)))


def test_an_edited_last_message(fresh):
    before, after = chat("Where is Ada?", "In the hall.", "And Bo?"), chat("Where is Ada?", "In the hall.", "And Cy?")
    ask(fresh, before)
    edited = ask(fresh, after)
    same(edited, cold(fresh, after))
    assert edited.usage.cached_tokens == fresh.prepare(before).boundaries[0], "the system turn"
    assert edited.usage.cached_tokens <= common(fresh, before, after)


def test_a_branch_left_and_entered_again(fresh):
    stem = ("Where is Ada?", "In the hall.")
    a, b = chat(*stem, "Is she well?"), chat(*stem, "Where is Bo?")
    first = ask(fresh, a)
    ask(fresh, b)
    later = chat(*stem, "Is she well?", first.text, "Good.")
    back = ask(fresh, later)
    same(back, cold(fresh, later))
    assert back.usage.cached_tokens >= fresh.prepare(a).rewrite[0]


def test_a_session_takes_its_own_history_over(fresh):
    history = TokenPrompt(list(range(20, 60)))
    first = ask(fresh, history, session="s", ignore_eos=True)
    longer = TokenPrompt([*history.ids, *first.token_ids, 30, 31])
    second = ask(fresh, longer, session="s", ignore_eos=True)
    assert second.usage.cached_tokens == len(history.ids) + len(first.token_ids) - 1
    same(second, cold(fresh, longer, ignore_eos=True))
    assert [entry.session for entry in fresh.cache.map().entries] == ["s"]


def test_an_exact_prompt_needs_no_prefill(fresh):
    prompt = TokenPrompt(list(range(20, 100)))
    first = ask(fresh, prompt, ignore_eos=True)
    units = fresh.stats().memory["prefill_tokens"]
    again = ask(fresh, prompt, ignore_eos=True)
    same(again, first)
    assert again.usage.cached_tokens == len(prompt.ids)
    assert fresh.stats().memory["prefill_tokens"] == units


def test_two_grammars_on_one_prefix_keep_to_their_own(fresh):
    prompt = TokenPrompt(fresh.prepare(chat("Where is Ada?")).tokens.tolist())
    ask(fresh, prompt)
    for options in (["yes", "no"], ["left", "right"]):
        constraint = ninfer.OutputConstraint.choice(options)
        warm = ask(fresh, prompt, constraint=constraint)
        assert warm.usage.cached_tokens == len(prompt.ids)
        assert warm.text in options
        same(warm, cold(fresh, prompt, constraint=constraint))


def test_what_stands_in_a_reused_prefix_is_known(fresh):
    """The fact is in the part that was not read again."""
    fact = "Extract name and age as JSON: Mia Novak is 34 years old."
    asked = Chat([{"role": "user", "content": fact}], thinking=False)
    for again in range(3):
        result = ask(fresh, asked, max_tokens=60)
        assert "Mia Novak" in result.text
        assert "34" in result.text
        assert (result.usage.cached_tokens > 0) == bool(again)
    assert fresh.prepare(asked).rewrite[0] <= result.usage.cached_tokens


def test_a_cancelled_request_leaves_what_it_had_read(fresh):
    prompt = chat("Tell me a story.")
    handle = fresh.submit(prompt, max_tokens=400, sampling=GREEDY, ignore_eos=True)
    for event in handle:
        if isinstance(event, ninfer.Delta):
            handle.cancel()
    again = ask(fresh, prompt)
    assert again.usage.cached_tokens >= fresh.prepare(prompt).rewrite[0]
    same(again, cold(fresh, prompt))


def test_a_marked_prefix_is_found_again_by_others(fresh):
    system = {"role": "system", "content": SYSTEM, "cache_marker": True}
    for k in range(3):
        result = ask(fresh, Chat([system, {"role": "user", "content": f"{k}?"}], thinking=False))
    assert result.usage.cached_tokens == fresh.prepare(
        Chat([system, {"role": "user", "content": "2?"}], thinking=False)
    ).cache_markers[0]  # fmt: skip
    assert fresh.stats().context.entries["shared"] >= 1


def test_a_disabled_request_leaves_no_trace(fresh):
    before = fresh.stats().memory
    ask(fresh, chat("Where is Ada?"), cache="disabled")
    after = fresh.stats()
    assert after.context.entries == {"continuation": 0, "shared": 0}
    names = [name for name in before if name.endswith((".used", ".reserved"))]
    assert {n: after.memory[n] for n in names} == {n: before[n] for n in names}


def test_the_map_shows_what_is_kept(fresh):
    assert fresh.cache.clear() == 0
    ask(fresh, chat("Where is Ada?"), session="<me>")
    text, page = str(fresh.cache), fresh.cache._repr_html_()
    assert "session_endpoint" in text
    assert "&lt;me&gt;" in page
    assert "<me>" in text
    (entry,) = [e for e in fresh.cache.map().entries if e.session]
    assert entry.device_bytes > 0
    assert fresh.cache.clear() >= 1
    assert "0 entries" in str(fresh.cache)


def test_an_engine_without_a_cache_reuses_nothing():
    options = CacheOptions(enabled=False)
    with ninfer.Engine(TINY, max_context=256, max_concurrency=1, progress=False, cache=options) as engine:
        prompt = TokenPrompt([30] * 40)
        assert [ask(engine, prompt).usage.cached_tokens for _ in range(2)] == [0, 0]
        assert engine.stats().memory["pages.main.used"] == 0


def test_many_prefixes_come_back_from_host_memory():
    """39 prefixes, twice, with room for a few on the device: the second time nearly everything is reused."""
    cache = CacheOptions(
        device_state_slots=3, host_state_slots=90, host_kv_bytes=256 << 20, retained_kv_tokens=512,
        max_shared_prefixes=45, max_continuations=45,
    )  # fmt: skip
    with ninfer.Engine(TINY, max_context=512, max_concurrency=1, progress=False, cache=cache) as engine:

        def prompt(i: int, question: str) -> Chat:
            system = {"role": "system", "content": f"{i} " + SYSTEM, "cache_marker": True}
            return Chat([system, {"role": "user", "content": question}], thinking=False)

        reusable = reused = 0
        for i in range(39):
            ask(engine, prompt(i, "Where is Ada?"), max_tokens=2)
        for i in range(39):
            result = ask(engine, prompt(i, "Where is Bo?"), max_tokens=2)
            reusable += engine.prepare(prompt(i, "Where is Bo?")).cache_markers[0]
            reused += result.usage.cached_tokens
        assert reused >= 0.95 * reusable
        assert engine.stats().context.bytes["h2d"] > 0
        last = prompt(38, "Where is Cy?")
        same(ask(engine, last), cold(engine, last))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host_kv_bytes", 1 << 60), ("host_kv_bytes", 1), ("max_continuations", 1), ("aging_window", 0),
        ("anchor_gap", 3), ("device_state_slots", -1), ("enabled", 1),
    ],
)  # fmt: skip
def test_a_cache_that_cannot_be_is_refused_at_the_start(field, value):
    with pytest.raises(ninfer.InvalidRequest) as caught:
        ninfer.Engine(TINY, max_concurrency=2, progress=False, cache=CacheOptions(**{field: value})).close()
    assert caught.value.field.endswith(field)


def test_reports_are_plain_numbers(fresh):
    ask(fresh, chat("Where is Ada?"))
    ask(fresh, chat("Where is Ada?"))
    context = fresh.stats().context
    assert context.reused_tokens > 0
    assert sum(context.hits.values()) > 0
    json.dumps({name: dict(v) for name in ("hits", "misses", "tiers", "bytes") if (v := getattr(context, name))})


@pytest.fixture
def hosted():
    cache = CacheOptions(device_state_slots=8, host_state_slots=8, host_kv_bytes=64 << 20)
    with ninfer.Engine(TINY, max_context=1024, max_concurrency=2, progress=False, cache=cache) as engine:
        yield engine


def test_histories_are_moved_to_host_memory_when_asked(hosted):
    prompts = {name: chat(f"Where is {name}?") for name in ("Ada", "Bo")}
    for name, prompt in prompts.items():
        ask(hosted, prompt, session=name)
    running = hosted.submit(
        chat("Tell me a story."), max_tokens=300, sampling=GREEDY, ignore_eos=True, cache="disabled"
    )
    next(event for event in running if isinstance(event, ninfer.Delta))
    assert hosted.cache.demote("Ada") == 1
    entries = {entry.session: entry for entry in hosted.cache.map().entries}
    assert {point.tier for point in entries["Ada"].points} == {"host"}
    assert {point.tier for point in entries["Bo"].points} == {"device"}
    assert hosted.cache.demote() >= 1
    assert hosted.cache.demote() == 0, "there is nothing left on the device"
    assert hosted.stats().memory["pages.main.used"] < 20, "what the running request has"
    for name, prompt in prompts.items():
        up = hosted.stats().context.bytes.get("h2d", 0)
        warm = ask(hosted, prompt, session=name)
        assert warm.usage.cached_tokens > 0
        assert hosted.stats().context.bytes["h2d"] > up
        same(warm, cold(hosted, prompt))
    assert len(running.result().token_ids) == 300


def test_without_room_in_host_memory_histories_stay(fresh):
    ask(fresh, chat("Where is Ada?"))
    assert fresh.cache.demote() == 0
    assert all(point.tier == "device" for entry in fresh.cache.map().entries for point in entry.points)
    with pytest.raises(ninfer.InvalidRequest) as caught:
        fresh.cache.demote(3)
    assert caught.value.field == "session"


def test_closing_answers_whoever_waits_for_a_move(hosted, monkeypatch):
    ask(hosted, chat("Where is Ada?"))
    monkeypatch.setattr(type(hosted._core._worker.demotion), "attempt", lambda self: None)
    asked = hosted._core.ask(lambda worker: worker.demotion.ask(None)).result()
    hosted.close()
    with pytest.raises(ninfer.EngineClosed):
        asked.result(timeout=0)


def test_with_one_spare_state_a_new_request_costs_one_resume_point():
    """Two are kept and the new one needs a state of its own: it never waits, and the one that is worth less goes."""
    cache = CacheOptions(device_state_slots=1, host_state_slots=0)
    with ninfer.Engine(TINY, max_context=512, max_concurrency=1, progress=False, cache=cache) as engine:
        ask(engine, Chat([{"role": "user", "content": "Where is Ada?"}], thinking=False))
        (entry,) = engine.cache.map().entries
        assert [point.kind for point in entry.points] == ["turn_closure", "session_endpoint"]
        assert ask(engine, TokenPrompt([30] * 40), cache="disabled").token_ids
        (entry,) = engine.cache.map().entries
        assert [point.kind for point in entry.points] == ["turn_closure"]


def test_a_fault_in_planning_a_move_is_its_callers_own(hosted, monkeypatch):
    ask(hosted, chat("Where is Ada?"))
    program = hosted._core._worker._program

    def broken(owners):
        raise ZeroDivisionError

    for count in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(program, "open_demotion", broken)
            with pytest.raises(ninfer.RequestAborted):
                hosted.cache.demote()
        assert hosted.available, count
    assert hosted.cache.demote() > 0, "what failed has changed nothing"
    assert ask(hosted, chat("Where is Ada?")).usage.cached_tokens > 0

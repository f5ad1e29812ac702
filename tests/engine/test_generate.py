"""Whole answers through the public Engine."""

from __future__ import annotations

import pytest
from fakes.prompts import endless, ends_at, thinking

import ninfer


def test_events_come_in_order_and_end_with_the_result(world):
    w = world()
    handle = w.engine.submit(ends_at(3), max_tokens=20)
    events = list(handle)
    assert events[0] == ninfer.GenerationStart(prompt_tokens=5, cached_tokens=0)
    assert all(isinstance(e, ninfer.Delta) for e in events[1:-1])
    result = events[-1]
    assert isinstance(result, ninfer.GenerationResult)
    assert result is handle.result()
    assert (result.finish_reason, result.stop_reason) == ("stop", "eos")
    assert len(result.token_ids) == 4
    assert result.token_ids == tuple(t for e in events[1:-1] for t in e.token_ids)
    assert result.text == "".join(e.text for e in events[1:-1]) == handle.text == str(result)
    w.check_at_rest()


def test_usage_and_timings(world):
    w = world()
    result = w.engine.generate(ends_at(3), max_tokens=20)
    assert result.usage == ninfer.Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=4, thinking_tokens=0)
    t = result.timings
    assert t.prepare == 0.25
    assert t.constraint_prepare is None
    assert t.ttft >= t.queue >= 0
    assert t.prefill >= 0
    assert t.decode >= 0


def test_budget_and_context_end_by_length_with_their_own_reasons(world):
    w = world(program={"context": 20})
    assert w.engine.generate(endless(), max_tokens=3).stop_reason == "max_tokens"
    result = w.engine.generate(endless(12), max_tokens=50)
    assert (result.finish_reason, result.stop_reason) == ("length", "context")
    assert len(result.token_ids) == 20 - 12 + 1, "the last token needs no room in the context"
    full = w.engine.generate(endless(20), max_tokens=50)
    assert len(full.token_ids) == 1


def test_default_max_tokens_is_the_engines(world):
    w = world(max_tokens=7)
    assert len(w.engine.generate(endless()).token_ids) == 7


def test_sampling_falls_back_to_the_artifacts_defaults(world):
    w = world()
    seen = {}
    plan = w.program.open_session

    def watched(request, *rest):
        seen["sampling"] = request.sampling
        return plan(request, *rest)

    w.program.open_session = watched
    sampling = ninfer.SamplingParams(temperature=0.0, seed=11)
    result = w.engine.generate(ends_at(1), sampling=sampling, logprobs=3)
    spec = seen["sampling"]
    assert (spec.temperature, spec.top_p, spec.top_k, spec.seed, spec.logprobs) == (0.0, 0.9, 20, 11, 3)
    assert result.seed == 11
    assert "temperature=0.7, top_p=0.9, top_k=20" in repr(w.engine)


def test_a_seed_is_drawn_and_reported(world):
    w = world()
    first, second = w.engine.generate([endless(), endless()], max_tokens=4)
    assert first.seed != second.seed
    again = w.engine.generate(endless(), max_tokens=4, sampling=ninfer.SamplingParams(seed=first.seed))
    assert again.token_ids == first.token_ids


def test_logprobs_cover_every_committed_token(world):
    w = world(program={"drafts": 3})
    result = w.engine.generate(ends_at(9), max_tokens=30, logprobs=2)
    assert [lp.token_id for lp in result.logprobs] == list(result.token_ids)
    assert result.logprobs[0].logprob == -float(result.token_ids[0])
    assert len(result.logprobs[0].top) == 2
    assert w.engine.generate(ends_at(2), max_tokens=4).logprobs is None


def test_zero_tokens_is_an_empty_answer_that_occupies_nothing(world):
    w = world(max_outstanding=1)
    blocker = w.engine.submit(endless(), max_tokens=50)
    handle = w.engine.submit(endless(), max_tokens=0)
    assert handle.done
    result = handle.result()
    assert (result.text, result.finish_reason, result.stop_reason) == ("", "length", "max_tokens")
    assert result.usage == ninfer.Usage(prompt_tokens=5)
    assert list(handle) == [result]
    assert w.engine.generate([endless()], max_tokens=0)[0].finish_reason == "length"
    blocker.cancel()
    blocker.result()


def test_thinking_is_a_channel_of_its_own_and_its_budget_is_forced(world):
    w = world(program={"drafts": 3})
    handle = w.engine.submit(thinking(), max_tokens=12, thinking_budget=3)
    thought = "".join(handle.text_deltas("thinking"))
    result = handle.result()
    assert result.thinking == thought
    assert result.token_ids[3:5] == (1, 2)
    assert result.usage.thinking_tokens == 5
    assert len(result.text.split()) == 12 - 5
    assert result.message["reasoning_content"] == thought


def test_a_thinking_budget_of_zero_forces_the_close_before_anything_is_sampled(world):
    w = world()
    result = w.engine.generate(thinking(), max_tokens=6, thinking_budget=0)
    assert result.token_ids[:2] == (1, 2)
    assert len(result.token_ids) == 6
    assert ("control", (0,)) in w.program.units


@pytest.mark.parametrize(("budget", "limit"), [(5, 6), (5, 5), (0, 1)])
def test_without_room_for_the_forced_close_the_request_ends_by_length(world, budget, limit):
    w = world()
    result = w.engine.generate(thinking(), max_tokens=limit, thinking_budget=budget)
    assert (result.finish_reason, result.stop_reason) == ("length", "max_tokens")
    assert len(result.token_ids) <= limit
    w.check_at_rest()


def test_a_close_that_fills_the_budget_exactly_is_still_appended(world):
    w = world()
    result = w.engine.generate(thinking(), max_tokens=5, thinking_budget=3)
    assert result.token_ids[-2:] == (1, 2)
    assert result.finish_reason == "length"


def test_a_tool_call_ends_the_answer(world):
    w = world()
    result = w.engine.chat([{"role": "user", "content": "\xcaabc"}], max_tokens=20)
    assert len(result.token_ids) == 3
    assert result.finish_reason == "tool_calls"
    assert [call.name for call in result.tool_calls] == ["tool"]
    assert result.message["tool_calls"][0]["function"]["name"] == "tool"


def test_drafts_beyond_the_end_are_not_accepted(world):
    w = world(program={"drafts": 3})
    for index in range(1, 12):
        result = w.engine.generate(ends_at(index), max_tokens=40)
        assert len(result.token_ids) == index + 1
        assert result.token_ids[-1] == 0
    for limit in range(1, 12):
        assert len(w.engine.generate(endless(), max_tokens=limit).token_ids) == limit


def test_tokens_do_not_depend_on_company(world):
    alone, together = world(), world(max_concurrency=4, program={"drafts": 2}, concurrent_prefill=True)
    prompts = [ends_at(i + 3, 3 + 2 * i) for i in range(9)]
    sampling = ninfer.SamplingParams(seed=5)
    expected = [alone.engine.generate(p, max_tokens=20, sampling=sampling).token_ids for p in prompts]
    assert [r.token_ids for r in together.engine.generate(prompts, max_tokens=20, sampling=sampling)] == expected


def test_count_tokens_and_prepared_prompts(world):
    w = world()
    prepared = w.engine.prepare("\x04abc")
    assert w.engine.count_tokens("\x04abc") == len(prepared) == 4
    sampling = ninfer.SamplingParams(seed=1)
    answers = {w.engine.generate(prepared, max_tokens=9, sampling=sampling).text for _ in range(3)}
    assert len(answers) == 1


def test_stats_count_what_happened(world):
    w = world()
    w.engine.generate([ends_at(2), ends_at(4)], max_tokens=9)
    stats = w.engine.stats()
    assert (stats.accepted, stats.prompt_tokens, stats.completion_tokens) == (2, 10, 8)
    assert stats.finished == {"stop": 2}
    assert stats.decode_rows == 6
    assert stats.prefill_units == 2
    assert stats.memory == {"pages.used": 0}

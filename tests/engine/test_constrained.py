"""Constrained answers of a small random model: whatever it writes, a finished answer belongs to the language."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ninfer
from ninfer import OutputConstraint
from ninfer.models.qwen3_5.synthetic import synthetic_source

HOT = ninfer.SamplingParams(seed=3, temperature=40.0, top_k=0)  # random weights are very sure of themselves
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2, None]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[ninfer.Engine]:
    source = synthetic_source("tiny", "q8")
    with ninfer.Engine(source, max_context=512, max_concurrency=4, progress=False, phase_timings=True) as engine:
        yield engine


def chat(thinking: bool = False, **more: Any) -> ninfer.Chat:
    return ninfer.Chat([{"role": "user", "content": "Where is Ada?"}], thinking=thinking, **more)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "constraint",
    [
        OutputConstraint.choice(["ok", "error", " a"]),
        OutputConstraint.regex("[a-c]{2,4}x?"),
        OutputConstraint.grammar('root ::= " status=" ("ok" | "error") "\\n"'),
        OutputConstraint.json_schema(SCHEMA),
    ],
    ids=lambda constraint: constraint.kind,
)
def test_a_finished_answer_belongs_to_the_language(engine, constraint, thinking):
    for seed in range(4):
        sampling = ninfer.SamplingParams(seed=seed, temperature=40.0, top_k=0)
        budget = 7 if thinking else None
        result = engine.generate(
            chat(thinking), constraint=constraint, max_tokens=200, sampling=sampling, thinking_budget=budget
        )
        assert (result.finish_reason, result.stop_reason) == ("stop", "eos")
        assert constraint.accepts(result.text)
        report = result.constraint
        assert (report.kind, report.branch, report.complete, report.terminated) == (
            constraint.kind, "content", True, True,
        )  # fmt: skip
        assert report.masks >= result.usage.completion_tokens - 4
        if constraint.kind == "json_schema":
            assert result.parsed == json.loads(result.text)
        else:
            assert result.parsed is None


def test_a_cut_answer_says_so(engine):
    constraint = OutputConstraint.regex("[a-z]{50}")
    result = engine.generate(chat(), constraint=constraint, max_tokens=5, sampling=HOT)
    assert result.finish_reason == "length"
    assert not result.constraint.complete
    whole = engine.generate(chat(), constraint=OutputConstraint.regex("[a-z]+"), max_tokens=5, sampling=HOT)
    assert whole.constraint.complete
    assert not whole.constraint.terminated or whole.stop_reason == "eos"


def test_neighbours_are_not_touched(engine):
    free = {"max_tokens": 12, "ignore_eos": True, "sampling": HOT}
    alone = engine.generate(ninfer.TokenPrompt([5, 6, 7]), **free).token_ids
    handles = [
        engine.submit(ninfer.TokenPrompt([5, 6, 7]), **free),
        engine.submit(chat(), constraint=OutputConstraint.regex("[a-z]{30}"), sampling=HOT),
        engine.submit(chat(), constraint=OutputConstraint.json_object(), max_tokens=20, sampling=HOT),
    ]
    results = [handle.result() for handle in handles]
    assert results[0].token_ids == alone
    assert results[0].constraint is None
    assert len(results[1].text) == 30


def test_raw_prompts_publish_their_language(engine):
    constraint = OutputConstraint.grammar('root ::= "<|im_end|>" "é"')
    result = engine.generate(ninfer.TextPrompt("x"), constraint=constraint, sampling=HOT)
    assert (result.text, result.stop_reason) == ("<|im_end|>é", "eos")


def test_contradictions_are_refused(engine):
    constraint = OutputConstraint.regex("a")
    for field, value in (("stop", "x"), ("stop_token_ids", [3]), ("ignore_eos", True)):
        with pytest.raises(ninfer.ConstraintCombination) as caught:
            engine.generate("hi", constraint=constraint, **{field: value})
        assert caught.value.field == field
    with pytest.raises(ninfer.InvalidRequest) as wrong:
        engine.generate("hi", constraint="a+")
    assert wrong.value.field == "constraint"
    with pytest.raises(ninfer.InvalidRegex):
        engine.generate("hi", constraint=OutputConstraint.regex("(a"))
    assert engine.stats().outstanding == 0


def test_continued_answers(engine):
    def go_on(content: str) -> ninfer.GenerationResult:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        prompt = ninfer.Chat(messages, thinking=False, continue_final=True)
        return engine.generate(prompt, constraint=OutputConstraint.json_schema(SCHEMA), sampling=HOT, max_tokens=200)

    result = go_on('{"name":')
    whole = '{"name":' + result.text
    assert OutputConstraint.json_schema(SCHEMA).accepts(whole)
    assert result.parsed == json.loads(whole)
    with pytest.raises(ninfer.ConstraintPrefix) as caught:
        go_on('{"nam3')
    assert caught.value.offset == 5


def test_a_dead_end_ends_its_own_row_alone(engine):
    """A grammar may name every text token as excluded, so that nothing can follow."""
    text = [i for i in range(engine._frontend.vocab_size) if engine._frontend._is_text(i)]
    grammar = f'root ::= "ab" ExcludeToken({", ".join(map(str, text))})'
    before = engine.stats().constraints.get("dead_ends", 0)
    handles = [
        engine.submit(chat(), constraint=OutputConstraint.regex("[a-z]{20}"), sampling=HOT),
        engine.submit(chat(), constraint=OutputConstraint.grammar(grammar), sampling=HOT),
        engine.submit(ninfer.TokenPrompt([5, 6]), max_tokens=20, ignore_eos=True, sampling=HOT),
    ]
    with pytest.raises(ninfer.ConstraintDeadEnd) as caught:
        handles[1].result()
    partial = caught.value.partial
    assert partial.text == "ab"
    assert not partial.constraint.complete
    assert caught.value.position == partial.usage.completion_tokens
    assert len(handles[0].result().text) == 20
    assert len(handles[2].result().token_ids) == 20
    assert engine.stats().constraints["dead_ends"] == before + 1


def test_forced_and_natural_closes_reach_the_same_turn(engine):
    """The bytes behind the framing are content, the leading blank included."""
    constraint = OutputConstraint.grammar('root ::= " a" [xy]')
    for budget in (0, 1, 3, 9):
        result = engine.generate(chat(True), constraint=constraint, thinking_budget=budget, max_tokens=60, sampling=HOT)
        assert result.text in (" ax", " ay")
        assert result.constraint.terminated
        assert "</think>" not in result.thinking


def test_languages_are_compiled_once(engine):
    before = engine.stats().constraints
    constraints = [OutputConstraint.choice(order) for order in (["b", "a", "b"], ["a", "b"])]
    outcomes = [engine.generate("hi", constraint=c, sampling=HOT).constraint.cache for c in constraints]
    assert outcomes[1] == "hit"
    after = engine.stats().constraints
    assert after["requests"] - before["requests"] == 2
    assert after["builds"] - before["builds"] == (outcomes[0] == "built")
    assert after["index_bytes"] > 0


def test_the_process_stays_light():
    code = (
        "import sys, ninfer\n"
        "from ninfer.models.qwen3_5.synthetic import synthetic_source\n"
        "with ninfer.Engine(synthetic_source('tiny', 'q8'), max_context=64, progress=False) as engine:\n"
        "    engine.generate('hi', max_tokens=2)\n"
        "    assert 'tvm_ffi' not in sys.modules and engine.stats().constraints['index_bytes'] == 0\n"
        "    print(engine.generate(ninfer.TextPrompt('hi'), constraint=ninfer.OutputConstraint.choice(['yes'])).text)\n"
        "print([m for m in ('torch', 'transformers', 'triton', 'xgrammar', 'pydantic') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["yes", "[]"], done.stderr


def test_counters_settle_however_a_request_ends(engine):
    """Finished, cut, cancelled while it runs, cancelled while it waits: each is counted once."""
    schema = OutputConstraint.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 500})

    def submit(**options: Any) -> ninfer.RequestHandle:
        return engine.submit(chat(), constraint=schema, sampling=HOT, **options)

    before = engine.stats().constraints
    reports = [engine.generate(chat(), constraint=OutputConstraint.choice(["ok"])).constraint]
    reports.append(submit(max_tokens=7).result().constraint)
    running = [submit(max_tokens=400) for _ in range(4)]
    waiting = submit(max_tokens=400)
    waiting.cancel()
    for handle in running:
        next(event for event in handle if isinstance(event, ninfer.Delta))
        handle.cancel()
    results = [handle.result() for handle in (*running, waiting)]
    assert [result.finish_reason for result in results] == ["cancelled"] * 5
    reports += [result.constraint for result in results]
    after = engine.stats().constraints
    counted = {name: after[name] - before.get(name, 0) for name in ("requests", "complete", "masks", "mask_h2d_bytes")}
    assert counted == {
        "requests": 7,
        "complete": sum(report.complete for report in reports),
        "masks": sum(report.masks for report in reports),
        "mask_h2d_bytes": sum(report.mask_h2d_bytes for report in reports),
    }
    assert [report.terminated for report in reports] == [True] + [False] * 6
    assert all(report.masks >= 1 for report in reports), "the first mask is made before the queue"
    del running, waiting, handle, results
    gc.collect()
    assert engine.stats().constraints["matchers"] == before["matchers"]


def test_preparation_is_part_of_the_time_to_the_first_token_once(engine):
    constraint = OutputConstraint.json_schema({"enum": [f"a value no other test has {i}" for i in range(40)]})
    begin = time.perf_counter()
    handle = engine.submit(chat(), constraint=constraint, sampling=HOT)
    next(event for event in handle if isinstance(event, ninfer.Delta))
    seen = time.perf_counter() - begin
    timings = handle.result().timings
    assert timings.constraint_prepare > 0
    assert timings.constraint_prepare + timings.prefill <= timings.ttft <= seen


def test_free_requests_pay_nothing(monkeypatch):
    """No index, no matcher, no masks; prompts with tools that are not held to anything included."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a free request has no business here")

    monkeypatch.setattr("ninfer.constraints.masks.BatchMasks.__init__", never)
    monkeypatch.setattr("ninfer.constraints.matcher.Matcher.__init__", never)
    monkeypatch.setattr("ninfer.constraints.service.ConstraintService.open", never)
    tools = [ninfer.Tool(name="f", parameters={"type": "object"})]
    with ninfer.Engine(synthetic_source("tiny", "q8"), max_context=256, max_concurrency=3, progress=False) as engine:
        free = ninfer.ToolChoice(constraints="automatic")
        handles = [
            engine.submit("hi", max_tokens=6, ignore_eos=True),
            engine.submit(ninfer.TokenPrompt([5, 6]), max_tokens=6, ignore_eos=True, sampling=HOT),
            engine.submit(chat(tools=tools), max_tokens=6, ignore_eos=True, tool_choice=free),
        ]
        assert [len(handle.result().token_ids) for handle in handles] == [6, 6, 6]
        stats = engine.stats()
        assert stats.constraints["index_bytes"] == stats.constraints.get("masks", 0) == stats.constraints["builds"] == 0

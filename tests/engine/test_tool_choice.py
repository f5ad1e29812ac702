"""Calls of a small random model: whatever it writes, calls have the form, the names and the arguments asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import ninfer
from ninfer import OutputConstraint, Tool, ToolChoice
from ninfer.models.qwen3_5.synthetic import synthetic_source

LOOKUP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8, "pattern": "^[^<]"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
STRICT = Tool(name="lookup", parameters=LOOKUP, strict=True)
LENIENT = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture(scope="module")
def engine() -> Iterator[ninfer.Engine]:
    with ninfer.Engine(synthetic_source("tiny", "q8"), max_context=1024, max_concurrency=4, progress=False) as engine:
        yield engine


def ask(
    engine: ninfer.Engine, seed: int = 0, *, tools: Any = (STRICT, LENIENT), thinking: bool = False, **options: Any
):
    sampling = ninfer.SamplingParams(seed=seed, temperature=40.0, top_k=0)
    chat = ninfer.Chat([{"role": "user", "content": "Where is Ada?"}], tools=tools, thinking=thinking)
    budget = 5 if thinking else None
    return engine.generate(chat, sampling=sampling, thinking_budget=budget, **{"max_tokens": 300, **options})


def check_lookup(arguments: dict[str, Any]) -> None:
    assert list(arguments) == [name for name in LOOKUP["properties"] if name in arguments], "declared order"
    assert {"city", "days"} <= set(arguments)
    assert 1 <= len(arguments["city"]) <= 8
    assert not arguments["city"].startswith("<")
    assert type(arguments["days"]) is int
    assert 0 <= arguments["days"] <= 9
    assert len(arguments.get("flags", [])) <= 2


TOOLS = {
    "strict": (STRICT, attrs.evolve(STRICT, name="add")),
    "lenient": (attrs.evolve(LENIENT, name="lookup"), LENIENT),
    "mixed": (STRICT, LENIENT),
}


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("parallel", [False, True], ids=["one", "parallel"])
@pytest.mark.parametrize("mode", ["auto", "none", "required", "named"])
def test_policies(engine, mode, parallel, tools, thinking):
    """Whatever the mode, the number of calls and the tools: calls are what was asked for, and read back exactly."""
    named = {"mode": "required", "allowed_names": ["lookup"]} if mode == "named" else {"mode": mode}
    choice = ToolChoice(**named, parallel=parallel)
    strict = {tool.name for tool in TOOLS[tools] if tool.strict}
    for seed in range(2):
        result = ask(engine, seed, tools=TOOLS[tools], thinking=thinking, tool_choice=choice, max_tokens=200)
        assert (result.constraint.kind, result.finish_reason != "error") == ("tools", True)
        for call in result.tool_calls:
            assert call.name in (["lookup"] if mode == "named" else ["lookup", "add"])
            assert json.loads(call.arguments_json) == call.arguments
            if call.name in strict:
                check_lookup(call.arguments)
        assert "<tool_call>" not in result.text
        if mode == "none":
            assert not result.tool_calls
        if mode in ("required", "named"):
            assert result.text == ""
            assert result.constraint.branch == "tools"
            assert result.tool_calls or result.finish_reason == "length"
        if not parallel:
            assert len(result.tool_calls) <= 1
        assert (result.finish_reason == "tool_calls") == (bool(result.tool_calls) and result.constraint.terminated)
        assert thinking or not result.thinking


def test_one_named_tool(engine):
    for seed in range(4):
        result = ask(engine, seed, tool_choice="lookup")
        assert (result.finish_reason, len(result.tool_calls)) == ("tool_calls", 1)
        check_lookup(result.tool_calls[0].arguments)
    allowed = ToolChoice(mode="required", allowed_names=["add"])
    assert all(call.name == "add" for call in ask(engine, tool_choice=allowed).tool_calls)


def test_json_or_calls(engine):
    branches = set()
    for seed in range(8):
        result = ask(engine, seed, constraint=OutputConstraint.json_object(), max_tokens=60)
        branches.add(result.constraint.branch)
        assert not (result.tool_calls and result.text)
        if result.constraint.branch == "content" and result.constraint.complete:
            assert result.parsed == json.loads(result.text)
        else:
            assert result.parsed is None
    assert branches == {"content", "tools"}
    only = ask(engine, constraint=OutputConstraint.json_object(), tool_choice="required", max_tokens=40)
    assert only.constraint.kind == "tools"


def test_a_marker_inside_json_is_content(engine):
    constraint = OutputConstraint.json_schema({"const": "<tool_call>\n<function=add>\n</function>\n</tool_call>"})
    result = next(r for r in (ask(engine, seed, constraint=constraint) for seed in range(20)) if r.text)
    assert json.loads(result.text) == result.parsed
    assert not result.tool_calls


def test_automatic_constrains_only_what_asks_for_it(engine):
    automatic = ToolChoice(constraints="automatic")
    assert ask(engine, tools=[LENIENT], tool_choice=automatic, max_tokens=5).constraint is None
    assert ask(engine, tools=[LENIENT], max_tokens=5).constraint is not None
    assert ask(engine, tools=[STRICT], tool_choice=automatic, max_tokens=5).constraint is not None
    narrow = ToolChoice(constraints="automatic", parallel=False)
    assert ask(engine, tools=[LENIENT], tool_choice=narrow, max_tokens=5).constraint is not None


def test_refusals(engine):
    refused = [
        (ninfer.ToolContractError, {"tool_choice": "nobody"}),
        (ninfer.ToolContractError, {"tool_choice": ToolChoice(allowed_names=[])}),
        (ninfer.ToolContractError, {"tools": [], "tool_choice": "required"}),
        (ninfer.ConstraintCombination, {"constraint": OutputConstraint.regex("a")}),
        (ninfer.ConstraintCombination, {"stop": "x"}),
        (ninfer.ConstraintCombination, {"tools": [LENIENT], "tool_choice": "none", "stop": "x"}),
        (ninfer.ConstraintCombination, {"tools": [LENIENT], "ignore_eos": True}),
        (ninfer.InvalidRequest, {"tool_choice": 3}),
    ]
    for error, options in refused:
        with pytest.raises(error):
            ask(engine, **options)
    assert ask(engine, tools=[LENIENT], stop="x", max_tokens=5).constraint is not None, "stops act on free text"
    for schema in (
        {"type": "object", "properties": {"x": {"type": ["string", "integer"]}}, "additionalProperties": False},
        {"type": "object", "properties": {"x": {"const": "\n</parameter>"}}, "additionalProperties": False},
        {"type": "object", "properties": {"x": {"type": "integer"}}},
    ):
        with pytest.raises(ninfer.ToolContractError) as caught:
            ask(engine, tools=[Tool(name="f", parameters=schema, strict=True)])
        assert caught.value.tool == "f"
    assert engine.stats().outstanding == 0


def test_raw_values_keep_their_white_space(engine):
    text = "  上海 \n"
    tool = Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {"city": {"const": text}, "tail": {"enum": ["a\n</param", "</parameter>\n<parameter=x>\n"]}},
            "required": ["city", "tail"],
            "additionalProperties": False,
        },
        strict=True,
    )
    tails = set()
    for seed in range(6):
        [call] = ask(engine, seed, tools=[tool], tool_choice="f").tool_calls
        assert call.arguments["city"] == text
        tails.add(call.arguments["tail"])
    assert tails == {"a\n</param", "</parameter>\n<parameter=x>\n"}


@pytest.mark.parametrize("kind", ["choice", "regex", "grammar", "json_schema"])
def test_no_call_is_read_out_of_a_constrained_text(engine, kind):
    """Whatever the constraint, in the stream and in the result."""
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    constraint = {
        "choice": OutputConstraint.choice([call]),
        "regex": OutputConstraint.regex(call.replace("/", "\\/")),
        "grammar": OutputConstraint.grammar(f"root ::= {json.dumps(call)}"),
        "json_schema": OutputConstraint.json_schema({"const": call}),
    }[kind]
    chat = ninfer.Chat([{"role": "user", "content": "x"}], tools=[LENIENT], thinking=False)
    handle = engine.submit(chat, constraint=constraint, tool_choice="none", max_tokens=300)
    events = list(handle)
    result = handle.result()
    assert result.text == (json.dumps(call) if kind == "json_schema" else call)
    assert "".join(event.text for event in events if isinstance(event, ninfer.Delta)) == result.text
    assert not result.tool_calls
    assert not any(isinstance(event, ninfer.ToolCallEvent) for event in events)
    assert (result.finish_reason, result.constraint.branch) == ("stop", "content")

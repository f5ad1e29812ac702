"""Tool-use tasks: declarations, requests that need one or several calls, tool results and the answers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools import CITY, SPECS, Spec, invented_spec
from words import Values, listed

Message = dict[str, Any]


@dataclass(frozen=True)
class Declared:
    """A spec as this conversation declares it: the tool's name and the key of every parameter."""

    spec: Spec
    name: str
    keys: tuple[str, ...]
    tool: Mapping[str, Any]


def _declare(v: Values, spec: Spec) -> Declared:
    name = v.any(spec.names[:2]) if v.coin(0.6) else v.any(spec.names)
    keys = tuple(p.keys[0] if v.coin(0.7) else v.any(p.keys) for p in spec.params)
    described = v.coin(0.5)
    properties: dict[str, Any] = {}
    for param, key in zip(spec.params, keys, strict=True):
        entry: dict[str, Any] = {"type": param.type}
        if param.type == "array":
            entry["items"] = {"type": "string"}
        if param.choices:
            entry["enum"] = list(param.choices)
        if described and param.about:
            entry["description"] = param.about
        properties[key] = entry
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if v.coin(0.8):
        schema["required"] = [k for p, k in zip(spec.params, keys, strict=True) if not p.phrase]
    function: dict[str, Any] = {"name": name}
    if v.coin(0.9):
        function["description"] = v.any(spec.about)
    function["parameters"] = schema
    return Declared(spec, name, keys, {"type": "function", "function": function})


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return listed(value) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Call:
    declared: Declared
    values: Mapping[str, Any]
    """Values by the first key of each parameter."""

    @property
    def arguments(self) -> dict[str, Any]:
        pairs = zip(self.declared.spec.params, self.declared.keys, strict=True)
        return {key: self.values[p.keys[0]] for p, key in pairs if p.keys[0] in self.values}

    @property
    def message(self) -> Message:
        return {"type": "function", "function": {"name": self.declared.name, "arguments": self.arguments}}

    @property
    def thought(self) -> str:
        shown = ", ".join(f"{key} = {_said(value)}" for key, value in self.arguments.items())
        return f"call {self.declared.name} with {shown}"


def _ask(v: Values, declared: Declared) -> tuple[str, Call]:
    """A request in words, without its final mark, and the call it needs."""
    values: dict[str, Any] = {}
    text = v.any(declared.spec.requests)
    for param in declared.spec.params:
        if param.phrase:
            if not v.coin(0.3):
                continue
            text += param.phrase
        values[param.keys[0]] = param.draw(v)
    return text.format_map({key: _said(value) for key, value in values.items()}), Call(declared, values)


def _close(v: Values, text: str) -> str:
    question = text.split()[0] in ("What", "How", "What's", "Where")
    return text + ("?" if question else v.any((".", ".", "")))


def _finish(v: Values, calls: list[Call]) -> list[Message]:
    """Tool results for the calls and the answer that reports them."""
    messages: list[Message] = []
    replies = []
    for call in calls:
        result = {key: draw(v) for key, draw in call.declared.spec.result.items()}
        text = (
            json.dumps(result, ensure_ascii=False) if v.coin(0.8) else ", ".join(f"{k}: {x}" for k, x in result.items())
        )
        messages.append({"role": "tool", "content": text})
        shown = {key: _said(value) for key, value in {**result, **call.values}.items()}
        replies.append(call.declared.spec.reply.format_map(shown))
    answer = {"role": "assistant", "content": " ".join(replies), "reasoning_content": "report the result"}
    return [*messages, answer]


def tool_dialogue(v: Values, parallel: bool | None = None, finish: bool | None = None) -> dict[str, Any]:
    """One tool conversation: ``{"tools", "messages"}``. The last assistant turn calls, reports or declines.

    parallel: ask for several calls at once; finish: go on after the calls to their results. None draws either.
    """
    while True:
        made = _tool_dialogue(v, parallel, finish)
        if v.owns(made["messages"][0]["content"]):
            return made


def _tool_dialogue(v: Values, parallel: bool | None, finish: bool | None) -> dict[str, Any]:
    wanted = invented_spec(v) if v.coin(0.35) else v.any(SPECS)
    others = [s for s in v.rng.sample(SPECS, v.any((0, 0, 1, 1, 2, 3))) if s is not wanted]
    declared = [_declare(v, s) for s in [wanted, *others]]
    main = declared[0]
    v.rng.shuffle(declared)
    tools = [d.tool for d in declared]
    if parallel is None:
        parallel = v.coin(0.25)
    if parallel is False and finish is None and v.coin(0.05):
        stranger = v.any([s for s in SPECS if s not in [d.spec for d in declared]])
        text, _ = _ask(v, _declare(v, stranger))
        refusal = {
            "role": "assistant",
            "content": "I have no tool for that.",
            "reasoning_content": "no tool fits",
        }
        return {"tools": tools, "messages": [{"role": "user", "content": _close(v, text)}, refusal]}
    text, call = _ask(v, main)
    calls = [call]
    if parallel:
        again = v.coin(0.5) or len(declared) == 1
        second, other = _ask(v, main if again else v.any([d for d in declared if d is not main]))
        calls.append(other)
        if again and main.spec.params == (CITY,) and v.coin(0.7):
            text = f"{text} and in {other.values['city']}" if " in " in text else f"{text} and {second}"
        else:
            text = f"{_close(v, text).rstrip('.')}. {second}".replace("?.", "?")
    ask = {"role": "user", "content": _close(v, text)}
    reasoning = "\n".join(c.thought for c in calls)
    act = {
        "role": "assistant",
        "content": "",
        "reasoning_content": reasoning,
        "tool_calls": [c.message for c in calls],
    }
    messages: list[Message] = [ask, act]
    if v.coin(0.5) if finish is None else finish:
        messages += _finish(v, calls)
    return {"tools": tools, "messages": messages}

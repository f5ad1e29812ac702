"""OpenAI's Responses: the question. Nothing is stored, so a conversation comes whole with each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from ninfer.gateway.http.errors import BadRequest
from ninfer.gateway.http.responses_answer import ResponsesEncoder
from ninfer.gateway.http.shapes import (
    Either,
    Field,
    Flag,
    Free,
    Integer,
    Labels,
    Many,
    Real,
    Record,
    Tagged,
    Text,
    field,
    fixed,
    neutral,
    refused,
)
from ninfer.gateway.http.translate import (
    CACHE_BREAKPOINT,
    EFFORTS,
    EXTENSIONS,
    MAX_TOKENS,
    SCHEMA_FORMAT,
    SESSION,
    TOP_K,
    Call,
    Paths,
    Served,
    cache_of,
    check_model,
    constraint_of,
    sampling_of,
    thinking_of,
    tool_of,
)
from ninfer.inputs import Chat, Tool
from ninfer.options import RequestOptions, ToolChoice

# -- fields --------------------------------------------------------------------------------------------------

_INPUT_TEXT = Record((field("text", Text(), "the text", required=True), CACHE_BREAKPOINT))
_INPUT = Either(text=Text(), array=Many(Tagged("type", {"input_text": _INPUT_TEXT}), 1))
_OUTPUT_TEXT = Record(
    (
        field("text", Text(), "the text", required=True),
        fixed("annotations", "answers here have none", []),
        neutral("logprobs", Many(Free()), "of an earlier answer"),
    )
)
_PARTS = Tagged("type", {"input_text": _INPUT_TEXT, "output_text": _OUTPUT_TEXT})
_STATUS = neutral("status", Text(("in_progress", "completed", "incomplete")), "of an earlier answer's item")
_ID = neutral("id", Text(), "of an earlier answer's item")
ITEM = Tagged(
    "type",
    {
        "message": Record(
            (
                field("role", Text(("user", "assistant", "system", "developer")), "who says it", required=True),
                field("content", Either(text=Text(), array=Many(_PARTS, 1)), "text, or parts of text", required=True),
                _ID,
                _STATUS,
                *refused("phase"),
            )
        ),
        "reasoning": Record(
            (
                field(
                    "content",
                    Many(Tagged("type", {"reasoning_text": Record((field("text", Text(), "", required=True),))})),
                    "what was thought; shown to the model where its template does",
                ),
                fixed("summary", "answers here have none", []),
                _ID,
                _STATUS,
                *refused("encrypted_content"),
            )
        ),
        "function_call": Record(
            (
                field("call_id", Text(), "what the result refers to", required=True),
                field("name", Text(min_length=1), "the function", required=True),
                field("arguments", Text(), "JSON text of an object", required=True),
                field("namespace", Text(), "the namespace it was declared in"),
                _ID,
                _STATUS,
                *refused("async", "caller"),
            )
        ),
        "function_call_output": Record(
            (
                field("call_id", Text(), "the call it belongs to", required=True),
                field("output", _INPUT, "what the function returned", required=True),
                neutral("name", Text(), "the function; the call says it already"),
                neutral("namespace", Text(), "the same"),
                _ID,
                _STATUS,
                *refused("caller"),
            )
        ),
    },
    absent="message",
)
_FUNCTION = (
    field("name", Text(min_length=1), "1..256 characters without newline or `>`", required=True),
    field("description", Text(), "shown to the model"),
    field("parameters", Free(), "JSON Schema of the arguments"),
    field("strict", Flag(), "hold the arguments to the schema; absent is false"),
    field("cache_marker", Flag(), "extension: the prompt may be reused up to the end of this declaration"),
    fixed("defer_loading", "every tool is shown", False),
    fixed("allowed_callers", "the model", ["direct"]),
    *refused("async", "output_schema"),
)
TOOL = Tagged(
    "type",
    {
        "function": Record(_FUNCTION),
        "namespace": Record(
            (
                field("name", Text(min_length=1), "the model sees its functions as `name.function`", required=True),
                field("description", Text(), "shown before that of each function", required=True),
                field("tools", Many(Tagged("type", {"function": Record(_FUNCTION)}), 1), "functions", required=True),
            )
        ),
    },
)
_NAMED: tuple[Field, ...] = (
    field("name", Text(), "a declared function; `namespace.function` where the name alone is not clear", required=True),
)
FIELDS = Record(
    (
        field("model", Text(), "the served model's id", required=True),
        field("input", Either(text=Text(), array=Many(ITEM, 1)), "a user message, or the conversation", required=True),
        field("instructions", Text(), "the system message, before everything else"),
        field("stream", Flag(), "send the answer as it comes"),
        field("max_output_tokens", Integer(1, MAX_TOKENS), "output budget, tokens, thinking included"),
        field("temperature", Real(0, 2), "0 is greedy"),
        field("top_p", Real(0, 1, open=True), "probability mass of the candidates"),
        field("top_logprobs", Integer(0, 20), "alternatives to give beside the log-probability of each token"),
        field("include", Many(Text(("message.output_text.logprobs",))), "give log-probabilities"),
        field("tools", Many(TOOL), "functions the model may call"),
        field(
            "tool_choice",
            Either(
                text=Text(("auto", "none", "required")),
                record=Tagged(
                    "type",
                    {
                        "function": Record(_NAMED),
                        "allowed_tools": Record(
                            (
                                field("mode", Text(("auto", "required")), "whether to call one", required=True),
                                field(
                                    "tools",
                                    Many(Tagged("type", {"function": Record(_NAMED)}), 1),
                                    "the functions that may be called",
                                    required=True,
                                ),
                            )
                        ),
                    },
                ),
            ),
            "whether and what to call",
        ),
        field("parallel_tool_calls", Flag(), "false: at most one call"),
        field(
            "text",
            Record(
                (
                    field(
                        "format",
                        Tagged(
                            "type",
                            {"text": Record(()), "json_object": Record(()), "json_schema": SCHEMA_FORMAT},
                        ),
                        "enforced token by token",
                    ),
                    fixed("verbosity", "say in the prompt how long an answer should be", "medium"),
                )
            ),
            "the form of the answer",
        ),
        field(
            "reasoning",
            Record(
                (
                    field("effort", Text(("none", *EFFORTS)), "as `reasoning_effort` of Chat Completions"),
                    field("budget", Integer(0, MAX_TOKENS), "extension: think, for at most this many tokens"),
                    *refused("summary", "generate_summary", doc="thinking comes whole, as `reasoning_text`"),
                    *refused("context", "mode"),
                )
            ),
            "thinking",
        ),
        field("metadata", Labels(), "given back with the answer"),
        field("presence_penalty", Real(-2, 2), "extension: on tokens this answer has used"),
        field("frequency_penalty", Real(-2, 2), "extension: the same, for each use"),
        field("seed", Integer(0, 2**64 - 1), "extension: repeats an answer"),
        TOP_K,
        *EXTENSIONS,
        fixed("store", "nothing is stored", False),
        fixed("background", "answers come with the response", False),
        fixed("truncation", "what does not fit is refused", "disabled"),
        fixed("service_tier", "there is one", "auto", "default"),
        field(
            "stream_options",
            Record((fixed("include_obfuscation", "events are not padded", False),)),
            "details of the stream; needs stream",
        ),
        neutral("user", Text(), "whom the answer is for"),
        neutral("safety_identifier", Text(), "whom the answer is for"),
        *refused("previous_response_id", "conversation", doc="nothing is stored: send the conversation"),
        field("prompt_cache_key", Text(min_length=1), SESSION),
        *refused("prompt_cache_options", "prompt_cache_retention"),
        *refused("access_programs", "background_options", "context_management", "image", "max_tool_calls"),
        *refused("moderation", "prompt"),
    )
)


# -- the question --------------------------------------------------------------------------------------------


def read(body: Mapping[str, Any], served: Served, paths: Paths) -> Call:
    """A body as a Call. ``paths`` is filled for errors to come. Raises ApiError, InvalidRequest."""
    asked = FIELDS.read(body, "")
    check_model(asked["model"], served)
    if "stream_options" in asked and not asked.get("stream"):
        raise BadRequest("stream_options", "needs stream to be true")
    paths.update({"prompt": "input", "max_tokens": "max_output_tokens", "thinking_budget": "reasoning"})
    max_tokens, reasoning = asked.get("max_output_tokens"), asked.get("reasoning", {})
    thinking, budget = thinking_of(reasoning.get("effort"), max_tokens or served.max_tokens)
    if "budget" in reasoning:
        if "effort" in reasoning:
            raise BadRequest("reasoning.budget", "cannot be combined with reasoning.effort")
        thinking, budget = True, reasoning["budget"]
    form = asked.get("text", {}).get("format")
    constraint = constraint_of(asked, form, "text.format", "text.format.schema", paths)
    declared = _Declared(asked.get("tools", ()), paths)
    logprobs = asked.get("top_logprobs", 0) if asked.get("include") or "top_logprobs" in asked else None
    return Call(
        prompt=Chat(_messages(asked, paths), declared.tools, thinking),
        options=RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling_of(asked),
            thinking_budget=budget,
            constraint=constraint,
            tool_choice=_tool_choice(asked, declared),
            logprobs=logprobs,
            **cache_of(asked, "prompt_cache_key", paths),
        ),
        stream=asked.get("stream", False),
        encoder=ResponsesEncoder(served, body, declared.origin, logprobs=logprobs is not None),
    )


def _messages(asked: Mapping[str, Any], paths: Paths) -> list[dict[str, Any]]:
    """Input items as messages: the items of one assistant turn become one message."""
    messages: list[dict[str, Any]] = []
    if "instructions" in asked:
        messages.append({"role": "system", "content": asked["instructions"]})
        paths["messages[0].content"] = paths["messages[0]"] = "instructions"
    if isinstance(asked["input"], str):
        paths[f"messages[{len(messages)}].content"] = paths["messages"] = "input"
        return [*messages, {"role": "user", "content": asked["input"]}]
    paths["messages"] = "input"
    for i, item in enumerate(asked["input"]):
        turn, place = _turn(item), f"input[{i}]"
        last = messages[-1] if messages else {}
        if turn["role"] != "assistant" or last.get("role") != "assistant" or not _follows(turn, last):
            paths[f"messages[{len(messages)}]"] = place
            messages.append(turn)
        elif "tool_calls" in turn:
            last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        else:
            last.update(turn)
        if "tool_calls" in turn:
            calls = messages[-1]["tool_calls"]
            paths[f"messages[{len(messages) - 1}].tool_calls[{len(calls) - 1}].function"] = place
    return messages


def _follows(turn: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether an assistant's item belongs to the message before it: thinking, then text, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    have = [i for i, key in enumerate(order) if last.get(key)]
    new = next(i for i, key in enumerate(order) if key in turn)
    return not have or new > have[-1] or (new == have[-1] and order[new] == "tool_calls")


def _turn(item: Mapping[str, Any]) -> dict[str, Any]:
    """One item as a message."""
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    if item["type"] == "reasoning":
        return {"role": "assistant", "reasoning_content": "".join(part["text"] for part in item.get("content", ()))}
    if item["type"] == "function_call":
        name = f"{item['namespace']}.{item['name']}" if "namespace" in item else item["name"]
        function = {"name": name, "arguments": item["arguments"]}
        return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _content(item["output"])}


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part["text"], "cache_marker": "prompt_cache_breakpoint" in part} for part in content
    ]


@attrs.define(init=False)
class _Declared:
    """The declared tools under the names the model sees, and where each came from: its namespace, if any, and name."""

    tools: list[Tool]
    origin: dict[str, tuple[str | None, str]]

    def __init__(self, declared: Any, paths: Paths) -> None:
        self.tools, self.origin = [], {}
        for i, tool in enumerate(declared):
            if tool["type"] == "function":
                self._add(tool, f"tools[{i}]", None, paths)
            for j, inner in enumerate(tool.get("tools", ())):
                self._add(inner, f"tools[{i}].tools[{j}]", tool, paths)

    def _add(self, function: Mapping[str, Any], path: str, namespace: Mapping[str, Any] | None, paths: Paths) -> None:
        tool = tool_of(function, "parameters", path, marker=function.get("cache_marker", False))
        if namespace is not None:
            description = f"{namespace['description']}\n{tool.description}".strip()
            tool = attrs.evolve(tool, name=f"{namespace['name']}.{tool.name}", description=description)
        paths[f"tools[{len(self.tools)}]"] = path
        self.tools.append(tool)
        self.origin[tool.name] = (None if namespace is None else namespace["name"], function["name"])

    def find(self, name: str, path: str) -> str:
        """The name the model knows a function by. Raises BadRequest."""
        found = [known for known, (_, plain) in self.origin.items() if name in (known, plain)]
        if name in self.origin:
            return name
        if len(found) != 1:
            raise BadRequest(path, f"{name!r} is declared {len(found)} times" if found else f"{name!r} is not declared")
        return found[0]


def _tool_choice(asked: Mapping[str, Any], declared: _Declared) -> ToolChoice:
    choice, parallel = asked.get("tool_choice", "auto"), asked.get("parallel_tool_calls", True)
    if isinstance(choice, str):
        return ToolChoice(mode=choice, parallel=parallel)
    if choice["type"] == "function":
        name = declared.find(choice["name"], "tool_choice.name")
        return ToolChoice(mode="required", allowed_names=(name,), parallel=False)
    names = [declared.find(tool["name"], f"tool_choice.tools[{i}].name") for i, tool in enumerate(choice["tools"])]
    return ToolChoice(mode=choice["mode"], allowed_names=tuple(names), parallel=parallel)

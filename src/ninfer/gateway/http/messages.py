"""Anthropic's Messages, and the counting of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.gateway.http.errors import BadRequest
from ninfer.gateway.http.messages_answer import MessagesEncoder
from ninfer.gateway.http.shapes import (
    Either,
    Field,
    Flag,
    Free,
    Integer,
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
    EFFORTS,
    EXTENSIONS,
    MAX_TOKENS,
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

_MARKER = Tagged("type", {"ephemeral": Record((fixed("ttl", "the engine keeps what it has room for", "5m"),))})
_CACHE = field("cache_control", _MARKER, "the prompt may be reused up to the end of this")
_TEXT = Record((field("text", Text(), "the text", required=True), _CACHE, fixed("citations", "none", [])))
_TEXTS = Either(text=Text(), array=Many(Tagged("type", {"text": _TEXT})))
_THINKING = Record(
    (
        field("thinking", Text(), "what was thought; shown to the model where its template does", required=True),
        neutral("signature", Text(), "of an earlier answer"),
    )
)
_TOOL_USE = Record(
    (
        field("id", Text(), "what the result refers to", required=True),
        field("name", Text(min_length=1), "the tool", required=True),
        field("input", Free(), "its arguments", required=True),
        _CACHE,
        *refused("caller", "toolset_name"),
    )
)
_TOOL_RESULT = Record(
    (
        field("tool_use_id", Text(), "the call it belongs to", required=True),
        field("content", _TEXTS, "what the tool returned"),
        field("is_error", Flag(), "true is told to the model as a line `Error:` before the content"),
        _CACHE,
        *refused("toolset_name"),
    )
)
MESSAGE = Tagged(
    "role",
    {
        "user": Record((field("content", Either(
            text=Text(), array=Many(Tagged("type", {"text": _TEXT, "tool_result": _TOOL_RESULT}), 1),
        ), "text, or blocks", required=True),)),
        "assistant": Record((field("content", Either(
            text=Text(), array=Many(Tagged("type", {"thinking": _THINKING, "text": _TEXT, "tool_use": _TOOL_USE}), 1),
        ), "text, or blocks: thinking, then text, then calls; a last message is continued", required=True),)),
        "system": Record((field("content", _TEXTS, "text, or blocks", required=True),)),
    },
)  # fmt: skip
TOOL = Tagged(
    "type",
    {
        "custom": Record(
            (
                field("name", Text(min_length=1), "1..256 characters without newline or `>`", required=True),
                field("description", Text(), "shown to the model"),
                field("input_schema", Free(), "JSON Schema of the arguments", required=True),
                field("strict", Flag(), "hold the arguments to the schema"),
                _CACHE,
                fixed("defer_loading", "every tool is shown", False),
                fixed("allowed_callers", "the model", ["direct"]),
                fixed("eager_input_streaming", "calls come whole", False),
                *refused("input_examples"),
            )
        )
    },
    absent="custom",
)
_PARALLEL = field("disable_parallel_tool_use", Flag(), "true: at most one call")
_CHOICE = Tagged(
    "type",
    {
        "auto": Record((_PARALLEL,)),
        "any": Record((_PARALLEL,)),
        "tool": Record((field("name", Text(), "the one to call", required=True), _PARALLEL)),
        "none": Record(()),
    },
)
_DISPLAY = field("display", Text(("summarized", "omitted")), "omitted: leave the text out; else it comes whole")
_PROMPT: tuple[Field, ...] = (
    field("model", Text(), "the served model's id", required=True),
    field("messages", Many(MESSAGE, 1), "the conversation", required=True),
    field("system", _TEXTS, "the system message"),
    field("tools", Many(TOOL), "tools the model may call"),
    field("tool_choice", _CHOICE, "whether and what to call"),
    field(
        "thinking",
        Tagged(
            "type",
            {
                "enabled": Record(
                    (
                        field(
                            "budget_tokens", Integer(1, MAX_TOKENS), "tokens after which it is closed", required=True
                        ),
                        _DISPLAY,
                    )
                ),
                "adaptive": Record((_DISPLAY,)),
                "disabled": Record(()),
            },
        ),
        "think before answering; absent: do not",
    ),
    field(
        "output_config",
        Record(
            (
                field(
                    "format",
                    Tagged(
                        "type",
                        {"json_schema": Record((field("schema", Free(), "JSON Schema of the answer", required=True),))},
                    ),
                    "enforced token by token",
                ),
                field(
                    "effort",
                    Text(tuple(name for name in EFFORTS if name != "minimal")),
                    "share of the output budget that adaptive thinking may take, as in Chat Completions",
                ),
            )
        ),
        "the form of the answer",
    ),
    field("cache_control", _MARKER, "marks the end of the last message"),
    fixed("speed", "there is one", "standard"),
    *refused("user_profile_id", "workspace_id"),
)
COUNT_FIELDS = Record(_PROMPT)
FIELDS = Record(
    (
        *_PROMPT,
        field("max_tokens", Integer(1, MAX_TOKENS), "output budget, tokens, thinking included", required=True),
        field("stream", Flag(), "send the answer as it comes"),
        field("stop_sequences", Many(Text(min_length=1)), "texts that end the answer"),
        field("temperature", Real(0, 1), "0 is greedy"),
        field("top_p", Real(0, 1, open=True), "probability mass of the candidates"),
        TOP_K,
        field("seed", Integer(0, 2**64 - 1), "extension: repeats an answer"),
        field("session", Text(min_length=1), f"extension: {SESSION}"),
        *EXTENSIONS,
        neutral("metadata", Record((neutral("user_id", Text(), "whom the answer is for"),)), "about the request"),
        fixed("service_tier", "there is one", "auto", "standard_only"),
        *refused("thread", doc="nothing is stored: send the conversation"),
        *refused("billing_policy", "compaction", "container", "context_management", "diagnostics"),
        *refused("fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers"),
    )
)


# -- the question --------------------------------------------------------------------------------------------


def read(body: Mapping[str, Any], served: Served, paths: Paths) -> Call:
    """A body as a Call. ``paths`` is filled for errors to come. Raises ApiError, InvalidRequest."""
    asked = FIELDS.read(body, "")
    check_model(asked["model"], served)
    paths.update({"prompt": "messages", "stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"})
    paths["tool_choice.allowed_names"] = "tool_choice.name"
    output, thinking = asked.get("output_config", {}), asked.get("thinking", {})
    budget = thinking.get("budget_tokens")
    if "effort" in output:
        if thinking.get("type") != "adaptive":
            raise BadRequest("output_config.effort", "needs thinking of the type 'adaptive'")
        _, budget = thinking_of(output["effort"], asked["max_tokens"])
    constraint = constraint_of(
        asked, output.get("format"), "output_config.format", "output_config.format.schema", paths
    )
    return Call(
        prompt=_chat(asked, paths),
        options=RequestOptions(
            max_tokens=asked["max_tokens"],
            sampling=sampling_of(asked),
            stop=tuple(asked.get("stop_sequences", ())),
            thinking_budget=budget,
            constraint=constraint,
            tool_choice=_tool_choice(asked),
            **cache_of(asked, "session", paths),
        ),
        stream=asked.get("stream", False),
        encoder=MessagesEncoder(served, show_thinking=thinking.get("display") != "omitted"),
    )


def read_count(body: Mapping[str, Any], served: Served, paths: Paths) -> Chat:
    """A body whose tokens are to be counted. What says nothing about the prompt is checked and has no effect."""
    asked = COUNT_FIELDS.read(body, "")
    check_model(asked["model"], served)
    return _chat(asked, paths)


def _chat(asked: Mapping[str, Any], paths: Paths) -> Chat:
    messages: list[dict[str, Any]] = []
    if "system" in asked:
        messages.append({"role": "system", "content": _texts(asked["system"])})
        paths["messages[0].content"] = paths["messages[0]"] = "system"
    for i, message in enumerate(asked["messages"]):
        for turn in _turns(message, f"messages[{i}]"):
            paths[f"messages[{len(messages)}]"] = f"messages[{i}]"
            messages.append(turn)
    if "cache_control" in asked:
        messages[-1]["cache_marker"] = True
    tools = [_tool(tool, i, paths) for i, tool in enumerate(asked.get("tools", ()))]
    thinking = asked.get("thinking", {"type": "disabled"})["type"] != "disabled"
    if thinking:
        paths["thinking"] = "thinking"
    continued = messages[-1]["role"] == "assistant"
    return Chat(messages, tools, thinking, continue_final=continued)


def _turns(message: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """One message in the engine's form. Results of tools are messages of their own there."""
    role, content = message["role"], message["content"]
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": _texts(content)}]
    if role == "assistant":
        return [_assistant(content, path)]
    turns: list[dict[str, Any]] = []
    for block in content:
        if block["type"] == "tool_result":
            turns.append(_result(block))
        elif turns and turns[-1]["role"] == "user":
            turns[-1]["content"].append(_part(block))
        else:
            turns.append({"role": "user", "content": [_part(block)]})
    return turns


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = _texts(block.get("content", ""))
    if block.get("is_error"):
        content = f"Error:\n{content}" if isinstance(content, str) else [{"type": "text", "text": "Error:\n"}, *content]
    marker = {"cache_marker": True} if "cache_control" in block else {}
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content or "", **marker}


def _assistant(blocks: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    """An earlier answer: thinking, then text, then calls, as the model writes them."""
    order = ("thinking", "text", "tool_use")
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    last = 0
    for i, block in enumerate(blocks):
        kind = order.index(block["type"])
        if kind < last:
            raise BadRequest(f"{path}.content[{i}]", f"{block['type']} cannot follow {order[last]} in one message")
        last = kind
        if "cache_control" in block and block["type"] == "tool_use" and i < len(blocks) - 1:
            raise BadRequest(f"{path}.content[{i}].cache_control", "of several calls, only the last can be marked")
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    if thought:
        turn["reasoning_content"] = thought
    if parts := [_part(block) for block in blocks if block["type"] == "text"]:
        turn["content"] = parts
    if calls := [_use(block) for block in blocks if block["type"] == "tool_use"]:
        turn["tool_calls"] = calls
        if "cache_control" in blocks[-1]:
            turn["cache_marker"] = True
    return turn


def _use(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}


def _texts(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": block["text"], "cache_marker": "cache_control" in block}


def _tool(tool: Mapping[str, Any], index: int, paths: Paths) -> Tool:
    paths[f"tools[{index}].parameters"] = f"tools[{index}].input_schema"
    return tool_of(tool, "input_schema", f"tools[{index}]", marker="cache_control" in tool)


def _tool_choice(asked: Mapping[str, Any]) -> ToolChoice:
    choice = asked.get("tool_choice", {"type": "auto"})
    mode = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}[choice["type"]]
    names = (choice["name"],) if choice["type"] == "tool" else None
    return ToolChoice(mode=mode, allowed_names=names, parallel=not choice.get("disable_parallel_tool_use", False))

"""OpenAI's Chat Completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from ninfer.gateway.http.errors import ApiError, BadRequest, openai_error
from ninfer.gateway.http.shapes import (
    Either,
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
from ninfer.gateway.http.sse import dumps, frame
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
    logprob_entries,
    sampling_of,
    thinking_of,
    tool_of,
)
from ninfer.inputs import Chat, Tool
from ninfer.options import RequestOptions, ToolChoice
from ninfer.results import (
    Delta,
    Event,
    GenerationResult,
    GenerationStart,
    TokenLogprob,
    ToolCall,
    ToolCallEvent,
    Usage,
)

# -- fields --------------------------------------------------------------------------------------------------

_TEXT_PART = Record((field("text", Text(), "the text", required=True), CACHE_BREAKPOINT))
_CONTENT = Either(text=Text(), array=Many(Tagged("type", {"text": _TEXT_PART}), 1))
_NAME = refused("name", doc="templates of this family do not tell speakers apart")
_FUNCTION_CALL = Record(
    (
        field("name", Text(min_length=1), "the function", required=True),
        field("arguments", Text(), "JSON text of an object", required=True),
    )
)
_TOOL_CALL = Tagged(
    "type",
    {
        "function": Record(
            (
                field("id", Text(), "what the result refers to", required=True),
                field("function", _FUNCTION_CALL, "the call", required=True),
                neutral("index", Integer(0, MAX_TOKENS), "place in a streamed answer"),
            )
        )
    },
)
_PLAIN = Record((field("content", _CONTENT, "text, or parts of text", required=True), *_NAME))
MESSAGE = Tagged(
    "role",
    {
        "system": _PLAIN,
        "developer": _PLAIN,
        "user": _PLAIN,
        "assistant": Record(
            (
                field("content", _CONTENT, "what was answered"),
                field("reasoning_content", Text(), "what was thought; shown to the model where its template does"),
                field("tool_calls", Many(_TOOL_CALL), "calls of tools"),
                fixed("annotations", "answers here have none", []),
                *refused("refusal", "audio", "function_call"),
                *_NAME,
            )
        ),
        "tool": Record(
            (
                field("content", _CONTENT, "what the tool returned", required=True),
                field("tool_call_id", Text(), "the call it belongs to", required=True),
                neutral("name", Text(), "the tool; the call says it already"),
            )
        ),
    },
)
_FUNCTION = Record(
    (
        field("name", Text(min_length=1), "1..256 characters without newline or `>`", required=True),
        field("description", Text(), "shown to the model"),
        field("parameters", Free(), "JSON Schema of the arguments"),
        field("strict", Flag(), "hold the arguments to the schema"),
    )
)
_NAMED = Record((field("name", Text(), "a declared function", required=True),))
_ALLOWED = Record(
    (
        field("mode", Text(("auto", "required")), "whether to call one of them", required=True),
        field(
            "tools",
            Many(Tagged("type", {"function": Record((field("function", _NAMED, "the function", required=True),))}), 1),
            "the functions that may be called",
            required=True,
        ),
    )
)
FIELDS = Record(
    (
        field("model", Text(), "the served model's id", required=True),
        field("messages", Many(MESSAGE, 1), "the conversation", required=True),
        field("stream", Flag(), "send the answer as it comes"),
        field(
            "stream_options",
            Record(
                (
                    field("include_usage", Flag(), "end the stream with a chunk of token counts"),
                    fixed("include_obfuscation", "chunks are not padded", False),
                )
            ),
            "details of the stream; needs stream",
        ),
        field("max_completion_tokens", Integer(1, MAX_TOKENS), "output budget, tokens, thinking included"),
        field("max_tokens", Integer(1, MAX_TOKENS), "the same, by its older name; not together with it"),
        field("temperature", Real(0, 2), "0 is greedy"),
        field("top_p", Real(0, 1, open=True), "probability mass of the candidates"),
        field("presence_penalty", Real(-2, 2), "on tokens this answer has used"),
        field("frequency_penalty", Real(-2, 2), "on tokens this answer has used, for each use"),
        field("seed", Integer(0, 2**64 - 1), "repeats an answer"),
        field("stop", Either(text=Text(min_length=1), array=Many(Text(min_length=1), 0, 4)), "texts that end it"),
        field("logprobs", Flag(), "give the log-probability of each token of the content"),
        field("top_logprobs", Integer(0, 20), "and of this many alternatives; needs logprobs"),
        field("tools", Many(Tagged("type", {"function": Record((
            field("function", _FUNCTION, "the function", required=True),
            field("cache_marker", Flag(), "the prompt may be reused up to the end of this declaration"),
        ))})), "functions the model may call"),
        field(
            "tool_choice",
            Either(
                text=Text(("auto", "none", "required")),
                record=Tagged(
                    "type",
                    {
                        "function": Record((field("function", _NAMED, "the one to call", required=True),)),
                        "allowed_tools": Record((field("allowed_tools", _ALLOWED, "some of them", required=True),)),
                    },
                ),
            ),
            "whether and what to call",
        ),
        field("parallel_tool_calls", Flag(), "false: at most one call"),
        field(
            "response_format",
            Tagged(
                "type",
                {
                    "text": Record(()),
                    "json_object": Record(()),
                    "json_schema": Record((field("json_schema", SCHEMA_FORMAT, "the format", required=True),)),
                },
            ),
            "the form of the answer, enforced token by token",
        ),
        field(
            "reasoning_effort",
            Text(("none", *EFFORTS)),
            "none: do not think; else the share of the output budget that thinking may take: "
            + ", ".join(f"{name} {share:.0%}" for name, share in EFFORTS.items()),
        ),
        field("metadata", Labels(), "given back with the answer; a stream has no place for it"),
        field("thinking_budget", Integer(0, MAX_TOKENS), "extension: think, for at most this many tokens"),
        TOP_K,
        *EXTENSIONS,
        fixed("n", "one answer a request", 1),
        fixed("store", "nothing is stored", False),
        fixed("modalities", "text alone", ["text"]),
        fixed("service_tier", "there is one", "auto", "default"),
        fixed("verbosity", "say in the prompt how long an answer should be", "medium"),
        fixed("logit_bias", "none", {}),
        neutral("user", Text(), "whom the answer is for"),
        neutral("safety_identifier", Text(), "whom the answer is for"),
        field("prompt_cache_key", Text(min_length=1), SESSION),
        *refused("prompt_cache_options", "prompt_cache_retention"),
        *refused("audio", "function_call", "functions", "moderation", "prediction", "web_search_options"),
    )
)  # fmt: skip


# -- the question --------------------------------------------------------------------------------------------


def read(body: Mapping[str, Any], served: Served, paths: Paths) -> Call:
    """A body as a Call. ``paths`` is filled for errors to come. Raises ApiError, InvalidRequest."""
    asked = FIELDS.read(body, "")
    check_model(asked["model"], served)
    if "max_tokens" in asked and "max_completion_tokens" in asked:
        raise BadRequest("max_tokens", "cannot be combined with max_completion_tokens")
    if "top_logprobs" in asked and not asked.get("logprobs"):
        raise BadRequest("top_logprobs", "needs logprobs to be true")
    if "stream_options" in asked and not asked.get("stream"):
        raise BadRequest("stream_options", "needs stream to be true")
    name = "max_tokens" if "max_tokens" in asked else "max_completion_tokens"
    paths.update({"prompt": "messages", "max_tokens": name, "thinking_budget": "thinking_budget"})
    max_tokens = asked.get(name)
    thinking, budget = thinking_of(asked.get("reasoning_effort"), max_tokens or served.max_tokens)
    if "thinking_budget" in asked:
        if "reasoning_effort" in asked:
            raise BadRequest("thinking_budget", "cannot be combined with reasoning_effort")
        thinking, budget = True, asked["thinking_budget"]
    form = asked.get("response_format")
    if form is not None and form["type"] == "json_schema":
        form = {"type": "json_schema", "schema": form["json_schema"]["schema"]}
    constraint = constraint_of(asked, form, "response_format", "response_format.json_schema.schema", paths)
    stop = asked.get("stop", ())
    logprobs = asked.get("top_logprobs", 0) if asked.get("logprobs") else None
    return Call(
        prompt=Chat(
            [_message(message) for message in asked["messages"]],
            [_tool(tool, i, paths) for i, tool in enumerate(asked.get("tools", ()))],
            thinking,
        ),
        options=RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling_of(asked),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            thinking_budget=budget,
            constraint=constraint,
            tool_choice=_tool_choice(asked, paths),
            logprobs=logprobs,
            **cache_of(asked, "prompt_cache_key", paths),
        ),
        stream=asked.get("stream", False),
        encoder=ChatEncoder(
            served,
            usage=asked.get("stream_options", {}).get("include_usage", False),
            logprobs=logprobs is not None,
            metadata=asked.get("metadata"),
        ),
    )


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the engine's form, which differs in how it marks parts."""
    if not isinstance(message.get("content"), list):
        return dict(message)
    parts = [
        {"type": "text", "text": part["text"], "cache_marker": "prompt_cache_breakpoint" in part}
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _tool(tool: Mapping[str, Any], index: int, paths: Paths) -> Tool:
    paths[f"tools[{index}]"] = f"tools[{index}].function"
    return tool_of(tool["function"], "parameters", f"tools[{index}].function", marker=tool.get("cache_marker", False))


def _tool_choice(asked: Mapping[str, Any], paths: Paths) -> ToolChoice:
    choice, parallel = asked.get("tool_choice", "auto"), asked.get("parallel_tool_calls", True)
    if isinstance(choice, str):
        return ToolChoice(mode=choice, parallel=parallel)
    if choice["type"] == "function":
        paths["tool_choice.allowed_names"] = "tool_choice.function.name"
        return ToolChoice(mode="required", allowed_names=(choice["function"]["name"],), parallel=False)
    paths["tool_choice.allowed_names"] = "tool_choice.allowed_tools.tools"
    allowed = choice["allowed_tools"]
    names = tuple(tool["function"]["name"] for tool in allowed["tools"])
    return ToolChoice(mode=allowed["mode"], allowed_names=names, parallel=parallel)


# -- the answer ----------------------------------------------------------------------------------------------


class ChatEncoder:
    """Chunks of a ``chat.completion.chunk`` stream, or one ``chat.completion``."""

    def __init__(self, served: Served, *, usage: bool, logprobs: bool, metadata: Mapping[str, str] | None) -> None:
        self.served, self.usage, self.logprobs, self.metadata = served, usage, logprobs, metadata
        self.head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": served.model,
        }
        self.prefix = f'data: {dumps(self.head)[:-1]},"choices":[{{"index":0,"delta":'

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, GenerationStart):
            return self._chunk({"role": "assistant", "content": ""})
        if isinstance(event, ToolCallEvent):
            return self._chunk({"tool_calls": [{"index": event.index, **_call(event.call)}]})
        last = self._chunk({}, finish=_finish(event))
        if self.usage:
            last += frame({**self.head, "choices": [], "usage": _usage(event.usage)})
        return last + b"data: [DONE]\n\n"

    def _delta(self, event: Delta) -> bytes:
        if event.channel == "thinking":
            return self._chunk({"reasoning_content": event.text})
        return self._chunk({"content": event.text}, event.logprobs)

    def _chunk(
        self, delta: Mapping[str, Any], logprobs: tuple[TokenLogprob, ...] = (), finish: str | None = None
    ) -> bytes:
        entries = {"content": logprob_entries(list(logprobs), self.served)} if self.logprobs and logprobs else None
        tail = f'"logprobs":{dumps(entries)},"finish_reason":{dumps(finish)}'
        return f"{self.prefix}{dumps(delta)},{tail}}}]}}\n\n".encode()

    def failure(self, error: ApiError) -> bytes:
        return frame(openai_error(error))

    def whole(self, result: GenerationResult, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text or None, "refusal": None}
        if result.thinking:
            message["reasoning_content"] = result.thinking
        if result.tool_calls:
            message["tool_calls"] = [_call(call) for call in result.tool_calls]
        elif message["content"] is None:
            message["content"] = ""
        entries = {"content": logprob_entries(logprobs, self.served), "refusal": None} if self.logprobs else None
        choice = {"index": 0, "message": message, "logprobs": entries, "finish_reason": _finish(result)}
        answer = {**self.head, "object": "chat.completion", "choices": [choice], "usage": _usage(result.usage)}
        return answer if self.metadata is None else {**answer, "metadata": self.metadata}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _finish(result: GenerationResult) -> str:
    return "stop" if result.finish_reason == "cancelled" else result.finish_reason


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }

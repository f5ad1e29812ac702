"""Anthropic's Messages: the answer, a list of content blocks."""

from __future__ import annotations

import secrets
from typing import Any

from ninfer.gateway.http.errors import ApiError, anthropic_error
from ninfer.gateway.http.sse import frame
from ninfer.gateway.http.translate import Served
from ninfer.results import Delta, Event, GenerationResult, GenerationStart, TokenLogprob, ToolCall, ToolCallEvent, Usage


class MessagesEncoder:
    """``message_*`` and ``content_block_*`` events, or one ``message``. show_thinking: give its text too."""

    def __init__(self, served: Served, *, show_thinking: bool) -> None:
        self.show_thinking = show_thinking
        self.index = -1
        self.open: str | None = None
        self.head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": served.model,
        }

    def whole(self, result: GenerationResult, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if result.thinking:
            content.append(_thinking(result.thinking if self.show_thinking else ""))
        if result.text:
            content.append({"type": "text", "text": result.text})
        content += [_use(call, dict(call.arguments)) for call in result.tool_calls]
        return {**self.head, "content": content, **_ending(result), "usage": _usage(result.usage)}

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, GenerationStart):
            usage = _usage(Usage(event.prompt_tokens, event.cached_tokens))
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            return _event("message_start", message={**self.head, **nothing, "usage": usage})
        if isinstance(event, ToolCallEvent):
            return self._called(event.call)
        ending = _event("message_delta", delta=_ending(event), usage=_usage(event.usage))
        return self._close() + ending + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return frame(anthropic_error(error), "error")

    def _delta(self, event: Delta) -> bytes:
        if event.channel == "thinking":
            begun = self._begin("thinking", _thinking(""))
            if not self.show_thinking:
                return begun
            return begun + self._fill({"type": "thinking_delta", "thinking": event.text})
        begun = self._begin("text", {"type": "text", "text": ""})
        return begun + self._fill({"type": "text_delta", "text": event.text})

    def _called(self, call: ToolCall) -> bytes:
        begun = self._close() + self._begin("tool_use", _use(call, {}))
        filled = self._fill({"type": "input_json_delta", "partial_json": call.arguments_json})
        return begun + filled + self._close()

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block, unless one of its kind is open."""
        if self.open == kind:
            return b""
        closed = self._close()
        self.open, self.index = kind, self.index + 1
        return closed + _event("content_block_start", index=self.index, content_block=block)

    def _fill(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self.index, delta=delta)

    def _close(self) -> bytes:
        if self.open is None:
            return b""
        self.open = None
        return _event("content_block_stop", index=self.index)


def _event(kind: str, **members: Any) -> bytes:
    return frame({"type": kind, **members}, kind)


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ending(result: GenerationResult) -> dict[str, Any]:
    if result.stop_reason == "stop_string":
        reason = "stop_sequence"
    elif result.stop_reason == "context":
        reason = "model_context_window_exceeded"
    else:
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(result.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": result.stop_string}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thinking_tokens},
    }

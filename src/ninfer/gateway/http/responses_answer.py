"""OpenAI's Responses: the answer, a list of items that are opened, filled and closed one after another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

from ninfer.gateway.http.errors import ApiError
from ninfer.gateway.http.sse import frame
from ninfer.gateway.http.translate import Served, logprob_entries
from ninfer.results import Delta, Event, GenerationResult, GenerationStart, TokenLogprob, ToolCall, ToolCallEvent, Usage

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "prompt_cache_key",
    "reasoning",
    "temperature",
    "text",
    "tools",
    "top_p",
)


class ResponsesEncoder:
    """``response.*`` events, or one ``response``. body: of the request, parts of which are given back. origin: the
    namespace and name of each declared function, by the name the model knows."""

    def __init__(
        self,
        served: Served,
        body: Mapping[str, Any],
        origin: Mapping[str, tuple[str | None, str]],
        *,
        logprobs: bool,
    ) -> None:
        self.served, self.origin, self.logprobs = served, origin, logprobs
        self.items: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.said: list[str] = []
        self.entries: list[dict[str, Any]] = []
        self.sequence = 0
        self.head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.model,
            **{name: body.get(name) for name in _ECHOED},
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "metadata": body.get("metadata") or {},
            "text": body.get("text") or {"format": {"type": "text"}},
            "top_logprobs": body.get("top_logprobs"),
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "service_tier": "default",
        }

    # -- one response ----------------------------------------------------------------------------------------

    def whole(self, result: GenerationResult, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        status = _status(result)
        items = []
        if result.thinking:
            items.append(_reasoning(_id("rs"), result.thinking))
        if result.text or not (result.thinking or result.tool_calls):
            items.append(_message(_id("msg"), result.text, logprob_entries(logprobs, self.served)))
        if not result.tool_calls:  # calls are whole, and close what was before them
            items[-1]["status"] = status
        items += [self._call(call) for call in result.tool_calls]
        return self._response(status, items, result.usage)

    def _response(self, status: str, items: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": incomplete,
            "output": items,
            "usage": None if usage is None else _usage(usage),
        }

    def _call(self, call: ToolCall) -> dict[str, Any]:
        namespace, name = self.origin.get(call.name, (None, call.name))
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": name,
            "arguments": call.arguments_json,
        }
        return item if namespace is None else {**item, "namespace": namespace}

    # -- a stream --------------------------------------------------------------------------------------------

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, GenerationStart):
            begun = self._response("in_progress", [])
            return self._event("created", response=begun) + self._event("in_progress", response=begun)
        if isinstance(event, ToolCallEvent):
            return self._close() + self._called(self._call(event.call))
        status = _status(event)
        last = self._close(status) if self.open else b""
        if not self.items:  # an answer of nothing is an empty message
            last = self._begin("message") + self._close(status)
        return last + self._event(status, response=self._response(status, self.items, event.usage))

    def failure(self, error: ApiError) -> bytes:
        failed = self._response("failed", self.items)
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._event("failed", response=failed)

    def _delta(self, event: Delta) -> bytes:
        kind = "reasoning" if event.channel == "thinking" else "message"
        begun = b""
        if self.open is None or self.open["type"] != kind:
            begun = self._close() + self._begin(kind)
        assert self.open is not None
        self.said.append(event.text)
        place = {"item_id": self.open["id"], "output_index": len(self.items), "content_index": 0}
        if kind == "reasoning":
            return begun + self._event("reasoning_text.delta", **place, delta=event.text)
        entries = logprob_entries(list(event.logprobs), self.served) if self.logprobs else []
        self.entries += entries
        return begun + self._event("output_text.delta", **place, delta=event.text, logprobs=entries)

    def _begin(self, kind: str) -> bytes:
        """Open an item and its one part."""
        make = _reasoning if kind == "reasoning" else _message
        item = make(_id("rs" if kind == "reasoning" else "msg"), "", [])
        part = item["content"][0]
        self.open, self.said, self.entries = item, [], []
        shown = {**item, "status": "in_progress", "content": []}
        place = {"item_id": item["id"], "output_index": len(self.items), "content_index": 0}
        added = self._event("output_item.added", output_index=len(self.items), item=shown)
        return added + self._event("content_part.added", **place, part=part)

    def _close(self, status: str = "completed") -> bytes:
        """Finish the open item, if there is one."""
        if self.open is None:
            return b""
        text, kind = "".join(self.said), self.open["type"]
        make = _reasoning if kind == "reasoning" else _message
        item = {**make(self.open["id"], text, self.entries), "status": status}
        place = {"item_id": item["id"], "output_index": len(self.items), "content_index": 0}
        if kind == "reasoning":
            done = self._event("reasoning_text.done", **place, text=text)
        else:
            done = self._event("output_text.done", **place, text=text, logprobs=self.entries)
        done += self._event("content_part.done", **place, part=item["content"][0])
        done += self._event("output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self.open = None
        return done

    def _called(self, item: dict[str, Any]) -> bytes:
        """A call, whole as it is."""
        index = len(self.items)
        place = {"item_id": item["id"], "output_index": index}
        self.items.append(item)
        return b"".join(
            (
                self._event(
                    "output_item.added", output_index=index, item={**item, "status": "in_progress", "arguments": ""}
                ),
                self._event("function_call_arguments.delta", **place, delta=item["arguments"]),
                self._event("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]),
                self._event("output_item.done", output_index=index, item=item),
            )
        )

    def _event(self, kind: str, **members: Any) -> bytes:
        name = f"response.{kind}"
        data = {"type": name, "sequence_number": self.sequence, **members}
        self.sequence += 1
        return frame(data, name)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(24)}"


def _status(result: GenerationResult) -> str:
    return "incomplete" if result.finish_reason == "length" else "completed"


def _reasoning(id: str, text: str, _: Any = None) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "status": "completed", "summary": [], "content": content}


def _message(id: str, text: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": entries}]
    return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": content}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

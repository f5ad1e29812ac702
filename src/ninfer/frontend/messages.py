"""Messages in the OpenAI shape, checked and brought to the form templates read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ninfer.errors import InvalidRequest
from ninfer.frontend.plain import plain, plain_text
from ninfer.inputs import Message
from ninfer.results import ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS = frozenset(attribute.name for attribute in attrs.fields(Message))
_ONLY_FOR = {"reasoning_content": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}
_MEDIA = ("image", "image_url", "video", "video_url", "audio", "input_audio")


@attrs.frozen
class Turn:
    """One checked message. ``value`` is what the template gets; markers say where reuse may stop.

    marked: at the end of the turn. marked_parts: after these content parts.
    """

    value: dict[str, Any]
    marked: bool = False
    marked_parts: tuple[int, ...] = ()


def read_messages(messages: Iterable[Any]) -> list[Turn]:
    """Check every message. Raises InvalidRequest naming the index, as in ``messages[2].content[0]``.

    "developer" becomes "system"; tool-call arguments given as JSON text become mappings.
    """
    turns = [_read(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not turns:
        raise InvalidRequest("expected at least one message", field="messages")
    return turns


def _read(message: Any, field: str) -> Turn:
    if isinstance(message, Message):
        message = {key: getattr(message, key) for key in _KEYS}
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"expected a mapping or a Message, got {type(message).__name__}", field=field)
    _refuse_unknown(message, _KEYS, field)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"expected one of {', '.join(_ROLES)}, got {role!r}", field=f"{field}.role")
    for key, owner in _ONLY_FOR.items():
        if role != owner and not _is_empty(message.get(key)):
            raise InvalidRequest(f"only {owner} messages have it", field=f"{field}.{key}")
    value: dict[str, Any] = {"role": _ROLES[role]}
    value["content"], marked_parts = _content(message.get("content"), role, f"{field}.content")
    for key in ("reasoning_content", "tool_call_id", "name"):
        if message.get(key) is not None:
            value[key] = plain_text(message[key], f"{field}.{key}")
    if calls := message.get("tool_calls"):
        value["tool_calls"] = _tool_calls(calls, f"{field}.tool_calls")
    return Turn(value, flag(message, "cache_marker", field), marked_parts)


def _content(content: Any, role: str, field: str) -> tuple[Any, tuple[int, ...]]:
    if content is None:
        if role != "assistant":
            raise InvalidRequest(f"a {role} message needs content", field=field)
        return None, ()
    if isinstance(content, str):
        return plain_text(content, field), ()
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise InvalidRequest(f"expected a string or a list of parts, got {type(content).__name__}", field=field)
    parts, marked = [], []
    for i, part in enumerate(content):
        parts.append({"type": "text", "text": _text_part(part, f"{field}[{i}]")})
        if flag(part, "cache_marker", f"{field}[{i}]"):
            marked.append(i)
    return parts, tuple(marked)


def _text_part(part: Any, field: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"expected a mapping, got {type(part).__name__}", field=field)
    kind = part.get("type", "text")
    if kind in _MEDIA or any(key in part for key in _MEDIA):
        raise InvalidRequest("images, video and audio are not supported by this engine", field=field)
    if kind != "text":
        raise InvalidRequest(f"expected a part of type 'text', got {kind!r}", field=f"{field}.type")
    _refuse_unknown(part, {"type", "text", "cache_marker"}, field)
    return plain_text(part.get("text"), f"{field}.text")


def _tool_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if isinstance(calls, str | bytes) or not isinstance(calls, Sequence):
        raise InvalidRequest(f"expected a list, got {type(calls).__name__}", field=field)
    return [_tool_call(call, f"{field}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, field: str) -> dict[str, Any]:
    if isinstance(call, ToolCall):
        call = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    if not isinstance(call, Mapping):
        raise InvalidRequest(f"expected a mapping or a ToolCall, got {type(call).__name__}", field=field)
    _refuse_unknown(call, {"id", "type", "function", "index"}, field)
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"expected 'function', got {call['type']!r}", field=f"{field}.type")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest("expected a mapping with name and arguments", field=f"{field}.function")
    _refuse_unknown(function, {"name", "arguments"}, f"{field}.function")
    name = plain_text(function.get("name"), f"{field}.function.name")
    if not name:
        raise InvalidRequest("expected a name", field=f"{field}.function.name")
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    value: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        value["id"] = plain_text(call["id"], f"{field}.id")
    return value


def _arguments(arguments: Any, field: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"not JSON: {error}", field=field) from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"expected an object, got {type(arguments).__name__}", field=field)
    value: dict[str, Any] = plain(arguments, field)
    return value


def flag(value: Mapping[str, Any], key: str, field: str) -> bool:
    """An optional boolean member. Raises InvalidRequest."""
    chosen = value.get(key)
    if chosen is not None and not isinstance(chosen, bool):
        raise InvalidRequest(f"expected a bool, got {chosen!r}", field=f"{field}.{key}")
    return bool(chosen)


def _refuse_unknown(value: Mapping[str, Any], known: Iterable[str], field: str) -> None:
    """Refuse keys without a meaning here, unless they carry nothing."""
    for key in value:
        if key not in known and not _is_empty(value[key]):
            raise InvalidRequest("unknown key", field=f"{field}.{key}")


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)

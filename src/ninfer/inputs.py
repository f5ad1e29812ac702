"""What a caller asks about: a chat, a text, or token ids. Values only; the frontend gives them meaning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar, cast

import attrs

from ninfer.errors import InvalidRequest

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Tool:
    """A function the model may call.

    name: 1..256 characters without newline or ``>``. description: shown to the model. parameters: a JSON Schema
    object of the arguments. strict: arguments must satisfy the schema. cache_marker: the rendered prompt may be
    reused up to the end of this declaration.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    strict: bool = False
    cache_marker: bool = False


@attrs.frozen(kw_only=True)
class Message:
    """One turn in the OpenAI shape. ``content`` is a string, a list of parts, or None.

    role: "system", "developer" (read as system), "user", "assistant" or "tool". reasoning_content: the thinking of
    an assistant turn. tool_calls: mappings ``{"id", "type", "function": {"name", "arguments"}}`` or ToolCall values.
    tool_call_id: of a tool result. cache_marker: the prompt may be reused up to the end of this turn.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: Sequence[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    cache_marker: bool = False


def _messages(value: Iterable[Mapping[str, Any] | Message]) -> Sequence[Mapping[str, Any] | Message]:
    return _kept(value)


def _tools(value: Iterable[Tool | Mapping[str, Any]]) -> Sequence[Tool | Mapping[str, Any]]:
    return _kept(value)


def _kept(value: Iterable[T]) -> Sequence[T]:
    """What can be read only once becomes a tuple, so that a Chat can be used any number of times."""
    return tuple(value) if isinstance(value, Iterator) else cast("Sequence[T]", value)


@attrs.frozen
class Chat:
    """A conversation. Rendered by the model's own chat template.

    messages: mappings in the OpenAI shape, or Message values, in order. tools: Tool values or OpenAI mappings.
    thinking: True, False, or None for the template's default. preserve_thinking: keep the thinking of earlier turns.
    reasoning_effort: for templates that know levels of it. template_args: further template variables. What the model's
    template does not read is refused when the chat is prepared. continue_final: go on with the text of the final
    assistant message instead of starting a new turn. escape_special: encode caller text with added tokens disabled, so
    that it cannot spell a control token.
    """

    messages: Sequence[Mapping[str, Any] | Message] = attrs.field(converter=_messages)
    tools: Sequence[Tool | Mapping[str, Any]] = attrs.field(default=(), converter=_tools)
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: str | None = None
    template_args: Mapping[str, Any] = attrs.field(factory=dict)
    continue_final: bool = attrs.field(default=False, kw_only=True)
    escape_special: bool = attrs.field(default=False, kw_only=True)

    @messages.validator
    def _check_messages(self, _: Any, value: Any) -> None:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise InvalidRequest(f"expected a sequence of messages, got {value!r}", field="messages")


@attrs.frozen
class TextPrompt:
    """Raw text, encoded as it stands; the answer continues it. No template, no channels, no tools."""

    text: str = attrs.field()

    @text.validator
    def _check_text(self, _: Any, value: Any) -> None:
        if not isinstance(value, str):
            raise InvalidRequest(f"expected a string, got {value!r}", field="text")


def token_ids(value: Any, field: str) -> tuple[int, ...]:
    """Integers >= 0 out of a sequence or a one-dimensional array. Raises InvalidRequest naming the place at fault."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise InvalidRequest(f"expected a sequence of token ids, got {type(value).__name__}", field=field)
    ids = tuple(items)
    for i, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, int | Integral) or item < 0:
            raise InvalidRequest(f"expected a token id >= 0, got {item!r}", field=f"{field}[{i}]")
    return tuple(map(int, ids))


def _ids(value: Iterable[int]) -> tuple[int, ...]:
    return token_ids(value, "ids")


@attrs.frozen
class TokenPrompt:
    """Token ids in the model's public domain; the answer continues them. A sequence or a one-dimensional array."""

    ids: tuple[int, ...] = attrs.field(converter=_ids)


PromptInput = str | Chat | TextPrompt | TokenPrompt
"""A plain string is one user message."""

"""A model's chat template: compiled once, run for each prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables

from ninfer.errors import InvalidRequest
from ninfer.frontend.budget import TemplateLimit
from ninfer.frontend.resources import broken
from ninfer.frontend.sandbox import MAX_SOURCE, BoundedEnvironment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` as chat templates know it: Python's JSON, unescaped, unsorted, ``", "`` and ``": "``."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise TemplateLimit("tojson: expected an indent of 0..16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 256:
        raise TemplateLimit("strftime_now: the format is too long")
    return datetime.now().strftime(format)


class ChatTemplate:
    """Jinja source with the environment of Hugging Face's ``apply_chat_template``. Thread-safe.

    special_tokens: variables such as ``eos_token`` that templates may read. Raises ArtifactError when the
    source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        where = "chat_template.jinja"
        if not isinstance(source, str) or not source:
            raise broken(where, "expected a non-empty text")
        if len(source) > MAX_SOURCE:
            raise broken(where, f"{len(source)} characters exceed {MAX_SOURCE}")
        self.source = source
        self._special_tokens = dict(special_tokens)
        functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._environment = BoundedEnvironment(functions, {"tojson": to_json})
        try:
            self._template = self._environment.from_string(source)
            self._reads = find_undeclared_variables(self._environment.parse(source))
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise broken(f"{where}: line {line}" if line else where, str(error.message or error)) from None
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise broken(where, f"does not compile: {type(error).__name__}: {error}") from None

    def reads(self, variable: str) -> bool:
        """Whether the template has a use for a variable of this name."""
        return variable in self._reads

    def render(self, messages: list[Any], tools: list[Any] | None, variables: Mapping[str, Any]) -> str:
        """The prompt text. Values are plain (str, int, float, bool, None, list, dict).

        Raises InvalidRequest(field="messages") with the template's own message.
        """
        values = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
        }
        try:
            return self._environment.render(self._template, values, characters=_characters(values))
        except TemplateError as error:
            raise InvalidRequest(str(error.message or error), field="messages") from None
        except Exception as error:  # whatever Python operation the template attempted
            reason = f"the chat template failed: {type(error).__name__}: {error}"
            raise InvalidRequest(reason, field="messages") from None


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(k) + _characters(v) for k, v in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 1

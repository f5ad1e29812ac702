"""JSON source text as a tree that remembers order, number spelling and where everything stands."""

from __future__ import annotations

import json
import json.decoder
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from ninfer.constraints.limits import MAX_SOURCE_BYTES
from ninfer.errors import ConstraintLimit, InvalidSchema

Kind = Literal["object", "array", "string", "number", "boolean", "null"]

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BLANK = re.compile(r"[ \t\n\r]*")
_WORDS: tuple[tuple[str, Kind, bool | None], ...] = (
    ("true", "boolean", True),
    ("false", "boolean", False),
    ("null", "null", None),
)
MAX_SOURCE_DEPTH = 2000
MAX_NUMBER_CHARACTERS = 1200


Place = tuple[Any, str] | None
"""Where a value stands: its container's place, and its name or index there. Linked, since whole pointers would need
memory quadratic in the depth."""


@dataclass(frozen=True, slots=True, eq=False)
class Json:
    """One value of the source. ``value`` is a str, a bool, None, a number's Decimal, a tuple of Json, or for an object
    a dict of Json in source order. ``text`` is a number's spelling. ``offset`` counts code points."""

    kind: Kind
    value: Any
    place: Place
    offset: int
    text: str = ""

    @property
    def pointer(self) -> str:
        """The JSON Pointer (RFC 6901) of the value."""
        tokens, place = [], self.place
        while place is not None:
            place, token = place
            tokens.append("/" + escape(token))
        return "".join(reversed(tokens))

    @property
    def children(self) -> tuple[Json, ...]:
        """The values directly inside."""
        if self.kind == "object":
            return tuple(self.value.values())
        return self.value if self.kind == "array" else ()

    def get(self, name: str) -> Json | None:
        """An object's member."""
        found = self.value.get(name) if self.kind == "object" else None
        return found if isinstance(found, Json) else None

    def walk(self) -> Iterator[Json]:
        """This value and everything inside it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def nesting(self) -> int:
        """How many containers stand inside one another."""
        level, depth = [self], 0
        while level := [node for node in level if node.children or node.kind in ("object", "array")]:
            level = [child for node in level for child in node.children]
            depth += 1
        return depth

    def plain(self) -> Any:
        """The value as ordinary Python data; numbers become int where spelled as one, else float."""
        if self.kind == "object":
            return {name: node.plain() for name, node in self.value.items()}
        if self.kind == "array":
            return [node.plain() for node in self.value]
        if self.kind == "number":
            return float(self.text) if set(self.text) & set(".eE") else int(self.text)
        return self.value


def escape(name: str) -> str:
    """A JSON Pointer reference token (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def text_of(schema: str | bytes | Mapping[str, Any] | bool | Any) -> str:
    """The source text of a schema given as text, as a mapping or bool, or as a class with ``model_json_schema``."""
    if isinstance(schema, bytes):
        try:
            return schema.decode()
        except UnicodeDecodeError as error:
            raise InvalidSchema(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping | bool):
        make = getattr(schema, "model_json_schema", None)
        if make is None:
            raise InvalidSchema(f"expected text, a mapping or a model class, got {type(schema).__name__}")
        schema = make()
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSchema(f"not representable as JSON: {error}") from None


def read(text: str) -> Json:
    """Parse one JSON document. Raises InvalidSchema with line and column, or ConstraintLimit."""
    if len(text) > MAX_SOURCE_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise ConstraintLimit(f"the source is longer than {MAX_SOURCE_BYTES} bytes", limit="source bytes")
    return _Reader(text).document()


@dataclass(slots=True)
class _Open:
    """A container that is being read."""

    kind: Literal["object", "array"]
    place: Place
    offset: int
    members: dict[str, Json]
    items: list[Json]
    name: str = ""


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, message: str, at: int | None = None) -> InvalidSchema:
        line, column = self.position(self.at if at is None else at)
        return InvalidSchema(message, line=line, column=column)

    def position(self, at: int) -> tuple[int, int]:
        """Line and column, from 1."""
        return self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)

    def blank(self) -> str:
        """Skip white space; the next character."""
        self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self.text[self.at : self.at + 1]

    def document(self) -> Json:
        stack: list[_Open] = []
        while True:
            node = self.begin(stack)
            while node is not None:
                if not stack:
                    if self.blank():
                        raise self.error("text after the document")
                    return node
                node = self.attach(stack, node)

    def begin(self, stack: list[_Open]) -> Json | None:
        """Read a scalar or an empty container, or open a container and return None."""
        char, offset = self.blank(), self.at
        top = stack[-1] if stack else None
        place = None if top is None else (top.place, top.name if top.kind == "object" else str(len(top.items)))
        if char in ("{", "["):
            if len(stack) >= MAX_SOURCE_DEPTH:
                line, column = self.position(offset)
                raise ConstraintLimit(
                    f"the source is nested deeper than {MAX_SOURCE_DEPTH}", limit="depth", line=line, column=column
                )
            self.at += 1
            opened = _Open("object" if char == "{" else "array", place, offset, {}, [])
            if self.blank() == ("}" if char == "{" else "]"):
                self.at += 1
                return self.close(opened)
            stack.append(opened)
            if char == "{":
                self.member(opened)
            return None
        if char == '"':
            return Json("string", self.string(), place, offset)
        for word, kind, value in _WORDS:
            if self.text.startswith(word, offset):
                self.at += len(word)
                return Json(kind, value, place, offset)
        match = _NUMBER.match(self.text, offset)
        if match is None:
            raise self.error("expected a JSON value")
        self.at = match.end()
        if len(match.group()) > MAX_NUMBER_CHARACTERS:
            line, column = self.position(offset)
            raise ConstraintLimit(
                f"a number of more than {MAX_NUMBER_CHARACTERS} characters", limit="number", line=line, column=column
            )
        return Json("number", Decimal(match.group()), place, offset, match.group())

    def attach(self, stack: list[_Open], node: Json) -> Json | None:
        """Put a value into the open container; the container itself where that closes it."""
        top = stack[-1]
        if top.kind == "object":
            top.members[top.name] = node
        else:
            top.items.append(node)
        char = self.blank()
        if char == ",":
            self.at += 1
            if top.kind == "object":
                self.member(top)
            return None
        if char != ("}" if top.kind == "object" else "]"):
            raise self.error(f"expected ',' or the end of the {top.kind}")
        self.at += 1
        return self.close(stack.pop())

    def close(self, opened: _Open) -> Json:
        value = opened.members if opened.kind == "object" else tuple(opened.items)
        return Json(opened.kind, value, opened.place, opened.offset)

    def member(self, opened: _Open) -> None:
        """Read a member's name and colon."""
        if self.blank() != '"':
            raise self.error("expected a member name")
        at = self.at
        opened.name = self.string()
        if opened.name in opened.members:
            raise self.error(f"member {opened.name!r} occurs twice", at)
        if self.blank() != ":":
            raise self.error("expected ':'")
        self.at += 1

    def string(self) -> str:
        start = self.at
        try:
            value, self.at = json.decoder.scanstring(self.text, start + 1, True)  # type: ignore[attr-defined]
        except json.JSONDecodeError as error:
            raise self.error(error.msg.lower(), error.pos) from None
        if any(0xD800 <= ord(c) < 0xE000 for c in value):
            raise self.error("a lone surrogate", start)
        return str(value)

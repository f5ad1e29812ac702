"""What a request body may hold: one table that reads it, describes it in OpenAPI, and documents it.

A shape reads a JSON value or raises BadRequest naming its path, and gives the JSON Schema of what it reads. Nothing a
table does not name is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import attrs

from ninfer.gateway.http.errors import BadRequest

Use = Literal["read", "fixed", "neutral", "refused"]


class Shape(Protocol):
    """A kind of JSON value."""

    def read(self, value: Any, path: str) -> Any: ...

    def schema(self) -> dict[str, Any]: ...


@attrs.frozen
class Text:
    """A string; one of ``values`` where they are given."""

    values: tuple[str, ...] = ()
    min_length: int = 0

    def read(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise _expected("a string", value, path)
        if self.values and value not in self.values:
            raise BadRequest(path, f"expected {_options(self.values)}, got {_shown(value)}")
        if len(value) < self.min_length:
            raise BadRequest(path, f"expected at least {self.min_length} characters")
        return value

    def schema(self) -> dict[str, Any]:
        if self.values:
            return {"type": "string", "enum": list(self.values)}
        return {"type": "string", "minLength": self.min_length} if self.min_length else {"type": "string"}


@attrs.frozen
class Integer:
    """An integer in ``low..high``."""

    low: int
    high: int

    def read(self, value: Any, path: str) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise _expected("an integer", value, path)
        if not self.low <= value <= self.high:
            raise BadRequest(path, f"expected {self.low}..{self.high}, got {_shown(value)}")
        return int(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@attrs.frozen
class Real:
    """A number in ``[low, high]``; without ``low`` itself where it is ``open``."""

    low: float
    high: float
    open: bool = False

    def read(self, value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _expected("a number", value, path)
        if not self.low <= value <= self.high or (self.open and value == self.low):
            raise BadRequest(path, f"expected {'(' if self.open else '['}{self.low:g}, {self.high:g}]")
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum" if self.open else "minimum": self.low, "maximum": self.high}


@attrs.frozen
class Flag:
    """True or false."""

    def read(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise _expected("true or false", value, path)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@attrs.frozen
class Free:
    """Any JSON object, read later by whoever knows what it means."""

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _expected("an object", value, path)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


@attrs.frozen
class Labels:
    """Up to 16 strings by name, given back with the answer."""

    def read(self, value: Any, path: str) -> dict[str, str]:
        labels = Free().read(value, path)
        if len(labels) > 16:
            raise BadRequest(path, "expected at most 16 entries")
        return {name: Text().read(item, f"{path}.{name}") for name, item in labels.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 16}


@attrs.frozen
class Many:
    """An array of ``low..high`` items of one shape."""

    item: Shape
    low: int = 0
    high: int | None = None

    def read(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise _expected("an array", value, path)
        if len(value) < self.low or (self.high is not None and len(value) > self.high):
            bound = f"at least {self.low}" if len(value) < self.low else f"at most {self.high}"
            raise BadRequest(path, f"expected {bound} items, got {len(value)}")
        return [self.item.read(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        limits = {"minItems": self.low or None, "maxItems": self.high}
        return {"type": "array", "items": self.item.schema(), **{k: v for k, v in limits.items() if v is not None}}


@attrs.frozen
class Either:
    """A string, an array or an object, each with a shape of its own."""

    text: Shape | None = None
    array: Shape | None = None
    record: Shape | None = None

    def read(self, value: Any, path: str) -> Any:
        shapes: dict[type, Shape | None] = {str: self.text, list: self.array, dict: self.record}
        shape = shapes.get(type(value))
        if shape is None:
            kinds = {"a string": self.text, "an array": self.array, "an object": self.record}
            raise _expected(" or ".join(kind for kind, known in kinds.items() if known), value, path)
        return shape.read(value, path)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [shape.schema() for shape in (self.text, self.array, self.record) if shape is not None]}


@attrs.frozen
class Field:
    """One member of a Record. Made by ``field``, ``fixed``, ``neutral`` and ``refused``.

    use: "read"; "fixed", only ``values``, which say what happens in any case; "neutral", which concerns neither the
    question nor the answer; "refused", known to the protocol and not to this server. Null stands for an absent member.
    """

    name: str
    use: Use
    doc: str
    shape: Shape | None = None
    values: tuple[Any, ...] = ()
    required: bool = False


def field(name: str, shape: Shape, doc: str, *, required: bool = False) -> Field:
    """A member that is honoured."""
    return Field(name, "read", doc, shape, required=required)


def fixed(name: str, doc: str, *values: Any) -> Field:
    """A member that may only ask for what happens in any case."""
    return Field(name, "fixed", doc, values=values)


def neutral(name: str, shape: Shape, doc: str) -> Field:
    """A member that changes nothing about the answer."""
    return Field(name, "neutral", doc, shape)


def refused(*names: str, doc: str = "") -> tuple[Field, ...]:
    """Members of the protocol without a meaning here."""
    return tuple(Field(name, "refused", doc) for name in names)


@attrs.frozen
class Record:
    """An object with the given members and no others. Reading it gives those that are honoured and not null."""

    fields: tuple[Field, ...]
    _by_name: dict[str, Field] = attrs.field(init=False)

    @_by_name.default
    def _names(self) -> dict[str, Field]:
        return {known.name: known for known in self.fields}

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _expected("an object", value, path)
        found: dict[str, Any] = {}
        for name, item in value.items():
            here = f"{path}.{name}" if path else name
            known = self._by_name.get(name)
            if known is None:
                raise BadRequest(here, "unknown field")
            if item is not None:
                self._take(known, item, here, found)
        for known in self.fields:
            if known.required and known.name not in found:
                raise BadRequest(f"{path}.{known.name}" if path else known.name, "is required")
        return found

    def _take(self, known: Field, value: Any, path: str, found: dict[str, Any]) -> None:
        if known.use == "refused":
            raise BadRequest(path, "is not supported by this server" + (f": {known.doc}" if known.doc else ""))
        if known.use == "fixed":
            if not any(type(value) is type(allowed) and value == allowed for allowed in known.values):
                raise BadRequest(path, f"only {_options(known.values)} is supported by this server")
            return
        assert known.shape is not None
        read = known.shape.read(value, path)
        if known.use == "read":
            found[known.name] = read

    def schema(self) -> dict[str, Any]:
        members = {known.name: _member(known) for known in self.fields if known.use != "refused"}
        required = [known.name for known in self.fields if known.required]
        shape: dict[str, Any] = {"type": "object", "properties": members, "additionalProperties": False}
        return {**shape, "required": required} if required else shape


@attrs.frozen
class Tagged:
    """An object whose member ``tag`` says which Record it is. ``absent``: the tag of one without."""

    tag: str
    records: Mapping[str, Record]
    absent: str | None = None

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _expected("an object", value, path)
        kind = self.absent if value.get(self.tag) is None else value[self.tag]
        record = self.records.get(kind) if isinstance(kind, str) else None
        if record is None:
            if kind is None:
                raise BadRequest(f"{path}.{self.tag}", f"expected {_options(tuple(self.records))}")
            raise BadRequest(f"{path}.{self.tag}", f"only {_options(tuple(self.records))} is supported by this server")
        rest = {name: item for name, item in value.items() if name != self.tag}
        return {self.tag: kind, **record.read(rest, path)}

    def schema(self) -> dict[str, Any]:
        options = []
        for kind, record in self.records.items():
            shape = record.schema()
            needed = [] if kind == self.absent else [self.tag]
            members = {self.tag: {"type": "string", "enum": [kind]}, **shape["properties"]}
            required = [*needed, *shape.get("required", [])]
            options.append({**shape, "properties": members, **({"required": required} if required else {})})
        return options[0] if len(options) == 1 else {"anyOf": options}


def _member(known: Field) -> dict[str, Any]:
    """The JSON Schema of an object's member; one that may be left out may also be null."""
    if known.use == "fixed":
        return {"enum": [*known.values, None], "description": known.doc}
    assert known.shape is not None
    shape = known.shape.schema()
    if not known.required:
        shape = {"anyOf": [*shape.get("anyOf", [shape]), {"type": "null"}]}
    return {**shape, "description": known.doc}


def _expected(what: str, value: Any, path: str) -> BadRequest:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a bool", type(None): "null"}
    return BadRequest(path, f"expected {what}, got {kinds.get(type(value), 'a number')}")


def _options(values: Sequence[Any]) -> str:
    return " or ".join(map(_shown, values))


def _shown(value: Any) -> str:
    shown = "null" if value is None else repr(value).lower() if isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."

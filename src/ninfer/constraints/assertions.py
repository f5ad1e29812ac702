"""What the keywords of one schema say about each JSON type, apart from keywords that apply further schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ninfer.constraints.branches import (
    Branch,
    Claim,
    Claims,
    Finite,
    Keyed,
    Listed,
    Names,
    Numeric,
    Text,
    Textual,
)
from ninfer.constraints.numbers import Bounds
from ninfer.constraints.schema import Schema
from ninfer.constraints.source import Json

NULL = Json("null", None, None, 0)
TRUE = Json("boolean", True, None, 0)
FALSE = Json("boolean", False, None, 0)

ANYTHING: dict[str, Branch] = {
    "null": Finite((NULL,)), "boolean": Finite((TRUE, FALSE)), "number": Numeric(), "string": Textual(),
    "array": Listed(), "object": Keyed(),
}  # fmt: skip
"""Every JSON value, by type."""

_KEYWORDS = {
    "number": ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
}


def own(schema: Schema) -> dict[str, Branch]:
    """One branch for each type whose values may satisfy the schema's own assertions.

    A keyword without ``type`` beside it leaves other types alone.
    """
    if schema.boolean is not None:
        return dict(ANYTHING) if schema.boolean else {}
    given = schema.keywords
    types = given.get("type", tuple(ANYTHING))
    branches: dict[str, Branch] = {}
    for name in types:
        kind = "number" if name == "integer" else name
        branch: Branch = ANYTHING[kind]
        if name == "integer" or given.keys() & _KEYWORDS.get(kind, ()):
            made = _MAKE[kind](schema, name)
            if made.empty:
                continue
            branch = made
        branches[kind] = branch
    return branches


def bounds(given: dict[str, Any]) -> Bounds:
    """The interval of the four bound keywords."""
    return Bounds(given.get("minimum"), False, given.get("maximum"), False).met(
        Bounds(given.get("exclusiveMinimum"), True, given.get("exclusiveMaximum"), True)
    )


def texts(schema: Schema) -> tuple[Text, ...]:
    """The pattern and the format."""
    return tuple(
        Text(keyword, schema.keywords[keyword], True, schema.node.value[keyword])
        for keyword in ("pattern", "format")
        if keyword in schema.keywords
    )


def positions(schema: Schema) -> tuple[tuple[Schema, ...], Schema | None]:
    """The schemas of the first items, and of the others."""
    given = schema.keywords
    if "prefixItems" not in given:
        return (), given.get("items")
    return given["prefixItems"], given.get("items", given.get("additionalItems"))


def _numeric(schema: Schema, name: str) -> Numeric:
    divisor = schema.keywords.get("multipleOf")
    return Numeric(bounds(schema.keywords), name == "integer" or divisor is not None, divisor or 1)


def _textual(schema: Schema, name: str) -> Textual:
    given = schema.keywords
    return Textual(given.get("minLength", 0), given.get("maxLength"), texts(schema))


def _listed(schema: Schema, name: str) -> Listed:
    given = schema.keywords
    prefix, tail = positions(schema)
    return Listed(
        tuple(map(affirmed, prefix)), affirmed(tail), given.get("minItems", 0), given.get("maxItems"),
        "uniqueItems" in given,
    )  # fmt: skip


def _keyed(schema: Schema, name: str) -> Keyed:
    given = schema.keywords
    names = Names(
        {name: affirmed(member) for name, member in given.get("properties", {}).items()},
        tuple(
            (Text("pattern", pattern, True, member.node), affirmed(member))
            for pattern, member in given.get("patternProperties", {}).items()
        ),
        affirmed(given.get("additionalProperties")),
    )
    return Keyed(
        (names,), tuple(given.get("required", {}).items()), given.get("minProperties", 0), given.get("maxProperties")
    )  # fmt: skip


def affirmed(schema: Schema | None) -> Claims:
    """The claim that a schema holds; nothing for one that is absent or trivial."""
    return () if schema is None or schema.trivial else (Claim(schema),)


_MAKE: dict[str, Callable[[Schema, str], Numeric | Textual | Listed | Keyed]] = {
    "number": _numeric,
    "string": _textual,
    "array": _listed,
    "object": _keyed,
}

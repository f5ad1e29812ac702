"""The values that violate a schema's own assertions, as branches: what ``not``, ``if`` and ``else`` need.

A denial no branch can express ("some item is not a string") becomes an Opaque branch of its type. It filters finite
candidates exactly, vanishes where it meets another type, and is refused where it would have to be generated.
"""

from __future__ import annotations

from collections.abc import Iterator

from ninfer.constraints.assertions import ANYTHING, FALSE, TRUE, positions, texts
from ninfer.constraints.branches import (
    NOTHING,
    Branch,
    Claim,
    Claims,
    Finite,
    Keyed,
    Listed,
    Names,
    Numeric,
    Opaque,
    Textual,
)
from ninfer.constraints.literals import key
from ninfer.constraints.numbers import Bounds
from ninfer.constraints.schema import Schema
from ninfer.constraints.source import Json


def denied(schema: Schema) -> Iterator[Branch]:
    """Branches whose union is every value that the schema's own assertions, without those that apply further schemas,
    do not allow. They may overlap."""
    if schema.boolean is not None:
        yield from () if schema.boolean else ANYTHING.values()
        return
    types = schema.keywords.get("type", ("null", "boolean", "number", "string", "array", "object"))
    kinds = {"number" if name == "integer" else name for name in types}
    yield from (branch for kind, branch in ANYTHING.items() if kind not in kinds)
    if "integer" in types:
        yield Opaque("number", Claim(schema, False), "type")
    for kind, deny in (("number", _number), ("string", _string), ("array", _array), ("object", _object)):
        if kind in kinds:
            yield from deny(schema)
    for keyword in ("const", "enum"):
        if keyword in schema.keywords:
            yield from _values(schema, keyword)


def refuted(schema: Schema) -> Claims:
    """The claim that a schema does not hold."""
    if schema.trivial:
        return NOTHING
    return () if schema.boolean is False else (Claim(schema, False),)


def absent(name: str) -> Keyed:
    """Objects without a member."""
    return Keyed((Names({name: NOTHING}, (), ()),))


def present(name: str, place: Json, claims: Claims = ()) -> Keyed:
    """Objects with a member."""
    return Keyed((Names({name: claims}, (), ()),), ((name, place),))


def _number(schema: Schema) -> Iterator[Branch]:
    given = schema.keywords
    if "minimum" in given:
        yield Numeric(Bounds(high=given["minimum"], high_open=True))
    if "exclusiveMinimum" in given:
        yield Numeric(Bounds(high=given["exclusiveMinimum"]))
    if "maximum" in given:
        yield Numeric(Bounds(low=given["maximum"], low_open=True))
    if "exclusiveMaximum" in given:
        yield Numeric(Bounds(low=given["exclusiveMaximum"]))
    if "multipleOf" in given:
        yield Opaque("number", Claim(schema, False), "multipleOf")


def _string(schema: Schema) -> Iterator[Branch]:
    given = schema.keywords
    if given.get("minLength"):
        yield Textual(high=given["minLength"] - 1)
    if "maxLength" in given:
        yield Textual(low=given["maxLength"] + 1)
    for text in texts(schema):
        yield Textual(texts=(~text,))


def _array(schema: Schema) -> Iterator[Branch]:
    given = schema.keywords
    if given.get("minItems"):
        yield Listed(high=given["minItems"] - 1)
    if "maxItems" in given:
        yield Listed(low=given["maxItems"] + 1)
    prefix, tail = positions(schema)
    for index, item in enumerate(prefix):
        if not item.trivial:
            yield Listed((*[()] * index, refuted(item)), low=index + 1)
    if tail is not None and tail.boolean is False:
        yield Listed(low=len(prefix) + 1)
    elif tail is not None and not tail.trivial:
        yield Opaque("array", Claim(schema, False), "items" if "items" in given else "additionalItems")
    if "uniqueItems" in given:
        yield Opaque("array", Claim(schema, False), "uniqueItems")


def _object(schema: Schema) -> Iterator[Branch]:
    given = schema.keywords
    for name, member in given.get("properties", {}).items():
        if not member.trivial:
            yield present(name, member.node, refuted(member))
    for name in given.get("required", {}):
        yield absent(name)
    if given.get("minProperties"):
        yield Keyed(high=given["minProperties"] - 1)
    if "maxProperties" in given:
        yield Keyed(low=given["maxProperties"] + 1)
    for name, others in given.get("dependentRequired", {}).items():
        for other in others:
            yield Keyed((Names({name: (), other: NOTHING}, (), ()),), ((name, others[other]),))
    for keyword in ("patternProperties", "additionalProperties"):
        members = given.get(keyword, {})
        members = members.values() if isinstance(members, dict) else (members,)
        if any(not member.trivial for member in members):
            yield Opaque("object", Claim(schema, False), keyword)


def _values(schema: Schema, keyword: str) -> Iterator[Branch]:
    """Everything but the given values."""
    excluded = schema.keywords[keyword]
    by_kind: dict[str, list[Json]] = {kind: [] for kind in ANYTHING}
    for value in excluded.values():
        by_kind[value.kind].append(value)
    for kind, values in by_kind.items():
        if not values:
            yield ANYTHING[kind]
        elif kind == "boolean":
            yield Finite(tuple(v for v in (TRUE, FALSE) if key(v) not in excluded))
        elif kind == "string":
            yield Textual(banned=frozenset(v.value for v in values))
        elif kind == "number":
            ends = sorted(v.value for v in values)
            for low, high in zip((None, *ends), (*ends, None)):
                yield Numeric(Bounds(low, True, high, True))
        elif kind in ("array", "object"):
            yield Opaque(kind, Claim(schema, False), keyword)

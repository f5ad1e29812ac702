"""A JSON Schema document as a graph of positions whose every keyword is accounted for.

Reading refuses what is malformed (InvalidSchema) and what the generated language cannot enforce (UnsupportedSchema), at
every schema position of the document, also in definitions that nothing refers to. What is inside ``const``, ``enum``,
``default`` and ``examples`` is data. What the keywords mean is the business of :mod:`ninfer.constraints.assertions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from ninfer.constraints import regex
from ninfer.constraints.formats import FORMATS
from ninfer.constraints.limits import placed
from ninfer.constraints.literals import check_number, check_value, key
from ninfer.constraints.numbers import INT64
from ninfer.constraints.source import Json, escape
from ninfer.errors import InvalidRegex, InvalidSchema, UnsupportedSchema

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "readOnly", "writeOnly", "deprecated")
)
REFUSED = frozenset(
    ("dependentSchemas", "dependencies", "contains", "minContains", "maxContains", "propertyNames",
     "unevaluatedItems", "unevaluatedProperties", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
     "$recursiveAnchor", "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema")
)  # fmt: skip
_DIALECTS = {
    "https://json-schema.org/draft/2020-12/schema": "2020-12",
    "http://json-schema.org/draft-07/schema": "draft-07",
    "https://json-schema.org/draft-07/schema": "draft-07",
}
_BESIDE_A_DRAFT_07_REFERENCE = ANNOTATIONS | {"$ref", "$schema", "$id", "$defs", "definitions"}


@dataclass(slots=True, eq=False)
class Schema:
    """One schema position. ``boolean`` is set for the schemas ``true`` and ``false``.

    ``keywords`` maps each assertion to its parsed value, in source order: subschemas are Schema, numbers Decimal,
    counts int, ``const`` and ``enum`` dicts of :func:`~ninfer.constraints.literals.key` to Json, ``$ref`` the Schema it
    names, ``required`` a dict of names to their places.
    """

    node: Json
    boolean: bool | None = None
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def pointer(self) -> str:
        return self.node.pointer

    def at(self, *keyword: str) -> str:
        """The pointer of a keyword, or of something inside it."""
        return "/".join((self.pointer, *map(escape, keyword)))

    @property
    def trivial(self) -> bool:
        """Whether every value satisfies it."""
        return self.boolean is True or (self.boolean is None and not self.keywords)

    def applied(self) -> Iterator[Schema]:
        """The schemas that the same value is checked against."""
        for keyword, value in self.keywords.items():
            if keyword in ("allOf", "anyOf", "oneOf"):
                yield from value
            elif keyword in ("$ref", "not", "if", "then", "else"):
                yield value


NEVER = Schema(Json("boolean", False, None, 0), boolean=False)


def load(source: Json) -> Schema:
    """Read a document; the root of its graph. Raises InvalidSchema, UnsupportedSchema or ConstraintLimit."""
    return _Loader(source).load()


class _Loader:
    def __init__(self, source: Json) -> None:
        self.source = source
        self.dialect = "2020-12"
        self.positions: dict[int, Schema] = {}
        self.pending: list[Schema] = []
        self.references: list[tuple[Schema, str]] = []

    def load(self) -> Schema:
        root = self.position(self.source)
        declared = self.source.get("$schema")
        if declared is not None:
            self.dialect = self.named_dialect(declared)
        while self.pending:
            self.read(self.pending.pop())
        for schema, target in self.references:
            schema.keywords["$ref"] = self.resolve(schema, target)
        self.refuse_loops()
        return root

    def position(self, node: Json) -> Schema:
        """The schema at a place, read later."""
        if node.kind not in ("object", "boolean"):
            raise InvalidSchema(f"a schema is an object or a boolean, not {_a(node.kind)}", pointer=node.pointer)
        schema = Schema(node, node.value if node.kind == "boolean" else None)
        self.positions[id(node)] = schema
        if node.kind == "object":
            self.pending.append(schema)
        return schema

    def read(self, schema: Schema) -> None:
        members = schema.node.value
        for keyword, value in members.items():
            if keyword in ANNOTATIONS:
                continue
            parse = _KEYWORDS.get(keyword)
            if keyword in REFUSED or parse is None:
                known = "is not supported" if keyword in REFUSED else "is not a known keyword"
                raise UnsupportedSchema(f"{keyword!r} {known}", pointer=value.pointer, keyword=keyword)
            only = _ONLY_IN.get(keyword, self.dialect)
            if only != self.dialect:
                raise UnsupportedSchema(f"{keyword!r} belongs to {only}", pointer=value.pointer, keyword=keyword)
            parsed = parse(self, schema, value)
            if parsed is not None:
                schema.keywords[keyword] = parsed
        if "$ref" in members and self.dialect == "draft-07":
            for keyword, value in members.items():
                if keyword not in _BESIDE_A_DRAFT_07_REFERENCE:
                    raise UnsupportedSchema("draft-07 ignores what stands beside '$ref'; use 'allOf'",
                                            pointer=value.pointer, keyword=keyword)  # fmt: skip
        if "discriminator" in members and "oneOf" not in members:
            raise UnsupportedSchema("'discriminator' needs 'oneOf' beside it", pointer=schema.at("discriminator"),
                                    keyword="discriminator")  # fmt: skip

    # -- keywords of identity

    def named_dialect(self, node: Json) -> str:
        name = _string(node).removesuffix("#")
        if name not in _DIALECTS:
            raise UnsupportedSchema(f"the dialect {name!r} is not supported", pointer=node.pointer, keyword="$schema")
        return _DIALECTS[name]

    def dialect_again(self, schema: Schema, node: Json) -> None:
        if self.named_dialect(node) != self.dialect:
            raise UnsupportedSchema("one document, one dialect", pointer=node.pointer, keyword="$schema")

    def identity(self, schema: Schema, node: Json) -> None:
        _string(node)
        if schema.node is not self.source:
            raise UnsupportedSchema("'$id' is only supported at the root", pointer=node.pointer, keyword="$id")

    def reference(self, schema: Schema, node: Json) -> Schema:
        target = _string(node)
        if target[:1] != "#" or target[1:2] not in ("", "/"):
            raise UnsupportedSchema("only references to places of this document ('#', '#/...') are supported",
                                    pointer=node.pointer, keyword="$ref")  # fmt: skip
        self.references.append((schema, target))
        return NEVER  # until everything is read

    def resolve(self, schema: Schema, target: str) -> Schema:
        node: Json | None = self.source
        for token in unquote(target[1:]).split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if node is not None and node.kind == "array":
                index = int(token) if re.fullmatch("0|[1-9][0-9]{0,8}", token) else len(node.value)
                node = node.value[index] if index < len(node.value) else None
            elif node is not None:
                node = node.get(token)
        found = self.positions.get(id(node))
        if found is None:
            raise InvalidSchema(f"{target!r} does not name a schema of this document", pointer=schema.at("$ref"))
        return found

    def refuse_loops(self) -> None:
        """A schema that applies itself to the same value has no defined meaning."""
        done: set[int] = set()
        for start in self.positions.values():
            path: list[tuple[Schema, Iterator[Schema]]] = []
            on_path: set[int] = set()
            following: Schema | None = start
            while following is not None or path:
                if following is None:
                    done.add(id(path[-1][0]))
                    on_path.discard(id(path.pop()[0]))
                elif id(following) in on_path:
                    raise InvalidSchema("the reference leads back to itself", pointer=path[-1][0].pointer)
                elif id(following) not in done:
                    path.append((following, following.applied()))
                    on_path.add(id(following))
                following = next(path[-1][1], None) if path else None

    # -- keywords that hold schemas

    def several(self, schema: Schema, node: Json) -> tuple[Schema, ...]:
        if node.kind != "array" or not node.value:
            raise InvalidSchema("expected an array of at least one schema", pointer=node.pointer)
        return tuple(map(self.position, node.value))

    def named(self, schema: Schema, node: Json) -> dict[str, Schema]:
        return {name: self.position(value) for name, value in _object(node).items()}

    def by_pattern(self, schema: Schema, node: Json) -> dict[str, Schema]:
        for name, value in _object(node).items():
            _regex(name, value, "patternProperties")
        return self.named(schema, node)

    def definitions(self, schema: Schema, node: Json) -> None:
        self.named(schema, node)

    def items(self, schema: Schema, node: Json) -> Schema | None:
        if node.kind != "array" or self.dialect == "2020-12":
            return self.position(node)
        schema.keywords["prefixItems"] = self.several(schema, node) if node.value else ()
        return None


# -- keyword values


def _a(kind: str) -> str:
    return "null" if kind == "null" else f"{'an' if kind[0] in 'aeio' else 'a'} {kind}"


def _string(node: Json) -> str:
    if node.kind != "string":
        raise InvalidSchema(f"expected a string, not {_a(node.kind)}", pointer=node.pointer)
    return str(node.value)


def _object(node: Json) -> dict[str, Json]:
    if node.kind != "object":
        raise InvalidSchema(f"expected an object, not {_a(node.kind)}", pointer=node.pointer)
    return dict(node.value)


def _names(node: Json) -> dict[str, Json]:
    """Unique strings and where they stand."""
    if node.kind != "array":
        raise InvalidSchema(f"expected an array of names, not {_a(node.kind)}", pointer=node.pointer)
    names: dict[str, Json] = {}
    for item in node.value:
        if _string(item) in names:
            raise InvalidSchema(f"{item.value!r} is listed twice", pointer=item.pointer)
        names[item.value] = item
    return names


def _types(node: Json) -> tuple[str, ...]:
    names = {node.value: node} if node.kind == "string" else _names(node)
    for name, item in names.items():
        if name not in TYPES:
            raise InvalidSchema(f"{name!r} is not a type", pointer=item.pointer)
    if not names:
        raise InvalidSchema("expected at least one type", pointer=node.pointer)
    return tuple(name for name in names if name != "integer" or "number" not in names)


def _count(node: Json) -> int:
    if node.kind != "number" or node.value < 0 or node.value.adjusted() > 18 or node.value % 1:
        raise InvalidSchema("expected an integer of at least 0", pointer=node.pointer)
    return int(node.value)


def _number(node: Json, keyword: str) -> Decimal:
    if node.kind != "number":
        raise InvalidSchema(f"expected a number, not {_a(node.kind)}", pointer=node.pointer)
    check_number(node, keyword)
    return Decimal(node.value)


def _divisor(node: Json) -> int:
    value = _number(node, "multipleOf")
    if value <= 0:
        raise InvalidSchema("expected a number above 0", pointer=node.pointer)
    if value.adjusted() > 18 or value % 1 or value > INT64[1]:
        raise UnsupportedSchema("'multipleOf' is only supported for integers of 64 bits", pointer=node.pointer,
                                keyword="multipleOf")  # fmt: skip
    return int(value)


def _regex(pattern: str, node: Json, keyword: str) -> None:
    try:
        with placed(node.pointer):
            regex.parse(pattern)
    except InvalidRegex as error:
        raise UnsupportedSchema(f"the pattern, {error.reason}", pointer=node.pointer, keyword=keyword) from error


def _pattern(node: Json) -> str:
    _regex(_string(node), node, "pattern")
    return str(node.value)


def _format(node: Json) -> str:
    if _string(node) not in FORMATS:
        raise UnsupportedSchema(f"the format {node.value!r} is not supported", pointer=node.pointer, keyword="format")
    return str(node.value)


def _values(node: Json, keyword: str) -> dict[str, Json]:
    """The values, each once, by what makes them equal."""
    if keyword == "enum" and (node.kind != "array" or not node.value):
        raise InvalidSchema("expected an array of at least one value", pointer=node.pointer)
    values = node.value if keyword == "enum" else (node,)
    for value in values:
        check_value(value, keyword)
    return {key(value): value for value in values}


def _flag(node: Json) -> bool | None:
    if node.kind != "boolean":
        raise InvalidSchema(f"expected a boolean, not {_a(node.kind)}", pointer=node.pointer)
    return node.value or None


def _dependent(node: Json) -> dict[str, dict[str, Json]]:
    return {name: _names(names) for name, names in _object(node).items()}


_Parse = Callable[[_Loader, Schema, Json], Any]


def _plain(parse: Callable[[Json], Any]) -> _Parse:
    return lambda loader, schema, node: parse(node)


def _schema(loader: _Loader, schema: Schema, node: Json) -> Schema:
    return loader.position(node)


_KEYWORDS: dict[str, _Parse] = {
    "$schema": _Loader.dialect_again,
    "$id": _Loader.identity,
    "$ref": _Loader.reference,
    "$defs": _Loader.definitions,
    "definitions": _Loader.definitions,
    "discriminator": lambda loader, schema, node: None,
    "type": _plain(_types),
    "const": _plain(lambda node: _values(node, "const")),
    "enum": _plain(lambda node: _values(node, "enum")),
    "allOf": _Loader.several,
    "anyOf": _Loader.several,
    "oneOf": _Loader.several,
    "not": _schema,
    "if": _schema,
    "then": _schema,
    "else": _schema,
    "minimum": _plain(lambda node: _number(node, "minimum")),
    "maximum": _plain(lambda node: _number(node, "maximum")),
    "exclusiveMinimum": _plain(lambda node: _number(node, "exclusiveMinimum")),
    "exclusiveMaximum": _plain(lambda node: _number(node, "exclusiveMaximum")),
    "multipleOf": _plain(_divisor),
    "minLength": _plain(_count),
    "maxLength": _plain(_count),
    "pattern": _plain(_pattern),
    "format": _plain(_format),
    "prefixItems": _Loader.several,
    "items": _Loader.items,
    "additionalItems": _schema,
    "minItems": _plain(_count),
    "maxItems": _plain(_count),
    "uniqueItems": _plain(_flag),
    "properties": _Loader.named,
    "patternProperties": _Loader.by_pattern,
    "additionalProperties": _schema,
    "required": _plain(_names),
    "dependentRequired": _plain(_dependent),
    "minProperties": _plain(_count),
    "maxProperties": _plain(_count),
}
_ONLY_IN = {"prefixItems": "2020-12", "dependentRequired": "2020-12", "additionalItems": "draft-07"}

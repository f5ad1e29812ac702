"""Schemas as applications write them, drawn from a seed."""

from __future__ import annotations

from random import Random
from typing import Any

NAMES = ("id", "name", "kind", "note", "tags", "city", "größe", "a b", "x1", "next", "price", "on", 'q"uote', "日付")
PATTERNS = ("^[A-Z][a-z]{1,6}$", "^\\d{2}-\\d{2}$", "b", "^(red|green|blue)$", "^[^<>]{0,8}$", "\\.$", "^\\S+$")
FORMATS = ("date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6")


def schema(random: Random, depth: int = 3) -> Any:
    """A schema; mostly one that can be enforced."""
    root = _schema(random, depth)
    if isinstance(root, dict) and random.random() < 0.2:
        again = {"$ref": "#/$defs/node"}
        node = {"type": "object", "properties": {"v": _scalar(random), "next": again}, "required": ["v"]}
        root = {"type": "object", "properties": {"list": again, "of": root}, "$defs": {"node": node}}
    return root


def _schema(random: Random, depth: int) -> Any:
    makers = [_scalar, _scalar, _finite] + [_object, _object, _array, _composed] * (depth > 0)
    maker = random.choice(makers)
    return maker(random) if maker in (_scalar, _finite) else maker(random, depth - 1)


def _bounds(random: Random, low: str, high: str, most: int) -> dict[str, int]:
    ends = sorted(random.randrange(most) for _ in range(2))
    return {name: end for name, end in zip((low, high), ends) if random.random() < 0.6}


def _scalar(random: Random) -> dict[str, Any]:
    kind = random.choice(["string", "string", "integer", "number", "boolean", "null"])
    found: dict[str, Any] = {"type": kind}
    if kind == "string":
        found |= _bounds(random, "minLength", "maxLength", 8) if random.random() < 0.5 else {}
        chance = random.random()
        if chance < 0.3:
            found["pattern"] = random.choice(PATTERNS)
        elif chance < 0.45:
            found = {"type": "string", "format": random.choice(FORMATS)}
        if random.random() < 0.1:
            found["type"] = ["string", "null"]
    elif kind == "integer":
        found |= _bounds(random, "minimum", "maximum", 1000)
        if random.random() < 0.2:
            found["multipleOf"] = random.choice([2, 5, 7])
    elif kind == "number":
        found |= _bounds(random, random.choice(["minimum", "exclusiveMinimum"]), "maximum", 100)
        found = {key: value - 0.5 if key != "type" and random.random() < 0.5 else value for key, value in found.items()}
    return found


def _finite(random: Random) -> dict[str, Any]:
    values = ["red", "green", 'a"b', "", 0, 1, -7, 2.5, True, None, [1, "x"], {"k": 1}]
    if random.random() < 0.2:
        return {"const": random.choice(values)}
    return {"enum": random.sample(values, random.randrange(1, 5))}


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randrange(1, 6))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(random, depth) for name in names},
        "required": [name for name in names if random.random() < 0.6],
    }
    chance = random.random()
    if chance < 0.7:
        found["additionalProperties"] = False
    elif chance < 0.85:
        found["additionalProperties"] = _scalar(random)
    if random.random() < 0.1:
        found["maxProperties"] = max(len(found["required"]), random.randrange(1, 6))
    if random.random() < 0.1:
        found["patternProperties"] = {"^x-": _scalar(random)}
    if random.random() < 0.1 and len(names) > 1:
        found["dependentRequired"] = {names[0]: [names[1]]}
    return found


def _array(random: Random, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array", "items": _schema(random, depth)}
    found |= _bounds(random, "minItems", "maxItems", 5)
    if random.random() < 0.2:
        found["prefixItems"] = [_schema(random, depth) for _ in range(random.randrange(1, 3))]
    if random.random() < 0.15:
        found = {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True}
    return found


def _composed(random: Random, depth: int) -> dict[str, Any]:
    chance = random.random()
    if chance < 0.5:
        return {"anyOf": [_schema(random, depth) for _ in range(random.randrange(2, 4))]}
    if chance < 0.7:
        branches = [
            {"type": "object", "properties": {"kind": {"const": kind}, "value": _schema(random, depth)},
             "required": ["kind"], "additionalProperties": False}
            for kind in ("one", "two")
        ]  # fmt: skip
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}
    if chance < 0.85:
        return {"allOf": [_scalar(random), {"not": {"const": "red"}}]}
    return {
        "if": {"properties": {"kind": {"const": "one"}}, "required": ["kind"]}, "then": {"required": ["note"]},
        "type": "object", "properties": {"kind": {"enum": ["one", "two"]}, "note": _scalar(random)},
        "additionalProperties": False,
    }  # fmt: skip

"""Constraints made to exhaust a compiler. Each must end in a ConstraintError, or compile, within bounded work."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ninfer.constraints.output import OutputConstraint


def _nested(depth: int, wrap: Callable[[Any], Any], leaf: Any) -> Any:
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def _text(depth: int, before: str, leaf: str, after: str) -> str:
    return before * depth + leaf + after * depth


INT = {"type": "integer"}
STR = {"type": "string"}


def _fan_out(levels: int, keyword: str) -> dict[str, Any]:
    defs: dict[str, Any] = {"d0": {"properties": {"a": INT}}}
    for i in range(1, levels):
        defs[f"d{i}"] = {keyword: [{"$ref": f"#/$defs/d{i - 1}"}, {"$ref": f"#/$defs/d{i - 1}", "minProperties": i}]}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": defs}


def _distinct_members(levels: int) -> dict[str, Any]:
    """Each level intersects two members of the one below, in every combination."""
    defs: dict[str, Any] = {"d0": INT}
    for i in range(1, levels):
        below = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {
            "properties": {"a": {"allOf": [below, {"properties": {f"x{i}": below}}]}, "b": below},
            "additionalProperties": {"$ref": f"#/$defs/d{max(0, i - 2)}"},
        }
    return {"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(levels)], "$defs": defs}


SCHEMAS: dict[str, Any] = {
    "nested items": lambda: _text(1990, '{"items":', "{}", "}"),
    "nested not": lambda: _text(1990, '{"not":', '{"minimum":1}', "}"),
    "nested anyOf": lambda: _text(990, '{"anyOf":[', "{}", "]}"),
    "nested allOf with const": lambda: '{"const":[[1]],"allOf":[' + _text(980, '{"allOf":[', "{}", "]}") + "]}",
    "deeper than the reader": lambda: _text(5000, '{"items":', "{}", "}"),
    "brackets": lambda: "[" * 500_000,
    "wide below deep": lambda: _text(1990, "[", ",".join(["1"] * 400_000), "]"),
    "schemas below deep": lambda: _text(950, '{"not":', '{"anyOf":[' + ",".join(["true"] * 180_000) + "]}", "}"),
    "enum of numbers": lambda: {"enum": list(range(120_000))},
    "enum against a union": lambda: {"enum": list(range(60_000)), "anyOf": [{"minimum": i} for i in range(2000)]},
    "enums in oneOf": lambda: {"oneOf": [{"enum": list(range(i, i + 300))} for i in range(0, 30_000, 300)]},
    "enums against enums": lambda: {
        "$ref": "#/$defs/u", "anyOf": [{"$ref": "#/$defs/u"}],
        "$defs": {"u": {"anyOf": [{"enum": [i + j * 7 for j in range(900)]} for i in range(120)]}},
    },
    "prefixes against prefixes": lambda: {
        "allOf": [{"$ref": "#/$defs/u"}, {"$ref": "#/$defs/u", "maxItems": 10**6}], "type": "array",
        "$defs": {"u": {"anyOf": [{"type": "array", "prefixItems": [{"minimum": i}] * 350} for i in range(110)]}},
    },
    "objects of many names, often": lambda: {
        "properties": {f"name{i}": INT for i in range(5000)},
        "anyOf": [{"type": "object", "properties": {f"name{i}": {"minimum": i}}} for i in range(2000)],
    },
    "consts in oneOf": lambda: {"oneOf": [{"const": i} for i in range(20_000)]},
    "objects in oneOf": lambda: {
        "oneOf": [{"properties": {"k": {"const": i}, "v": {"minimum": i}}, "required": ["k"]} for i in range(3000)]
    },
    "objects in oneOf without a discriminator": lambda: {
        "oneOf": [{"properties": {f"k{i}": INT}, "required": [f"k{i}"]} for i in range(3000)]
    },
    "unions of unions": lambda: {"allOf": [{"anyOf": [{"minLength": i}, {"maxItems": i}]} for i in range(40)]},
    "fan-out of allOf": lambda: _fan_out(60, "allOf"),
    "fan-out of anyOf": lambda: _fan_out(60, "anyOf"),
    "fan-out of a checked value": lambda: {**_fan_out(60, "allOf"), "const": {"a": 1, "b": 2}},
    "members in every combination": lambda: _distinct_members(40),
    "dependent names": lambda: {
        "properties": {f"p{i}": INT for i in range(40)},
        "dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(39)},
    },
    "conditions": lambda: {
        "allOf": [{"if": {"properties": {f"p{i}": {"const": i}}}, "then": {"required": [f"p{i}"]}} for i in range(30)]
    },
    "patterns of names": lambda: {"patternProperties": {f"{chr(97 + i)}.*{chr(98 + i)}": INT for i in range(24)}},
    "repeated repetition": lambda: {**STR, "pattern": "((a{1,90}){1,90}){1,90}"},
    "a long repetition": lambda: {**STR, "pattern": "(ab|cd|[e-z]{2,3}){8000}"},
    "exponential subsets": lambda: {**STR, "pattern": "^(a|b)*a(a|b){25}$"},
    "product of patterns": lambda: {
        **STR, "allOf": [{"pattern": f"{a}.{{{n}}}{b}"} for n, (a, b) in enumerate(["ab", "cd", "ef", "gh"], 8)]
    },
    "wide classes": lambda: {
        **STR, "pattern": "".join(f"[{chr(0x4E00 + 7 * i)}-{chr(0x4E05 + 9 * i)}]*" for i in range(600))
    },
    "length and pattern": lambda: {**STR, "pattern": "a.{30}b.{30}c", "maxLength": 8192},
    "denied enum": lambda: {"not": {"enum": [f"{i:x}" * 9 for i in range(20_000)]}, **STR},
    "denied numbers": lambda: {"not": {"enum": list(range(20_000))}},
    "many properties": lambda: {"properties": {f"name{i}": {"maxLength": i} for i in range(25_000)}},
    "many open objects": lambda: {
        "allOf": [{"properties": {f"n{i}_{j}": INT for j in range(90)}} for i in range(120)],
    },
    "counted members": lambda: {"maxProperties": 10**9, "properties": {f"a{i}": INT for i in range(500)}},
    "long arrays": lambda: {"items": INT, "minItems": 10**15},
    "permutations": lambda: {"items": {"enum": list(range(40))}, "uniqueItems": True},
    "large divisor": lambda: {**INT, "multipleOf": 2**61 - 1},
    "large integers": lambda: '{"multipleOf":1' + "0" * 900 + "}",
    "large exponents": lambda: '{"minimum":1e999999999,"maxLength":1e999999999}',
    "long numbers": lambda: '{"enum":[' + ",".join(["0." + "1" * 900] * 1000) + "]}",
    "unproductive chain": lambda: {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{(i + 1) % 9000}"}}, "required": ["a"]}
            for i in range(9000)
        },
    },
}  # fmt: skip
REGEXES: dict[str, Callable[[], str]] = {
    "nested groups": lambda: "(" * 60_000 + "a" + ")" * 60_000,
    "multiplied counts": lambda: _text(40, "(?:", "a{8000}", "){8000}"),
    "many counts": lambda: "(?:[a-z]{8192}){31}" * 20_000,
    "alternatives": lambda: "|".join(["abc[d-z]{2,5}"] * 60_000),
    "much to leave out": lambda: "[a-z]?" * 3000,
}
GRAMMARS: dict[str, Callable[[], str]] = {
    "nested groups": lambda: "root ::= " + _text(300_000, "(", "[a]", ")"),
    "multiplied counts": lambda: "root ::= " + _text(900, "(", "[a]", "{65536})"),
    "chain": lambda: "\n".join(
        ["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(40_000)), 'r40000 ::= "b" r39999']
    ),
    "much to leave out": lambda: "root ::= " + " ".join(["a b"] * 900) + "\na ::= [a-z]?\nb ::= [^x]*",
    "long alternatives": lambda: "root ::= " + " | ".join(["[a-z] root [0-9]"] * 50_000) + ' | "x"',
}


def constraints() -> dict[str, OutputConstraint | Callable[[], OutputConstraint]]:
    """Makers by name; making a constraint may already refuse it."""
    makers: dict[str, Any] = {}
    for name, schema in SCHEMAS.items():
        made = schema
        makers[f"schema: {name}"] = lambda made=made: OutputConstraint.json_schema(
            made() if isinstance(made(), str) else json.dumps(made())
        )
    for name, text in REGEXES.items():
        makers[f"regex: {name}"] = lambda text=text: OutputConstraint.regex(text())
    for name, text in GRAMMARS.items():
        makers[f"grammar: {name}"] = lambda text=text: OutputConstraint.grammar(text())
    return makers

"""Tool declarations, and what they say about the type of each argument."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ninfer.errors import InvalidRequest, ToolContractError
from ninfer.frontend.messages import flag
from ninfer.frontend.plain import plain, plain_text
from ninfer.inputs import Tool

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "object", "array"})
_MAX_NAME = 256


@attrs.frozen
class Declaration:
    """One tool: the value the caller gave, and the mapping the template prints."""

    tool: Tool
    value: dict[str, Any]


def read_tools(tools: Any) -> list[Declaration]:
    """Check Tool values and OpenAI mappings. Raises InvalidRequest naming the index, ToolContractError the tool."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise InvalidRequest(f"expected a sequence of tools, got {type(tools).__name__}", field="tools")
    declarations: list[Declaration] = []
    names: set[str] = set()
    for i, tool in enumerate(tools):
        declaration = _read(tool, f"tools[{i}]")
        name = declaration.tool.name
        if name in names:
            raise ToolContractError("declared twice", tool=name, field=f"tools[{i}]")
        names.add(name)
        declarations.append(declaration)
    return declarations


def _read(tool: Any, field: str) -> Declaration:
    if isinstance(tool, Tool):
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        value = {"type": "function", "function": plain(function, field)}
        marker, strict = tool.cache_marker, tool.strict
    elif isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        if tool.get("type", "function") != "function":
            raise InvalidRequest(f"expected 'function', got {tool['type']!r}", field=f"{field}.type")
        value = plain({key: item for key, item in tool.items() if key != "cache_marker"}, field)
        marker, strict = (
            flag(tool, "cache_marker", field),
            flag(value["function"], "strict", f"{field}.function"),
        )
    else:
        raise InvalidRequest("expected a Tool or a mapping {'type': 'function', 'function': {...}}", field=field)
    function = value["function"]
    name = plain_text(function.get("name"), f"{field}.name")
    if not 0 < len(name) <= _MAX_NAME or "\n" in name or ">" in name:
        raise ToolContractError(
            f"a name has 1..{_MAX_NAME} characters, no newline and no '>'",
            tool=name,
            pointer="/name",
            field=field,
        )
    description = plain_text(function.get("description") or "", f"{field}.description")
    parameters = {} if function.get("parameters") is None else function["parameters"]
    if not isinstance(parameters, dict):
        raise ToolContractError("expected a JSON Schema object", tool=name, pointer="/parameters", field=field)
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise ToolContractError("expected an object", tool=name, pointer="/parameters/properties", field=field)
    for key in properties:
        if not key or "\n" in key or ">" in key:
            raise ToolContractError(
                "a parameter name is not empty and has no newline and no '>'",
                tool=name, pointer=f"/parameters/properties/{key}", field=field,
            )  # fmt: skip
    if not isinstance(strict, bool) or not isinstance(marker, bool):
        raise InvalidRequest("strict and cache_marker are bools", field=field)
    known = Tool(name=name, description=description, parameters=parameters, strict=strict, cache_marker=marker)
    return Declaration(known, value)


# -- argument types ------------------------------------------------------------------------------------------


def argument_types(tool: Tool) -> dict[str, frozenset[str]]:
    """JSON types each declared parameter admits, where the schema says so. "number" includes "integer"."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    references: dict[str, frozenset[str]] = {}
    found = {key: _types(schema, tool.parameters, references) for key, schema in properties.items()}
    return {key: types for key, types in found.items() if types}


def _types(schema: Any, root: Mapping[str, Any], references: dict[str, frozenset[str]]) -> frozenset[str]:
    """The types a schema admits; empty when it does not say, or not in a way understood here.

    ``references`` remembers what each ``$ref`` came to, so that cycles end and nothing is worked out twice.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    if "type" in schema:
        kinds = schema["type"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        known = isinstance(kinds, list) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
        return frozenset(kinds) if known else frozenset()
    if "const" in schema:
        return frozenset({json_type(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(json_type, schema["enum"]))
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in references:
            references[reference] = frozenset()
            references[reference] = _types(_resolve(reference, root), root, references)
        return references[reference]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            branches = [_types(branch, root, references) for branch in schema[key]]
            return frozenset().union(*branches) if all(branches) else frozenset()
    if isinstance(schema.get("allOf"), list):
        branches = [types for branch in schema["allOf"] if (types := _types(branch, root, references))]
        return frozenset.intersection(*branches) if branches else frozenset()
    return frozenset()


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The target of a local JSON Pointer reference, or None."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def json_type(value: Any) -> str:
    """The JSON Schema type of a decoded value; integers are "integer"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def decode_json(value: str) -> Any:
    """Strict JSON: no NaN, no infinities, no lone surrogates. Raises ValueError."""
    try:
        decoded = json.loads(value, parse_constant=_no_constant)
        json.dumps(decoded, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    return decoded


def decode_argument(raw: str, types: frozenset[str]) -> Any:
    """An argument's value from its text, with the declared types as hints.

    Only strings: the text itself. Otherwise the text is tried as JSON (booleans and null in Python's spelling
    too), and taken if its type is declared or nothing is; failing that, a declared string keeps the text, and
    so does text that is not JSON.
    """
    if types == {"string"}:
        return raw
    stripped = raw.strip()
    lowered = stripped.lower()
    if "boolean" in types and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in types and lowered in ("null", "none"):
        return None
    try:
        value = decode_json(stripped)
    except ValueError:
        return raw
    kind = json_type(value)
    admitted = kind in types or (kind == "integer" and "number" in types)
    if kind == "number" and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return raw if "string" in types and (kind == "string" or not admitted) else value

"""JSON values given in a schema: which numbers survive a reader, when two values are equal, how a value is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Literal

from ninfer.constraints.ir import json_spelled
from ninfer.constraints.limits import MAX_DEPTH
from ninfer.constraints.numbers import INT64, PLAIN_EXPONENTS
from ninfer.constraints.source import Json
from ninfer.errors import ConstraintLimit, UnsupportedSchema

Separators = Literal["compact", "tool"]
"""``compact`` writes ``,`` and ``:``; ``tool`` writes ``, `` and ``: ``, as the chat template writes nested values."""

_SEPARATORS = {"compact": (",", ":"), "tool": (", ", ": ")}


def separators(spelling: Separators) -> tuple[str, str]:
    """What stands between members and after a member's name."""
    return _SEPARATORS[spelling]


def check_number(node: Json, keyword: str, *, value: bool = False) -> None:
    """Refuse a number that a reader would round: it must be an int64, or equal to the shortest decimal of the binary64
    it parses to. With ``value`` (a literal of ``const`` or ``enum``) an integer spelling must be an int64."""
    integer_spelling = not set(node.text) & set(".eE")
    if integer_spelling and INT64[0] <= node.value <= INT64[1]:
        return
    if not (integer_spelling and value):
        parsed = float(node.text)
        if parsed - parsed == 0.0 and Decimal(repr(parsed)) == node.value:
            return
    raise UnsupportedSchema(f"number precision: {node.text[:40]} does not survive JSON", pointer=node.pointer,
                            keyword=keyword)  # fmt: skip


def check_value(value: Json, keyword: str) -> None:
    """Refuse a value that cannot be written exactly, or is nested too deeply."""
    if value.nesting() > MAX_DEPTH:
        raise ConstraintLimit(f"a value nested deeper than {MAX_DEPTH}", limit="depth", pointer=value.pointer)
    for node in value.walk():
        if node.kind == "number":
            check_number(node, keyword, value=True)


def number_text(value: Decimal) -> str:
    """The canonical text of a number that passed :func:`check_number`: an int64 as an integer, else its shortest
    decimal, plain for ordinary magnitudes and scientific for the others."""
    if value == value.to_integral_value() and INT64[0] <= value <= INT64[1]:
        return str(int(value))
    value = value.normalize()
    exponent = value.adjusted()
    if exponent in PLAIN_EXPONENTS and value != value.to_integral_value():
        return format(value, "f")
    digits = "".join(map(str, value.as_tuple().digits))
    point = "." if len(digits) > 1 else ""
    return f"{'-' if value < 0 else ''}{digits[0]}{point}{digits[1:]}e{exponent}"


def spell(value: Json, spelling: Separators) -> str:
    """The value as generated JSON, members in source order."""
    comma, colon = _SEPARATORS[spelling]
    return _fold(value, lambda text: f'"{json_spelled(text)}"', comma, colon, ordered=True)


def key(value: Json) -> str:
    """Equal for equal JSON values: numbers by value, objects without order."""
    return _fold(value, json.dumps, ",", ":", ordered=False)


def _fold(value: Json, string: Callable[[str], str], comma: str, colon: str, *, ordered: bool) -> str:
    """Write a value from the leaves up, so that depth needs no stack."""
    done: dict[int, str] = {}
    for node in reversed(list(value.walk())):
        if node.kind == "object":
            members = [string(name) + colon + done.pop(id(child)) for name, child in node.value.items()]
            text = "{" + comma.join(members if ordered else sorted(members)) + "}"
        elif node.kind == "array":
            text = "[" + comma.join(done.pop(id(child)) for child in node.value) + "]"
        elif node.kind == "string":
            text = string(node.value)
        elif node.kind == "number":
            text = number_text(node.value)
        else:
            text = "null" if node.value is None else "true" if node.value else "false"
        done[id(node)] = text
    return done[id(value)]

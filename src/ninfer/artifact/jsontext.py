"""Strict JSON: one UTF-8 text, unique member names at every depth, finite numbers, no lone surrogates."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """A JSON text the standard decoder would accept."""


def parse_json(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, saying why, for anything but strict JSON.

    A byte-order mark, text after the value, duplicate members, NaN, infinities (``1e999`` too), lone
    surrogates, integers beyond Python's digit limit and nesting beyond its stack are refused.
    """
    try:
        decoded = text.decode("utf-8")
        if decoded.startswith("\ufeff"):
            raise _Refused("byte-order mark")
        value = _DECODER.decode(decoded)
        if _SURROGATE_ESCAPE.search(decoded):
            _refuse_surrogates(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def dump_json(value: Any) -> bytes:
    """Compact JSON, non-ASCII unescaped. Raises ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for i, name in enumerate(names) if name in names[:i])
        raise _Refused(f"duplicate member {duplicate!r}")
    return members


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Refused(f"number out of range: {text[:40]}")
    return value


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_members, parse_float=_finite, parse_constant=_constant)


def _refuse_surrogates(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if any("\ud800" <= c <= "\udfff" for c in item):
                raise _Refused(f"lone surrogate in {item[:40]!r}")
        elif isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)

"""Caller values as templates may see them: str, int, float, bool, None, list and dict, nothing shared or
lazy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ninfer.errors import InvalidRequest

MAX_NESTING = 64


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """A deep copy of JSON-like ``value``. Raises InvalidRequest naming the place that is not."""
    if depth > MAX_NESTING:
        raise InvalidRequest(f"nested deeper than {MAX_NESTING}", field=field)
    if isinstance(value, str):
        return plain_text(value, field)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(f"expected a finite number, got {value}", field=field)
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(f"expected string keys, got {key!r}", field=field)
        return {plain_text(key, field): plain(item, f"{field}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{field}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(f"expected a JSON value, got {type(value).__name__}", field=field)


def plain_text(value: Any, field: str) -> str:
    """``value`` if it is a string that UTF-8 can carry. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(f"expected a string, got {type(value).__name__}", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"lone surrogate at character {error.start}", field=field) from None
    return str(value)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a plain value with every string, keys included, replaced by ``change(string)``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return [map_strings(item, change) for item in value] if isinstance(value, list) else value

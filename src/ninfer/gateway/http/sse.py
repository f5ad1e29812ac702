"""Server-sent events: named frames of JSON."""

from __future__ import annotations

import json
from typing import Any

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def dumps(value: Any) -> str:
    """Compact JSON text."""
    return _encode(value)


def frame(value: Any, name: str | None = None) -> bytes:
    """One event; ``name`` where the protocol names its events."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {_encode(value)}\n\n".encode()

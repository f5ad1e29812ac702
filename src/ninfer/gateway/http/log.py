"""What is written down about a request: one JSON line of counts, times and names, never text of a prompt or answer."""

from __future__ import annotations

import json
import sys
import time
from typing import IO, Any

import attrs

from ninfer.results import GenerationResult


@attrs.define(kw_only=True)
class Entry:
    """One request as it goes. seconds: since its first byte. outcome: one of ``metrics.OUTCOMES``."""

    id: str
    protocol: str
    began: float = attrs.field(factory=time.monotonic)
    stream: bool = False
    status: int = 0
    outcome: str = "failed"
    error: str | None = None
    first_event: float | None = None
    result: GenerationResult | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def line(entry: Entry, model: str) -> str:
    """The entry as JSON text."""
    record: dict[str, Any] = {
        "time": round(time.time(), 3),
        "id": entry.id,
        "protocol": entry.protocol,
        "model": model,
        "stream": entry.stream,
        "status": entry.status,
        "outcome": entry.outcome,
        "error": entry.error,
        "seconds": round(entry.seconds, 6),
    }
    result = entry.result
    if result is not None:
        record |= {
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "tool_calls": len(result.tool_calls),
            "usage": attrs.asdict(result.usage),
            "timings": attrs.asdict(result.timings),
            "speculation": result.speculation and attrs.asdict(result.speculation),
            "constraint": result.constraint and attrs.asdict(result.constraint),
        }
    return json.dumps(record)


class RequestLog:
    """A file that grows by one line for each request; ``"-"`` is standard output, None nothing."""

    def __init__(self, path: str | None) -> None:
        self._file: IO[str] | None = None
        self._owned = path not in (None, "-")
        if path is not None:
            self._file = sys.stdout if path == "-" else open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, entry: Entry, model: str) -> None:
        if self._file is not None:
            self._file.write(line(entry, model) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None and self._owned:
            self._file.close()
        self._file = None

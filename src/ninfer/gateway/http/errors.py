"""What went wrong with a request: a status and a place in the caller's own body, and each protocol's words for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ninfer.errors import (
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    NinferError,
    Overloaded,
    QueueTimeout,
)


class ApiError(Exception):
    """An answer that is an error. status: HTTP status. code: one word. path: the field at fault, or None."""

    def __init__(self, status: int, code: str, message: str, path: str | None = None) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.path = path
        super().__init__(message)


class BadRequest(ApiError):
    """A value that is refused: 400, with its path in the body."""

    def __init__(self, path: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(400, code, f"{path}: {message}" if path else message, path or None)


class ClientLeft(Exception):
    """Nobody is waiting for the answer any more."""


def api_error(error: BaseException, paths: Mapping[str, str]) -> ApiError:
    """The answer to an error of the library. ``paths``: the library's fields to the protocol's own.

    A message about an internal fault says no more than that there was one.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflow):
        return BadRequest(protocol_path(error, paths), error.reason, "context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return BadRequest(protocol_path(error, paths), error.reason)
    if isinstance(error, Overloaded):
        return ApiError(429, "overloaded", "the engine holds as many requests as it takes; try again later")
    if isinstance(error, QueueTimeout):
        return ApiError(503, "queue_timeout", str(error))
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, "timeout", str(error))
    if isinstance(error, EngineClosed | EngineFailed):
        return ApiError(503, "unavailable", "the engine takes no requests")
    if isinstance(error, NinferError):
        return ApiError(500, type(error).__name__, str(error))
    return ApiError(500, "internal_error", "an internal error; the server's log has it")


def protocol_path(error: InvalidRequest, paths: Mapping[str, str]) -> str:
    """The place an error names, as the caller spelled it: ``tools[0].parameters`` and ``/properties/a`` become, say,
    ``tools[0].input_schema.properties.a``."""
    field = error.field + "".join(map(_step, _pointer(error)))
    for known in sorted(paths, key=len, reverse=True):
        if field == known or (field.startswith(known) and field[len(known)] in ".["):
            return paths[known] + field[len(known) :]
    return field


def _pointer(error: InvalidRequest) -> list[str]:
    """The tokens of an error's JSON Pointer, if it has one."""
    pointer = getattr(error, "pointer", None) or ""
    return [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]


def _step(token: str) -> str:
    if token.isdecimal():
        return f"[{token}]"
    return f".{token}" if re.fullmatch(r"[\w$-]+", token) else f"[{token!r}]"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def openai_error(error: ApiError) -> dict[str, Any]:
    """The error object of OpenAI's protocols."""
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status == 401:
        kind = "authentication_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.path, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object. It has no place for a path, so the message begins with it."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    return {
        "type": "error",
        "error": {"type": _ANTHROPIC_TYPES.get(anthropic_status(error), kind), "message": error.message},
    }


def anthropic_status(error: ApiError) -> int:
    """Anthropic's clients know an overloaded server by 529."""
    return 529 if error.code == "overloaded" else error.status

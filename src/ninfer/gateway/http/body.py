"""A request's body: read from the connection within limits, and parsed without losing anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ninfer.gateway.http.errors import ApiError, ClientLeft
from ninfer.gateway.http.options import ServerOptions

Receive = Callable[[], Awaitable[Any]]


async def read_body(scope: Mapping[str, Any], receive: Receive, options: ServerOptions) -> bytes:
    """The whole body, within the options' limits. Raises ApiError (408, 413, 415), ClientLeft."""
    limit, timeout = options.max_body, options.body_timeout
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "unsupported_media_type", "expected the content type application/json")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, "body_timeout", f"the body did not arrive within {timeout:g} seconds") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is longer than {limit} bytes")


class Spelled(float):
    """A JSON number with a fraction or an exponent, and how it was written."""

    text: str

    def __new__(cls, text: str) -> Spelled:
        number = super().__new__(cls, text)
        number.text = text
        return number


def parse(raw: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises ApiError for anything else, for names that occur twice and lone surrogates."""
    try:
        value = json.loads(
            raw.decode(), parse_float=Spelled, parse_constant=_no_constant, object_pairs_hook=_without_duplicates
        )
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _malformed("a string holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise _malformed("nested too deep" if isinstance(error, RecursionError) else str(error)) from None
    if not isinstance(value, dict):
        raise _malformed("expected an object")
    return value


def schema_text(value: Any) -> str:
    """A parsed value as JSON text, each number as it was written."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{schema_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(schema_text, value)) + "]"
    return value.text if isinstance(value, Spelled) else json.dumps(value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _malformed(message: str) -> ApiError:
    return ApiError(400, "malformed_json", f"the body is not a JSON object: {message}")

"""How a server is run: everything an operator chooses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from ninfer.errors import InvalidRequest


def _positive(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise InvalidRequest(f"expected a number above 0, got {value!r}", field=attribute.name)


def _boolean(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"expected a bool, got {value!r}", field=attribute.name)


def _name(_: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidRequest(f"expected None or a non-empty string, got {value!r}", field=attribute.name)


def _names(_: Any, attribute: Any, value: tuple[Any, ...]) -> None:
    for item in value:
        _name(_, attribute, item or "")


def _strings(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)


@attrs.frozen(kw_only=True)
class ServerOptions:
    """Errors: InvalidRequest naming the field.

    model_id: what requests call the model, default ``engine.model_name``. api_keys: any of them is accepted, as
    ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; with none, nobody is asked. max_body: bytes of a body.
    max_requests: requests read, prepared or answered at once, default the engine's ``max_outstanding``.
    request_timeout: seconds from the submission of a request to the end of its answer. body_timeout: seconds for a body
    to arrive. stall_timeout: seconds a client may take nothing of what is written. cors_origins: origins whose pages
    may call this server, ``"*"`` for all. request_log: file that gets one line of JSON a request, ``"-"`` for standard
    output. warm_up: answer a prompt before saying ready. playground: a page at ``/`` to try the model with.
    """

    model_id: str | None = attrs.field(default=None, validator=_name)
    api_keys: tuple[str, ...] = attrs.field(default=(), converter=_strings, repr=False)
    max_body: int = attrs.field(default=8 << 20, validator=_positive)
    max_requests: int | None = attrs.field(default=None, validator=_positive)
    request_timeout: float | None = attrs.field(default=None, validator=_positive)
    body_timeout: float = attrs.field(default=30.0, validator=_positive)
    stall_timeout: float = attrs.field(default=60.0, validator=_positive)
    cors_origins: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_names)
    request_log: str | None = attrs.field(default=None, validator=_name)
    warm_up: bool = attrs.field(default=True, validator=_boolean)
    playground: bool = attrs.field(default=True, validator=_boolean)

    @api_keys.validator
    def _check_keys(self, _: Any, value: tuple[str, ...]) -> None:
        if not all(isinstance(key, str) and key.isascii() and key.strip() for key in value):
            raise InvalidRequest("expected non-empty ASCII strings", field="api_keys")

"""Who may ask: API keys, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from typing import Any

from ninfer.gateway.http.errors import ApiError


def check_key(scope: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Raises ApiError (401) unless the request carries one of ``keys``, or there are none."""
    known = [key.encode() for key in keys]
    if not known:
        return
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    if not given:
        raise ApiError(401, "missing_api_key", "expected an API key: Authorization: Bearer KEY, or x-api-key: KEY")
    if sum(hmac.compare_digest(given, key) for key in known) == 0:  # compares with every one of them
        raise ApiError(401, "invalid_api_key", "the API key is not known here")

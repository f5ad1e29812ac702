"""The files an artifact carries for the frontend, and how a broken one is refused."""

from __future__ import annotations

import json
from typing import Any

import attrs

from ninfer.errors import ArtifactError


@attrs.frozen
class FrontendResources:
    """Byte-exact copies of the files published with a model, plus the rows of its embedding.

    tokenizer_json, tokenizer_config, generation_config: UTF-8 JSON objects. chat_template: Jinja source.
    vocab_rows: rows ``R`` of the embedding; token ids run over ``0..V-1`` with ``V <= R``.
    """

    tokenizer_json: bytes
    tokenizer_config: bytes
    chat_template: str
    generation_config: bytes
    vocab_rows: int


def broken(where: str, message: str) -> ArtifactError:
    """The error for an unusable resource; ``where`` is its file name, with a place inside if known."""
    return ArtifactError(message, where=where)


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Decode a JSON object. Raises ArtifactError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise broken(where, f"not valid UTF-8 JSON: {error}") from None
    if not isinstance(value, dict):
        raise broken(where, f"expected a JSON object, got {type(value).__name__}")
    return value

"""The server's own description, in OpenAPI 3.1, from the tables that read requests."""

from __future__ import annotations

from typing import Any

from ninfer import __version__
from ninfer.gateway.http import chat_completions, messages, responses
from ninfer.gateway.http.shapes import Record

_CHAT = {
    "id": "string",
    "object": "string",
    "created": "integer",
    "model": "string",
    "choices": "array",
    "usage": "object",
}
_RESPONSE = {"id": "string", "object": "string", "created_at": "integer", "model": "string", "status": "string",
             "output": "array", "usage": "object"}  # fmt: skip
_MESSAGE = {"id": "string", "type": "string", "role": "string", "model": "string", "content": "array",
            "stop_reason": "string", "usage": "object"}  # fmt: skip
_COUNT = {"input_tokens": "integer"}
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "description": "one server-sent event; a response is a sequence of them",
}
_OPENAI_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_REFUSALS = {
    "400": "a field is refused, or the body is not JSON",
    "401": "no API key, or an unknown one",
    "404": "another model, or no such path",
    "408": "the body did not arrive in time",
    "413": "the body is too long",
    "415": "the body is not application/json",
    "500": "the request failed",
    "503": "the engine takes no requests, or the request waited too long",
    "504": "the request did not end in time",
}


def document(model: str, *, keyed: bool = False) -> dict[str, Any]:
    """The whole description. model: the served model's id, the only one that requests may name. keyed: whether they
    need an API key."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "ninfer", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}] if keyed else [],
        "paths": {
            "/v1/chat/completions": _generation(chat_completions.FIELDS, model, _CHAT, "429", _OPENAI_ERROR),
            "/v1/responses": _generation(responses.FIELDS, model, _RESPONSE, "429", _OPENAI_ERROR),
            "/v1/messages": _generation(messages.FIELDS, model, _MESSAGE, "529", _ANTHROPIC_ERROR),
            "/v1/messages/count_tokens": _generation(messages.COUNT_FIELDS, model, _COUNT, "529", _ANTHROPIC_ERROR),
            "/v1/models": _reading("the served model"),
            "/v1/models/{model}": {
                **_reading("the served model", {"404": "another model"}),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            },
            "/health": _reading("whether the server runs", open=True),
            "/ready": _reading("whether requests are welcome", {"503": "not yet, or not any more"}, open=True),
            "/metrics": _reading("Prometheus metrics", kind="text/plain"),
        },
    }


def _generation(
    fields: Record, model: str, answer: dict[str, str], overloaded: str, error: dict[str, Any]
) -> dict[str, Any]:
    """A POST. answer: the types of the members that every answer has."""
    body = fields.schema()
    body["properties"]["model"] = {"type": "string", "enum": [model]}
    refusals = {**_REFUSALS, overloaded: "as many requests are running as the server takes"}
    written = {"application/json": {"schema": error}}
    members = {name: {"type": kind} for name, kind in answer.items()}
    whole = {"application/json": {"schema": {"type": "object", "properties": members, "required": list(members)}}}
    streamed = {"text/event-stream": {"schema": _EVENT}} if "stream" in body["properties"] else {}
    return {
        "post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "the answer", "content": {**whole, **streamed}},
                **{status: {"description": what, "content": written} for status, what in refusals.items()},
            },
        }
    }


def _reading(
    what: str, others: dict[str, str] | None = None, *, kind: str = "application/json", open: bool = False
) -> dict[str, Any]:
    """A GET. open: it needs no key."""
    refusals = {} if open else {"401": _REFUSALS["401"]}
    answers = {"200": what, **refusals, **(others or {})}
    found = {kind: {"schema": {"type": "string" if kind == "text/plain" else "object"}}}
    told = {"application/json": {"schema": {"type": "object"}}}
    responses = {
        code: {"description": said, "content": found if code == "200" else told} for code, said in answers.items()
    }
    get: dict[str, Any] = {"responses": responses}
    return {"get": {**get, "security": []} if open else get}

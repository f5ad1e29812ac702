"""A page to try a model with: plain files, no build and nothing from elsewhere, and one question it asks the server.

``core.js`` computes, ``app.js`` shows. Everything shown is set as text, and the page may load and reach nothing but its
own server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ninfer.constraints import OutputConstraint
from ninfer.errors import ConstraintError
from ninfer.gateway.http.access import check_key
from ninfer.gateway.http.body import parse, read_body
from ninfer.gateway.http.errors import BadRequest, ClientLeft
from ninfer.gateway.http.leaving import unless_left
from ninfer.gateway.http.service import Service
from ninfer.gateway.http.shapes import Either, Many, Record, Text, field

_FILES = {"index.html": "text/html", "style.css": "text/css", "core.js": "text/javascript", "app.js": "text/javascript"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FORMS = {
    "json_object": lambda _: OutputConstraint.json_object(),
    "json_schema": OutputConstraint.json_schema,
    "grammar": OutputConstraint.grammar,
    "regex": OutputConstraint.regex,
    "choice": OutputConstraint.choice,
}
_QUESTION = Record(
    (
        field("kind", Text(tuple(_FORMS)), "what the form is made from", required=True),
        field(
            "source", Either(text=Text(), array=Many(Text())), "its definition; of a choice, the texts", required=True
        ),
        field("text", Text(), "whether this is in it"),
    )
)


def routes(service: Service) -> list[BaseRoute]:
    """The page at ``/``, its files, and ``POST /playground/check``. The files need no key, the question does."""

    async def check(request: Request) -> Response:
        options = service.options
        check_key(request.scope, options.api_keys)
        try:
            with service.place():
                raw = await read_body(request.scope, request.receive, options)
                work = service.run(lambda: _check(parse(raw)))
                return JSONResponse(await unless_left(request.receive, work))
        except ClientLeft:
            return Response(status_code=499)

    page, *others = (_file(name, kind) for name, kind in _FILES.items())
    shown = [Route(f"/playground/{name}", other) for name, other in zip(list(_FILES)[1:], others)]
    return [Route("/", page), *shown, Route("/playground/check", check, methods=["POST"])]


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    response = Response((files(__package__) / name).read_bytes(), media_type=kind, headers=_HEADERS)

    async def send(_: Request) -> Response:
        return response

    return send


def _check(body: dict[str, Any]) -> dict[str, Any]:
    """Whether an output form is one, and with ``text`` whether that is in it: ``{"error": text?, "accepts"?}``."""
    asked = _QUESTION.read(body, "")
    kind, text = asked["kind"], asked.get("text")
    if isinstance(asked["source"], str) == (kind == "choice"):
        raise BadRequest("source", "expected an array" if kind == "choice" else "expected a string")
    try:
        form = _FORMS[kind](asked["source"])
        if text is not None:
            return {"error": None, "accepts": form.accepts(text)}
        form.check()
    except ConstraintError as error:
        return {"error": error.reason}
    return {"error": None}

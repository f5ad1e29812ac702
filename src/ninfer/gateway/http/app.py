"""The ASGI application: routes, and what has no protocol of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ninfer.engine import Engine
from ninfer.gateway.http import chat_completions, messages, playground, responses
from ninfer.gateway.http.access import check_key
from ninfer.gateway.http.errors import ApiError, anthropic_error, anthropic_status, openai_error
from ninfer.gateway.http.exchange import Endpoint, Protocol
from ninfer.gateway.http.openapi import document
from ninfer.gateway.http.options import ServerOptions
from ninfer.gateway.http.service import Service

PROTOCOLS = {
    "/v1/chat/completions": Protocol("chat_completions", chat_completions.read, openai_error),
    "/v1/responses": Protocol("responses", responses.read, openai_error),
    "/v1/messages": Protocol("messages", messages.read, anthropic_error, anthropic_status),
    "/v1/messages/count_tokens": Protocol("count_tokens", messages.read_count, anthropic_error, anthropic_status),
}


def create_app(engine: Engine, options: ServerOptions | None = None, **overrides: Any) -> Starlette:
    """An ASGI application over an open engine, which it does not close.

    options: ServerOptions; keyword arguments replace single fields. To be served with its lifespan: it warms up when
    that begins. Errors: TypeError for an unknown keyword, InvalidRequest.
    """
    chosen = ServerOptions(**overrides) if options is None else attrs.evolve(options, **overrides)
    service = Service(engine, chosen)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    cors = Middleware(
        CORSMiddleware, allow_origins=chosen.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    return Starlette(
        routes=_routes(service),
        middleware=[cors] if chosen.cors_origins else [],
        exception_handlers={HTTPException: _no_route, ApiError: _refusal},
        lifespan=lifespan,
    )


def _routes(service: Service) -> list[BaseRoute]:
    started, model = int(time.time()), service.served.model
    description = document(model, keyed=bool(service.options.api_keys))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        return JSONResponse({"ready": service.ready}, 200 if service.ready else 503)

    async def metrics(request: Request) -> Response:
        check_key(request.scope, service.options.api_keys)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(_: Request) -> Response:
        return JSONResponse(description)

    def described(request: Request) -> dict[str, Any]:
        if "anthropic-version" in request.headers:
            day = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))
            limits = {"max_input_tokens": service.engine.max_context, "max_tokens": service.engine.max_context}
            return {
                "type": "model",
                "id": model,
                "display_name": model,
                "created_at": day,
                "lifecycle": "active",
                **limits,
            }
        return {"id": model, "object": "model", "created": started, "owned_by": "ninfer"}

    async def models(request: Request) -> Response:
        check_key(request.scope, service.options.api_keys)
        one = described(request)
        if "anthropic-version" in request.headers:
            return JSONResponse({"data": [one], "has_more": False, "first_id": model, "last_id": model})
        return JSONResponse({"object": "list", "data": [one]})

    async def one_model(request: Request) -> Response:
        check_key(request.scope, service.options.api_keys)
        if request.path_params["model"] != model:
            raise ApiError(404, "model_not_found", f"only {model!r} is served here", "model")
        return JSONResponse(described(request))

    return [
        *(Route(path, Endpoint(service, protocol), methods=["POST"]) for path, protocol in PROTOCOLS.items()),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", one_model),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        *(playground.routes(service) if service.options.playground else ()),
        Route("/openapi.json", openapi),
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    refusal = ApiError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    return _written(request, refusal, error.headers)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _written(request, error)


def _written(request: Request, error: ApiError, headers: Any = None) -> Response:
    anthropic = "anthropic-version" in request.headers or request.url.path.startswith("/v1/messages")
    return JSONResponse((anthropic_error if anthropic else openai_error)(error), error.status, headers)

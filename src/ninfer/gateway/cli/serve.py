"""``ninfer serve``: the HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from ninfer.errors import InvalidRequest
from ninfer.gateway.cli.engine import add_engine_options, engine_options


def add_commands(commands: Any) -> None:
    p = commands.add_parser("serve", help="serve a model over HTTP", description=serve.__doc__)
    p.add_argument("artifact", metavar="ARTIFACT", help="path of the .ninfer entry file")
    g = p.add_argument_group("address and access")
    g.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1, this machine alone")
    g.add_argument("--port", type=int, default=8000, metavar="N", help="0 is any free one; default: 8000")
    g.add_argument("--model-id", metavar="NAME", help="what requests call the model; default: the artifact's name")
    g.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="ask for it; repeatable; default: $NINFER_API_KEY"
    )
    g.add_argument(
        "--cors-origin", action="append", default=[], metavar="URL", help="let its pages call; * is all; repeatable"
    )
    g = p.add_argument_group("limits")
    g.add_argument("--max-body", type=int, default=8 << 20, metavar="BYTES", help="of a request; default: 8388608")
    g.add_argument("--max-requests", type=int, metavar="N", help="at once; default: as --max-outstanding")
    g.add_argument("--request-timeout", type=float, metavar="S", help="seconds for a whole answer")
    g.add_argument("--body-timeout", type=float, default=30.0, metavar="S", help="for a body to arrive; default: 30")
    g.add_argument(
        "--stall-timeout", type=float, default=60.0, metavar="S", help="for a client to take what is sent; default: 60"
    )
    # Longer than clients (5 s) and balancers (60 s) keep one: whoever closes first loses no request that is on its way.
    g.add_argument(
        "--keep-alive-timeout", type=int, default=75, metavar="S", help="for a connection to be used again; default: 75"
    )
    g.add_argument(
        "--drain-timeout", type=int, default=30, metavar="S", help="for running answers when told to end; default: 30"
    )
    g = p.add_argument_group("operation")
    g.add_argument("--request-log", metavar="FILE", help="append a JSON line for each request; - is standard output")
    g.add_argument("--no-warm-up", action="store_true", help="say ready without having answered anything")
    g.add_argument("--no-playground", action="store_true", help="no page at / to try the model with")
    g = p.add_argument_group("engine")
    g.add_argument("--max-concurrency", type=int, default=4, metavar="N", help="answers decoded at once; default: 4")
    g.add_argument("--max-context", type=int, metavar="N", help="tokens of one conversation")
    g.add_argument("--max-outstanding", type=int, default=64, metavar="N", help="requests it holds; default: 64")
    g.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="output budget; default: 1024")
    g.add_argument("--queue-timeout", type=float, metavar="S", help="seconds a request may wait for its turn")
    add_engine_options(g)
    p.set_defaults(command=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Serve OpenAI's Chat Completions and Responses and Anthropic's Messages until told to end (Ctrl-C, SIGTERM);
    answers that are running then may finish."""
    try:
        import uvicorn

        from ninfer.gateway.http import ServerOptions, create_app
    except ImportError as error:
        print(f"ninfer: {error.name} is missing: pip install 'ninfer[serve]'", file=sys.stderr)
        return 1
    from ninfer.engine import Engine

    logging.basicConfig(level=logging.WARNING, format="ninfer: %(name)s: %(message)s")
    keys = arguments.api_key or [key for key in [os.environ.get("NINFER_API_KEY", "").strip()] if key]
    options = ServerOptions(
        model_id=arguments.model_id,
        api_keys=keys,
        max_body=arguments.max_body,
        max_requests=arguments.max_requests,
        request_timeout=arguments.request_timeout,
        body_timeout=arguments.body_timeout,
        stall_timeout=arguments.stall_timeout,
        cors_origins=arguments.cors_origin,
        request_log=arguments.request_log,
        warm_up=not arguments.no_warm_up,
        playground=not arguments.no_playground,
    )
    for name, least in (("keep_alive_timeout", 1), ("drain_timeout", 0)):
        if getattr(arguments, name) < least:
            raise InvalidRequest(f"expected at least {least}, got {getattr(arguments, name)}", field=name)
    with _listen(arguments.host, arguments.port, arguments.stall_timeout) as listening:
        chosen = engine_options(
            arguments,
            max_concurrency=arguments.max_concurrency,
            max_context=arguments.max_context,
            max_outstanding=arguments.max_outstanding,
            max_tokens=arguments.max_tokens,
            queue_timeout=arguments.queue_timeout,
        )
        with Engine(arguments.artifact, chosen) as engine:
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"ninfer: {engine!r}\nninfer: listening on http://{shown}:{port}", file=sys.stderr, flush=True)
            if not keys and not _is_loopback(host):
                print("ninfer: anybody who reaches this address can use it: see --api-key", file=sys.stderr, flush=True)
            config = uvicorn.Config(
                create_app(engine, options),
                log_config=None,
                access_log=False,
                timeout_keep_alive=arguments.keep_alive_timeout,
                timeout_graceful_shutdown=arguments.drain_timeout,
            )
            with _ending_quietly():
                uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int, stall_timeout: float) -> socket.socket:
    """A listening socket, opened before the model is, so that a port in use is known at once. Its connections send at
    once what is written, and end when their peer takes nothing for ``stall_timeout`` seconds."""
    if not 0 <= port <= 65535:
        raise InvalidRequest(f"expected 0..65535, got {port}", field="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # event loops see to it for their own sockets only
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = int(min(max(stall_timeout * 1000, 1), 2**31 - 1))  # 0 would be the system's own choice
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listening


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """The server raises the signal that ended it once more when it is done; nothing is to follow from that."""
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")

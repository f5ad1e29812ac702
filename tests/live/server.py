"""A server in a thread of its own, to be asked over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import attrs
import httpx2
import openai
import uvicorn

from ninfer import Engine
from ninfer.gateway.http import create_app

ENDLESS = {"structured_outputs": {"regex": "[ab]{8000}"}, "max_tokens": 1900}
"""Fields of an answer that goes on for seconds, until the context is full."""
TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"


@attrs.frozen
class Server:
    """A server in a thread of its own."""

    url: str
    port: int
    engine: Engine
    uvicorn: uvicorn.Server
    client: httpx2.Client = attrs.field(factory=lambda: httpx2.Client(timeout=60))

    def get(self, path: str, **kwargs: Any) -> httpx2.Response:
        return self.client.get(f"{self.url}{path}", **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx2.Response:
        headers = {"content-type": "application/json", **kwargs.pop("headers", {})}
        return self.client.post(f"{self.url}{path}", content=json.dumps(body), headers=headers, **kwargs)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="key", max_retries=0, **options)

    def app_connections(self) -> int:
        """Connections that are open."""
        return len(self.uvicorn.server_state.connections)

    def idle(self) -> bool:
        """Whether the engine comes to hold nothing, within seconds."""
        return until(lambda: self.engine.stats().outstanding == 0)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether ``condition`` comes true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def serving(engine: Engine, drain: int = 5, **options: Any) -> Iterator[Server]:
    """A server over ``engine`` while the block runs. drain: seconds that running answers then get."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # a client that stalls is felt soon
    config = uvicorn.Config(
        create_app(engine, **options), log_config=None, timeout_graceful_shutdown=drain, timeout_keep_alive=75
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),), daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    made = Server(f"http://127.0.0.1:{port}", port, engine, server)
    try:
        assert until(lambda: server.started)
        assert until(lambda: made.get("/ready").status_code == 200)
        yield made
    finally:
        made.client.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()

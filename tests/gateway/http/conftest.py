"""A live server on the bundled model, and the two official clients."""

from __future__ import annotations

import asyncio
import contextlib
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
import pytest
import uvicorn

from ninfer import Engine
from ninfer.gateway.http import create_app

TINY = Path(__file__).parents[3] / "examples" / "tiny" / "tiny.ninfer"


@attrs.frozen
class Server:
    """A server in a thread of its own."""

    url: str
    port: int
    engine: Engine
    uvicorn: uvicorn.Server

    def get(self, path: str, **kwargs: Any) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=60, **kwargs)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="key", max_retries=0, **options)

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
def serving(engine: Engine, **options: Any) -> Iterator[Server]:
    """A server over ``engine`` while the block runs."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(engine, **options), log_config=None, timeout_graceful_shutdown=5)
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
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine(TINY, max_context=2048, progress=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def server(engine: Engine) -> Iterator[Server]:
    with serving(engine) as server:
        yield server


@pytest.fixture
def serve(engine: Engine) -> Iterator[Callable[..., Server]]:
    """Starts further servers over the same engine, with options of their own."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(options.pop("engine", engine), **options))


@pytest.fixture(scope="session")
def model() -> str:
    return "ninfer-tiny"

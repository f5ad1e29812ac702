"""A live server on the bundled model, and the two official clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from live.server import TINY, Server, serving

from ninfer import Engine


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

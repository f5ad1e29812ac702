"""Clients that leave, whatever is being done for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from ninfer.gateway.http.body import Receive
from ninfer.gateway.http.errors import ClientLeft

T = TypeVar("T")


@contextlib.asynccontextmanager
async def watched(receive: Receive, leave: Callable[[], object]) -> AsyncIterator[None]:
    """Call ``leave`` when the client does, while the block runs."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, which is cancelled when the client leaves. Raises ClientLeft then."""
    task = asyncio.create_task(work)
    left = asyncio.Event()

    def leave() -> None:
        left.set()
        task.cancel()

    async with watched(receive, leave):
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if left.is_set() and not (this is not None and this.cancelling()):
                raise ClientLeft from None
            raise

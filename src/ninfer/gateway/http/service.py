"""What all requests of one server share: the engine, the threads that read, the counts, and whether it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ninfer.cancellation import CancelScope, aside
from ninfer.engine import Engine
from ninfer.gateway.http.errors import ApiError
from ninfer.gateway.http.log import Entry, RequestLog
from ninfer.gateway.http.metrics import Metrics
from ninfer.gateway.http.options import ServerOptions
from ninfer.gateway.http.translate import Served

T = TypeVar("T")
THREADS = 16
"""That read bodies and try output forms; the engine has its own for prompts and constraints."""

logger = logging.getLogger("ninfer.http")


class Service:
    """Made with the application; ``start`` and ``stop`` run with its server's life."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.served = Served(
            model=options.model_id or engine.model_name,
            max_tokens=engine.options.max_tokens,
            token_bytes=engine.token_bytes,
        )
        self.max_requests = options.max_requests or engine.options.max_outstanding
        self.running = 0
        self.warm = False
        self.metrics = Metrics(engine.stats, lambda: engine.available)
        self._log = RequestLog(options.request_log)
        self._threads = ThreadPoolExecutor(THREADS, "ninfer-http")
        self._warming: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Warm up beside the event loop; ``/health`` answers meanwhile."""
        if self.options.warm_up:
            self._warming = asyncio.create_task(self._warm_up())
        else:
            self.warm = True

    async def stop(self) -> None:
        """Once no request is running. The engine stays open: it belongs to whoever opened it."""
        if self._warming is not None:
            self._warming.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._log.close()

    async def _warm_up(self) -> None:
        try:
            await self.run(self.engine.warm_up)
        except Exception:
            logger.exception("the warm-up failed")
        else:
            self.warm = True

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        return self.warm and self.engine.available

    # -- requests --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A request's place among those that run at once. Raises ApiError (429) when there are enough."""
        if self.running >= self.max_requests:
            raise ApiError(429, "overloaded", f"{self.max_requests} requests are running; try again later")
        self.running += 1
        self.metrics.running.inc()
        try:
            yield
        finally:
            self.running -= 1
            self.metrics.running.dec()

    async def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` on a thread, where it ends early when this task is cancelled."""
        return await aside(self._threads, CancelScope(), work)

    def settle(self, entry: Entry) -> None:
        """Count and write down a request that has ended."""
        self.metrics.settle(entry)
        self._log.write(entry, self.served.model)

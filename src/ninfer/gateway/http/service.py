"""What all requests of one server share: the engine, the threads that prepare, the counts, and whether it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs

from ninfer import EngineStats
from ninfer.engine import Engine
from ninfer.gateway.http.errors import ApiError
from ninfer.gateway.http.log import Entry, RequestLog
from ninfer.gateway.http.metrics import Metrics
from ninfer.gateway.http.options import ServerOptions
from ninfer.gateway.http.translate import Served
from ninfer.inputs import Chat

T = TypeVar("T")
THREADS = 16
"""That prepare prompts and compile constraints; a slow one holds up no event loop, and 15 others go on."""

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
        self.metrics = Metrics(self.stats, lambda: engine.available)
        self._log = RequestLog(options.request_log)
        self._threads = ThreadPoolExecutor(THREADS, "ninfer-http")
        self._before: EngineStats | None = None
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
            prompt = Chat([{"role": "user", "content": "."}])
            handle = await self.run(self.engine.submit, prompt, max_tokens=2, cache="disabled")
            await handle
        except Exception:
            logger.exception("the warm-up failed")
        else:
            self._before = self.engine.stats()
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

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``work`` on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))

    def settle(self, entry: Entry) -> None:
        """Count and write down a request that has ended."""
        self.metrics.settle(entry)
        self._log.write(entry, self.served.model)

    def stats(self) -> EngineStats:
        """The engine's counters since the warm-up."""
        now, before = self.engine.stats(), self._before
        if before is None:
            return now
        context = attrs.evolve(now.context, **_since(now.context, before.context, _CONTEXT_COUNTERS))
        return attrs.evolve(now, context=context, **_since(now, before, _COUNTERS))


_COUNTERS = ("accepted", "prompt_tokens", "cached_tokens", "completion_tokens", "prefill_units", "control_units",
             "decode_rounds", "decode_rows", "decode_ns")  # fmt: skip
_CONTEXT_COUNTERS = ("hits", "misses", "reused_tokens", "captures", "skips", "evictions", "degraded", "bytes",
                     "assessments")  # fmt: skip


def _since(now: Any, before: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """How far counters, or mappings of counters, have come."""
    values = {name: (getattr(now, name), getattr(before, name)) for name in names}
    return {
        name: {key: count - b.get(key, 0) for key, count in a.items()} if isinstance(a, Mapping) else a - b
        for name, (a, b) in values.items()
    }

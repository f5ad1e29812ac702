"""Whether somebody still waits for what a thread works on. Long work asks now and then, and ends when nobody does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextvars import ContextVar, Token
from typing import TypeVar

from ninfer.errors import Cancelled, DeadlineExceeded

T = TypeVar("T")

POLL_SECONDS = 0.01
"""How often a thread that waits for another asks."""


class CancelScope:
    """What is done for one caller. Inside ``with scope:``, ``checkpoint`` raises once the scope is over.

    It is over when any thread calls ``cancel``, when it is ``timeout`` seconds old, when ``alive`` raises, and with the
    scope it was entered in. ``began`` and ``deadline`` are readings of ``clock``.
    """

    def __init__(
        self,
        timeout: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.cancelled = False
        self.began = clock()
        self.deadline = math.inf if timeout is None else self.began + timeout
        self._clock = clock
        self._alive = alive
        self._outer: CancelScope | None = None
        self._entered: Token[CancelScope | None] | None = None

    def cancel(self) -> None:
        """The caller has left."""
        self.cancelled = True

    def check(self) -> None:
        """Raises Cancelled, DeadlineExceeded, or what ``alive`` raises."""
        if self.cancelled:
            raise Cancelled("nobody waits for the request any more")
        self._alive()
        if self._clock() >= self.deadline:
            raise DeadlineExceeded("the request's timeout has passed")
        if self._outer is not None:
            self._outer.check()

    def __enter__(self) -> CancelScope:
        self._outer = _current.get()
        self._entered = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._entered is not None
        _current.reset(self._entered)


_current: ContextVar[CancelScope | None] = ContextVar("ninfer.cancel_scope", default=None)


def checkpoint() -> None:
    """Raise what ends this thread's work, if something does."""
    scope = _current.get()
    if scope is not None:
        scope.check()


async def aside(threads: Executor, scope: CancelScope, work: Callable[[], T]) -> T:
    """Call ``work`` on a thread, inside a scope that is over when the task that awaits it is cancelled."""
    import asyncio

    def inside() -> T:
        with scope:
            return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(threads, inside)
    except asyncio.CancelledError:
        scope.cancel()
        raise


def wait_for(future: Future[T]) -> T:
    """The result of another thread, unless the scope is over first."""
    while True:
        checkpoint()
        if future.done():
            return future.result()
        wait([future], POLL_SECONDS)

"""GenerationHandle: one request as its caller holds it. It reads events and sets flags, and never calls Program."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ninfer.errors import Cancelled, EngineClosed, InvalidRequest
from ninfer.results import Channel, Delta, Event, GenerationResult
from ninfer.runtime.response import Response

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class GenerationHandle:
    """A running request: an iterator and async iterator of its events, awaitable, and a context manager.

    Events come in order: GenerationStart, then Delta and ToolCallEvent values, last always one GenerationResult, whose
    ``error`` is set when the request failed; iterating raises nothing for it. ``result()`` and ``await`` give the
    result or raise that error. One consumer at a time: a second iterator raises InvalidRequest while the first one
    lives. Leaving the ``with`` block, dropping the handle, and cancelling the asyncio task that iterates or awaits it
    cancel the request. Handles are made by an engine and keep it alive. Thread-safe.
    """

    def __init__(self, response: Response, engine: object, metadata: Mapping[str, Any] | None) -> None:
        self._response = response
        self._engine = engine
        self._process = os.getpid()
        self._consumer: weakref.ref[EventStream[Any]] | None = None
        self._task: weakref.ref[asyncio.Task[Any]] | None = None
        self._exhausted = False
        self.metadata = metadata
        """What the request's options carried as ``metadata``."""

    def __repr__(self) -> str:
        result = self._response.result
        state = "running" if result is None else result.finish_reason
        return f"<GenerationHandle {state}, {len(self.text)} characters>"

    # -- at any time -----------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._response.result is not None

    @property
    def text(self) -> str:
        """The answer's content so far. Never blocks."""
        return self._response.text

    def cancel(self) -> None:
        """Ask for an early end, which comes as a result with finish_reason "cancelled". No effect after the end."""
        self._response.cancel()

    def close(self) -> None:
        """Cancel, and give up the place among the engine's outstanding requests without reading on."""
        self._response.cancel()
        self._response.consumer_done()

    def __del__(self) -> None:
        if hasattr(self, "_response") and os.getpid() == self._process:
            self.close()

    # -- the result ------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the final result; unread events stay readable.

        timeout: seconds, None for no limit; when they pass, the built-in TimeoutError is raised and nothing changes.
        Raises the request's typed error, with the committed output in its ``partial``, unless it ended by stop, length,
        tool_calls or cancellation.
        """
        self._check_process()
        if not self._response.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s")
        return self._outcome()

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._result_async().__await__()

    async def _result_async(self) -> GenerationResult:
        self._check_process()
        if not self.done:
            future, notify = _alarm()
            self._response.watch(notify)
            await self._wait(future)
        return self._outcome()

    def _outcome(self) -> GenerationResult:
        result = self._final()
        if result.error is not None:
            raise result.error
        return result

    def _final(self) -> GenerationResult:
        """The result of a request that has ended, whatever it is; it counts as received."""
        result = self._response.result
        assert result is not None
        self._response.consumer_done()
        return result

    # -- events ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> EventStream[Event]:
        return EventStream(self, _same)

    def __next__(self) -> Event:
        self._claim(None)
        return self._next()

    def __aiter__(self) -> EventStream[Event]:
        return EventStream(self, _same)

    async def __anext__(self) -> Event:
        self._claim(None)
        return await self._anext()

    def text_deltas(self, channel: Channel = "content") -> EventStream[str]:
        """Iterate (or async iterate) the pieces of text of one channel as they come.

        channel: "content" or "thinking". Ends after the last piece, or raises the request's typed error there;
        Cancelled for a request that was cancelled, because a text cut short looks like any other.
        """
        if channel not in ("content", "thinking"):
            raise InvalidRequest(f"expected 'content' or 'thinking', got {channel!r}", field="channel")

        def text(event: Event) -> str | None:
            if isinstance(event, GenerationResult):
                _raise_unfinished(event)
            return event.text if isinstance(event, Delta) and event.channel == channel and event.text else None

        return EventStream(self, text)

    def _claim(self, stream: EventStream[Any] | None) -> None:
        """Make ``stream`` the consumer. A former one counts as gone when it was dropped or is exhausted."""
        current = self._consumer() if self._consumer is not None else None
        if current is not None and not self._exhausted:
            raise InvalidRequest("another iterator is reading this handle", field="handle")
        self._consumer = weakref.ref(stream) if stream is not None else None

    def _next(self) -> Event:
        if self._exhausted:
            raise StopIteration
        self._check_process()
        event = self._response.take()
        assert event is not None
        self._exhausted = isinstance(event, GenerationResult)
        return event

    async def _anext(self) -> Event:
        if self._exhausted:
            raise StopAsyncIteration
        self._check_process()
        self._bind_task()
        response = self._response
        while (event := response.take(block=False)) is None:
            future, notify = _alarm()
            response.set_waiter(notify)
            if not response.ready():
                await self._wait(future)
            response.set_waiter(None)
        self._exhausted = isinstance(event, GenerationResult)
        return event

    # -- asyncio ---------------------------------------------------------------------------------------------------

    async def _wait(self, future: asyncio.Future[None]) -> None:
        try:
            await future
        except BaseException:  # this task was cancelled while it waited
            self.cancel()
            raise

    def _bind_task(self) -> None:
        """Cancel the request when the task that iterates is cancelled, wherever in the loop's body that happens."""
        import asyncio

        task = asyncio.current_task()
        if task is None or (self._task is not None and self._task() is task):
            return
        self._task = weakref.ref(task)
        handles = _iterated.get(task)
        if handles is None:  # one callback for a task, however many handles it reads in its life
            handles = _iterated[task] = weakref.WeakSet()
            task.add_done_callback(_cancel_iterated)
        handles.add(self)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosed("this handle belongs to the process that forked this one")

    # -- context managers ------------------------------------------------------------------------------------------

    def __enter__(self) -> GenerationHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> GenerationHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventStream(Generic[T]):
    """An iterator and async iterator over one handle: each event goes through ``pick``, which may drop it (None)."""

    def __init__(self, handle: GenerationHandle, pick: Callable[[Event], T | None]) -> None:
        handle._claim(self)
        self._handle = handle
        self._pick = pick

    def __iter__(self) -> EventStream[T]:
        return self

    def __next__(self) -> T:
        while True:
            value = self._pick(self._handle._next())
            if value is not None:
                return value

    def __aiter__(self) -> EventStream[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            value = self._pick(await self._handle._anext())
            if value is not None:
                return value


_iterated: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.WeakSet[GenerationHandle]] = weakref.WeakKeyDictionary()
"""The handles that each running task has iterated and that still exist."""


def _cancel_iterated(task: asyncio.Task[Any]) -> None:
    handles = _iterated.pop(task, None)
    if task.cancelled() and handles is not None:
        for handle in handles:
            handle.cancel()


def _raise_unfinished(result: GenerationResult) -> None:
    if result.error is not None:
        raise result.error
    if result.finish_reason == "cancelled":
        error = Cancelled("the request was cancelled")
        error.partial = result
        raise error


def _same(event: Event) -> Event:
    return event


def _alarm() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running loop, and what any thread may call, any number of times, to resolve it."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has nobody waiting
            loop.call_soon_threadsafe(resolve)

    return future, notify

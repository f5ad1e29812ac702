"""The path from the worker to one consumer, and the capacity a request occupies until both are done with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from ninfer.results import Delta, Event, GenerationResult


class Outstanding:
    """Slots of requests that are waiting, active or unread.

    A queue of tokens counts them: its operations are atomic and safe inside a finalizer, which a lock is not.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(limit):
            self._free.put(None)

    @property
    def in_use(self) -> int:
        """Slots taken now."""
        return self.limit - self._free.qsize()

    def acquire(self, seconds: float) -> bool:
        """Take a slot, within so many seconds; False when there is none."""
        try:
            self._free.get(seconds > 0, seconds)
        except queue.Empty:
            return False
        return True

    def release(self) -> None:
        """Give a slot back."""
        self._free.put(None)


class Response:
    """Events of one request. The worker publishes and completes; one consumer takes; any thread cancels.

    ``release`` runs once, when the worker has completed the response and the consumer is done with it. ``wake`` tells
    the worker to look at ``cancel_requested``. Both may run in a finalizer: they must not take a lock.
    """

    def __init__(self, release: Callable[[], None], wake: Callable[[], None]) -> None:
        self.cancel_requested = False
        self.result: GenerationResult | None = None
        self._consumer_done = False
        self._release = [release]
        self._wake = wake
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._finished = threading.Event()
        self._content: list[str] = []
        self._waiter: Callable[[], None] | None = None
        self._watchers: list[Callable[[], None]] = []

    # worker

    def publish(self, events: Sequence[Event]) -> None:
        """Make committed events visible, in order."""
        for event in events:
            if type(event) is Delta and event.channel == "content":
                self._content.append(event.text)
            self._events.put(event)
        waiter = self._waiter
        if waiter is not None:
            waiter()

    def complete(self, result: GenerationResult) -> None:
        """Publish the last event and give the capacity back if the consumer is already gone."""
        self.result = result
        self.publish((result,))
        self._finished.set()
        for watcher in tuple(self._watchers):
            watcher()
        self._settle()

    # consumer

    @property
    def text(self) -> str:
        """Content published so far."""
        return "".join(self._content)

    def take(self, block: bool = True) -> Event | None:
        """The next event; None when there is none yet and ``block`` is false. Not to be called after the last one."""
        try:
            event = self._events.get(block)
        except queue.Empty:
            return None
        if type(event) is GenerationResult:
            self.consumer_done()
        return event

    def ready(self) -> bool:
        """Whether an event can be taken now."""
        return not self._events.empty()

    def wait(self, timeout: float | None) -> bool:
        """Block until the result exists; False when ``timeout`` seconds pass first. Takes no event."""
        return self._finished.wait(timeout if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def set_waiter(self, waiter: Callable[[], None] | None) -> None:
        """Have ``waiter`` called after every publication. An event published just before may not be announced."""
        self._waiter = waiter

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have ``watcher`` called once the result exists; at once if it does. It may then be called twice."""
        self._watchers.append(watcher)
        if self.result is not None:
            watcher()

    def cancel(self) -> None:
        """Ask the worker to end the request. No effect once the result exists."""
        if self.result is None and not self.cancel_requested:
            self.cancel_requested = True
            self._wake()

    def consumer_done(self) -> None:
        """The consumer wants nothing more: it has seen the result, or lets go of the request."""
        self._consumer_done = True
        self._settle()

    def _settle(self) -> None:
        if self.result is not None and self._consumer_done:
            try:
                release = self._release.pop()  # atomic: of two threads arriving here, one gets it
            except IndexError:
                return
            release()

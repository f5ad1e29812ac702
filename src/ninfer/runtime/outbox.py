"""Publication: what a commit lets requests see, handed over at once or beside the next unit on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ninfer.results import Event, GenerationResult
from ninfer.runtime.response import Response


class Outbox:
    """Committed events on their way to their consumers, in the order of their commits.

    overlap: keep them until ``deliver``, which the worker calls when the next unit has been launched or there is none.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._kept: deque[Callable[[], None]] = deque()

    def publish(self, response: Response, events: Sequence[Event]) -> None:
        """Let a request see committed events."""
        self._hand(partial(response.publish, events))

    def complete(self, response: Response, events: Sequence[Event], result: GenerationResult) -> None:
        """Let a request see its last events and its result."""
        self._hand(partial(response.publish, events))
        self._hand(partial(response.complete, result))

    def deliver(self) -> None:
        """Hand over what is kept."""
        while self._kept:
            self._kept.popleft()()

    def _hand(self, work: Callable[[], None]) -> None:
        self._kept.append(work)
        if not self._overlap:
            self.deliver()

"""Publication: what a commit lets requests see, handed over at once or beside the next unit on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ninfer.results import Event, GenerationResult
from ninfer.runtime.response import Response


class Outbox:
    """Committed events on their way to their consumers, in the order of their commits.

    overlap: keep them until ``deliver``, which the worker calls when the next unit has been launched or there is none.
    ``tell`` makes the events, then.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._kept: deque[tuple[Response, Callable[[], Sequence[Event]], GenerationResult | None]] = deque()

    def publish(self, response: Response, tell: Callable[[], Sequence[Event]]) -> None:
        """Let a request see committed events."""
        self._kept.append((response, tell, None))
        if not self._overlap:
            self.deliver()

    def complete(self, response: Response, tell: Callable[[], Sequence[Event]], result: GenerationResult) -> None:
        """Let a request see its last events and its result."""
        self._kept.append((response, tell, result))
        if not self._overlap:
            self.deliver()

    def deliver(self) -> None:
        """Hand over what is kept."""
        while self._kept:
            response, tell, result = self._kept.popleft()
            response.publish(tell())
            if result is not None:
                response.complete(result)

"""Order and membership: who may try admission, which unit runs next. Sees ids, lanes and states, nothing physical."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ninfer.runtime.record import RequestState


@dataclass(frozen=True, slots=True)
class AdmissionEpoch:
    """Every fact that can change an admission's answer. A refused head tries again only when one of them moved."""

    queue: int
    lanes: int
    prefill: int
    transactions: int
    revision: int


class Row(Protocol):
    """An active request as the scheduler sees it."""

    state: RequestState
    lane: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What the next model unit is, and of which rows: one, except for a decode round."""

    kind: Literal["prefill", "control", "decode"]
    lanes: tuple[int, ...]


@dataclass(slots=True)
class Scheduler:
    """FIFO admission and the alternation of prefill and decode.

    concurrent_prefill: admit while another request prefills; every prefill unit is then an admission checkpoint.
    """

    concurrent_prefill: bool = False
    waiting: deque[int] = field(default_factory=deque)
    queue_version: int = 0
    prefill_version: int = 0
    _refused: tuple[int, AdmissionEpoch] | None = None
    _decoded_since_admission: bool = True
    _prefilled_since_decode: bool = False
    _last_prefill_lane: int = -1

    # waiting requests

    def enqueue(self, request: int) -> None:
        """Append a request to the queue."""
        self.waiting.append(request)
        self.queue_version += 1

    def withdraw(self, request: int) -> None:
        """Take a request out of the queue: it was admitted, cancelled or timed out."""
        self.waiting.remove(request)
        self.queue_version += 1

    # admission

    def next_attempt(self, epoch: AdmissionEpoch, rows: Iterable[Row]) -> int | None:
        """The request that may try admission at this boundary; None when there is none or the gate is shut.

        Requires that no resource transaction is open. The gate lets decode go on: after a success, a decode round
        must run before the next one while any row is decode-ready.
        """
        if not self.waiting:
            return None
        head = self.waiting[0]
        if self._refused == (head, epoch):
            return None
        for row in rows:
            if row.state is RequestState.PREFILL and not self.concurrent_prefill:
                return None
            if row.state is RequestState.DECODE_READY and not self._decoded_since_admission:
                return None
        return head

    def on_started(self, request: int) -> None:
        """The head's resource transaction has begun."""
        self.withdraw(request)
        self._refused = None
        self._decoded_since_admission = False

    def on_refused(self, request: int, epoch: AdmissionEpoch) -> None:
        """The head does not fit now."""
        self._refused = (request, epoch)

    # units

    def choose(self, rows: Iterable[Row]) -> Unit | None:
        """The next unit, or None when no row can run.

        Forced control goes first: it is short and happens once a request. Otherwise prefill and decode alternate
        while both have work; staged prefills take turns; a decode round has every decode-ready row and no other.
        """
        staged: list[int] = []
        ready: list[int] = []
        for row in rows:
            if row.state is RequestState.DECODE_READY:
                ready.append(row.lane)
            elif row.state is RequestState.PREFILL:
                staged.append(row.lane)
            elif row.state is RequestState.CONTROL_READY:
                return Unit("control", (row.lane,))
        if staged and not (ready and self._prefilled_since_decode):
            self._prefilled_since_decode = True
            self._last_prefill_lane = min(staged, key=lambda lane: (lane <= self._last_prefill_lane, lane))
            return Unit("prefill", (self._last_prefill_lane,))
        if ready:
            self._prefilled_since_decode = False
            self._decoded_since_admission = True
            return Unit("decode", tuple(ready))
        return None

    def on_prefill_unit(self, left_stage: bool) -> None:
        """A prefill unit ran; ``left_stage``: its row is staged no more."""
        if left_stage or self.concurrent_prefill:
            self.prefill_version += 1

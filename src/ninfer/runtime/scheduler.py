"""Order and membership: who may try admission, which unit runs next. Sees ids, lanes and states, nothing physical."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ninfer.runtime.record import RequestState

STAGED = (RequestState.PREFILL, RequestState.CAPTURE)
"""A row in one of these states has not finished its prompt."""


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


class Unit(NamedTuple):
    """What the next model unit is, and of which rows: one, except for a decode round."""

    kind: Literal["prefill", "control", "decode"]
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The one request that may try admission at a boundary. past: the protected head it would be admitted past."""

    request: int
    past: ProtectedHead | None = None


@dataclass(slots=True)
class ProtectedHead:
    """The first waiting request, blocked by active ones. Once the ``donors`` have ended it can start, whatever else was
    admitted meanwhile; the set only shrinks."""

    request: int
    donors: set[int]


@dataclass(slots=True)
class Scheduler:
    """FIFO admission and the alternation of prefill and decode.

    concurrent_prefill: admit while another request prefills; every prefill unit is then an admission checkpoint.
    protected: the blocked head. A later request may only be admitted past it if the head keeps its promise.
    """

    concurrent_prefill: bool = False
    waiting: deque[int] = field(default_factory=deque)
    queue_version: int = 0
    prefill_version: int = 0
    protected: ProtectedHead | None = None
    _epoch: AdmissionEpoch | None = None
    _refused: set[int] = field(default_factory=set)
    _decoded_since_admission: bool = True
    _prefilled_since_decode: bool = False
    _last_prefill_lane: int = -1

    # waiting requests

    def enqueue(self, request: int) -> None:
        """Append a request to the queue."""
        self.waiting.append(request)
        self.queue_version += 1

    def requeue(self, request: int) -> None:
        """Put a paused request back to where its number belongs."""
        place = next((i for i, other in enumerate(self.waiting) if other > request), len(self.waiting))
        self.waiting.insert(place, request)
        self.queue_version += 1
        if place == 0:
            self.protected = None

    def withdraw(self, request: int) -> None:
        """Take a request out of the queue: it was admitted, cancelled or timed out."""
        self.waiting.remove(request)
        self.queue_version += 1
        if self.protected is not None and self.protected.request == request:
            self.protected = None

    # admission

    def next_attempt(self, epoch: AdmissionEpoch, rows: Iterable[Row]) -> Attempt | None:
        """The request that may try admission at this boundary; None when there is none or the gate is shut.

        Requires that no resource transaction is open. The gate lets decode go on: after a success, a decode round must
        run before the next one while any row is decode-ready. Whenever a fact that matters has changed, the head tries
        first; while it is protected, the others follow in order, one a boundary.
        """
        if not self.waiting:
            return None
        for row in rows:
            if row.state in STAGED and not self.concurrent_prefill:
                return None
            if row.state is RequestState.DECODE_READY and not self._decoded_since_admission:
                return None
        if epoch != self._epoch:
            self._epoch = epoch
            self._refused.clear()
        if self.waiting[0] not in self._refused:
            return Attempt(self.waiting[0])
        if self.protected is None:
            return None
        return next((Attempt(r, self.protected) for r in self.waiting if r not in self._refused), None)

    def on_started(self, request: int) -> None:
        """The request's resource transaction has begun."""
        self.withdraw(request)
        self._decoded_since_admission = False

    def on_refused(self, request: int) -> None:
        """The request does not fit now, or not past the head. It tries again when a fact that matters has changed."""
        self._refused.add(request)

    def protect(self, request: int, donors: Iterable[int]) -> None:
        """The head waits for the end of these active requests."""
        self.protected = ProtectedHead(request, set(donors))

    def on_ended(self, request: int) -> None:
        """An active request has ended."""
        if self.protected is not None:
            self.protected.donors.discard(request)
            if not self.protected.donors:
                self.protected = None

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

"""Physical pages of one pool. A unit of capacity is leased, reserved or available, never two of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ninfer.errors import InvariantError
from ninfer.program.layout import PoolKind


@dataclass(frozen=True, slots=True)
class PageLease:
    """The right to one page id. ``generation`` tells it from earlier leases of the same page."""

    pool: PoolKind
    page: int
    generation: int


@dataclass(slots=True)
class PageReservation:
    """Capacity taken out of the pool that is not a page yet."""

    pool: PoolKind
    units: int
    live: bool = True


class DevicePagePool:
    """``allocated + reserved + available == capacity`` at all times. The lowest free page id is leased first."""

    def __init__(self, kind: PoolKind, capacity: int) -> None:
        self.kind = kind
        self.capacity = capacity
        self.allocated = 0
        self.reserved = 0
        self._free = list(range(capacity))  # a heap
        self._generation = [0] * capacity
        self._leased = [False] * capacity

    @property
    def available(self) -> int:
        return self.capacity - self.allocated - self.reserved

    def reserve(self, units: int) -> PageReservation | None:
        """``units`` pages of capacity, or None, and no change, when fewer are available."""
        if units > self.available:
            return None
        self.reserved += units
        return PageReservation(self.kind, units)

    def materialize(self, reservation: PageReservation) -> PageLease:
        """Turn one reserved unit into a page. ``available`` does not change."""
        if not reservation.live or reservation.units < 1:
            raise InvariantError(f"{self.kind.name}: a page was requested beyond its reservation")
        page = heapq.heappop(self._free)
        reservation.units -= 1
        self.reserved -= 1
        self.allocated += 1
        self._generation[page] += 1
        self._leased[page] = True
        return PageLease(self.kind, page, self._generation[page])

    def release(self, lease: PageLease) -> None:
        """Return a page to the pool."""
        page = lease.page
        if lease.pool is not self.kind or not self._leased[page] or self._generation[page] != lease.generation:
            raise InvariantError(f"{lease} is not a live lease of {self.kind.name}")
        self._leased[page] = False
        self.allocated -= 1
        heapq.heappush(self._free, page)

    def cancel(self, reservation: PageReservation) -> None:
        """Return the reservation's remaining units to the pool; the reservation is dead afterwards."""
        if not reservation.live:
            raise InvariantError(f"{self.kind.name}: a reservation was cancelled twice")
        self.reserved -= reservation.units
        reservation.units = 0
        reservation.live = False

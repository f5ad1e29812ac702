"""What a paged history consists of: pages, their replicas, and the spaces that order them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ninfer.contract import Handle
from ninfer.program.stores.host import HostSlot
from ninfer.program.stores.pages import PageLease, PageReservation


@dataclass(slots=True)
class HostReplica:
    """A copy of the first ``coverage`` columns of a page as they were at ``epoch``."""

    slot: HostSlot
    epoch: int
    coverage: int


@dataclass(slots=True)
class LogicalPage:
    """64 cache ordinals of a history and where they are stored.

    committed: 0..64 columns that may be read; a device replica has all of them. epoch: grows when committed columns
    are cut off, because others may be written in their place. members: spaces that contain it. writer: the active
    space that may write the columns after the committed ones. pins: copies under way.
    """

    device: PageLease | None
    writer: Handle | None = None
    committed: int = 0
    epoch: int = 1
    members: int = 1
    host: HostReplica | None = None
    pins: int = 0

    @property
    def hosted(self) -> bool:
        """Whether the host replica has every committed column."""
        return self.host is not None and self.host.epoch == self.epoch and self.host.coverage >= self.committed


@dataclass(frozen=True, slots=True)
class Demotion:
    """A page's copy to the host under way: what the copy will have when it is complete."""

    page: Handle
    slot: HostSlot
    epoch: int
    coverage: int


@dataclass(slots=True)
class KVAddressSpace:
    """``committed <= 64 * len(blocks)``; of an active space also ``len(blocks) <= entitlement``.

    An inactive one has no entitlement, reservation or row.
    """

    blocks: list[Handle] = field(default_factory=list)
    committed: int = 0
    entitlement: int = 0
    reservation: PageReservation | None = None
    row: int | None = None

    @property
    def active(self) -> bool:
        return self.row is not None


@dataclass(slots=True)
class Branch:
    """A space that is being made from the first ``frontier`` tokens of another, and what it has taken so far.

    kept: pages it will contain. restored: device pages for those of them that are in host memory only. tail: a
    partial page and the private device page that gets a copy of its leading columns.
    """

    source: Handle | None
    frontier: int
    entitlement: int
    consume: bool
    reservation: PageReservation
    row: int | None
    kept: list[Handle]
    restored: list[tuple[Handle, PageLease]]
    tail: tuple[Handle, PageLease] | None


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Occupancy of one pool in pages, recomputed from its spaces. reserved: of active spaces. host: host slots."""

    capacity: int
    allocated: int
    reserved: int
    spaces: int
    rows: int
    host: int

    @property
    def available(self) -> int:
        return self.capacity - self.allocated - self.reserved

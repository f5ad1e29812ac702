"""Paged histories. An address space is the ordered pages of one history in one pool; active ones hold a guarantee
(entitlement), the rest of it as a reservation, and a row of the block table that the device reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ninfer.contract import Handle, HandleTable
from ninfer.errors import InvariantError
from ninfer.program.layout import PAGE, PoolKind, pages
from ninfer.program.pages import DevicePagePool, PageLease, PageReservation


@dataclass(slots=True)
class LogicalPage:
    """64 cache ordinals of one history and the device page that stores them.

    committed: 0..64 columns that may be read. writer: the only space that may write the others.
    """

    pool: PoolKind
    lease: PageLease
    writer: Handle
    committed: int = 0


@dataclass(slots=True)
class KVAddressSpace:
    """Extents in tokens and pages: ``committed <= 64 * len(blocks)`` and ``len(blocks) <= entitlement``."""

    pool: PoolKind
    entitlement: int
    reservation: PageReservation
    row: int
    blocks: list[Handle] = field(default_factory=list)
    committed: int = 0


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Occupancy of one pool in pages, recomputed from its spaces."""

    capacity: int
    allocated: int
    reserved: int
    spaces: int
    rows: int

    @property
    def available(self) -> int:
        return self.capacity - self.allocated - self.reserved


class ExecutionRows:
    """Rows of the block tables, one int32 ``[rows, blocks]`` matrix per pool: the host master of what the device reads.

    ``version`` changes with every edit; whoever uploads a table compares it.
    """

    def __init__(self, pools: Sequence[PoolKind], rows: int, blocks: int) -> None:
        self.tables: Mapping[PoolKind, npt.NDArray[np.int32]] = {
            pool: np.zeros((rows, blocks), np.int32) for pool in pools
        }
        self._free = {pool: list(range(rows - 1, -1, -1)) for pool in pools}
        self.version = 0

    def lease(self, pool: PoolKind) -> int | None:
        free = self._free[pool]
        return free.pop() if free else None

    def publish(self, pool: PoolKind, row: int, first_block: int, page_ids: Sequence[int]) -> None:
        """Set the page ids of consecutive blocks of a row."""
        self.tables[pool][row, first_block : first_block + len(page_ids)] = page_ids
        self.version += 1

    def release(self, pool: PoolKind, row: int) -> None:
        if row in self._free[pool]:
            raise InvariantError(f"{pool.name}: execution row {row} was released twice")
        self._free[pool].append(row)

    def leased(self, pool: PoolKind) -> int:
        return len(self.tables[pool]) - len(self._free[pool])


class KVStore:
    """Pages and address spaces of one pool."""

    def __init__(self, pool: DevicePagePool, rows: ExecutionRows, logical_pages: int) -> None:
        self.kind = pool.kind
        self.pool = pool
        self.rows = rows
        self.logical_pages = logical_pages
        self.spaces: HandleTable[KVAddressSpace] = HandleTable("space")
        self.pages: HandleTable[LogicalPage] = HandleTable("page")

    def create_active(self, entitlement: int) -> Handle | None:
        """An empty active space with ``entitlement`` pages guaranteed, or None when pages or rows are lacking."""
        if not 1 <= entitlement <= self.logical_pages:
            raise InvariantError(f"{self.kind.name}: entitlement {entitlement} outside 1..{self.logical_pages}")
        reservation = self.pool.reserve(entitlement)
        if reservation is None:
            return None
        row = self.rows.lease(self.kind)
        if row is None:
            self.pool.cancel(reservation)
            return None
        return self.spaces.insert(KVAddressSpace(self.kind, entitlement, reservation, row))

    def ensure_mapped(self, space: Handle, tokens: int) -> int:
        """Map at least ``pages(tokens)`` pages and return how many were added. Never unmaps.

        Raises InvariantError beyond the entitlement: licences exclude it.
        """
        s = self.spaces.get(space)
        first, last = len(s.blocks), pages(tokens)
        if last <= first:
            return 0
        if last > s.entitlement:
            raise InvariantError(f"{self.kind.name}: {tokens} tokens exceed an entitlement of {s.entitlement} pages")
        leases = [self.pool.materialize(s.reservation) for _ in range(first, last)]
        s.blocks += [self.pages.insert(LogicalPage(self.kind, lease, space)) for lease in leases]
        self.rows.publish(self.kind, s.row, first, [lease.page for lease in leases])
        return last - first

    def commit_frontier(self, space: Handle, tokens: int) -> None:
        """Make the first ``tokens`` columns readable history."""
        s = self.spaces.get(space)
        if not s.committed <= tokens <= PAGE * len(s.blocks):
            raise InvariantError(f"{self.kind.name}: frontier {tokens} outside {s.committed}..{PAGE * len(s.blocks)}")
        for block in range(s.committed // PAGE, pages(tokens)):
            self.pages.get(s.blocks[block]).committed = min(PAGE, tokens - block * PAGE)
        s.committed = tokens

    def truncate_mapped(self, space: Handle, tokens: int) -> int:
        """Unmap pages beyond ``max(committed, tokens)`` back into the reservation; returns how many."""
        s = self.spaces.get(space)
        keep = pages(max(s.committed, tokens))
        dropped = s.blocks[keep:]
        del s.blocks[keep:]
        for page in reversed(dropped):
            self.pool.dematerialize(self.pages.remove(page).lease, s.reservation)
        return len(dropped)

    def deactivate(self, space: Handle) -> None:
        """Release an active space: its pages, its reservation and its row."""
        s = self.spaces.remove(space)
        for page in s.blocks:
            self.pool.release(self.pages.remove(page).lease)
        self.pool.cancel(s.reservation)
        self.rows.release(self.kind, s.row)

    def audit(self) -> PoolAudit:
        """Walk every space and page. Raises InvariantError where they disagree with each other or the counters."""
        seen: set[int] = set()
        rows: set[int] = set()
        reserved = 0
        for handle, s in self.spaces.live():
            reserved += s.reservation.units
            rows.add(s.row)
            _require(len(s.blocks) + s.reservation.units == s.entitlement, "mapped + reserved is the entitlement")
            for block, page_handle in enumerate(s.blocks):
                page = self.pages.get(page_handle)
                columns = min(max(s.committed - block * PAGE, 0), PAGE)
                _require(page.writer == handle and page.committed == columns, "pages agree with their space")
                _require(page.lease.page not in seen, "a page is leased once")
                _require(self.rows.tables[self.kind][s.row, block] == page.lease.page, "the table names the page")
                seen.add(page.lease.page)
        _require(len(self.pages) == len(seen), "every page belongs to a space")
        _require(len(rows) == len(self.spaces) == self.rows.leased(self.kind), "a row belongs to one space")
        _require((len(seen), reserved) == (self.pool.allocated, self.pool.reserved), "counters match the objects")
        return PoolAudit(self.pool.capacity, len(seen), reserved, len(self.spaces), len(rows))


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"KV store: broken rule: {rule}")

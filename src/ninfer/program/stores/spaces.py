"""Paged histories. An address space is the ordered pages of one history in one pool. Active ones hold a guarantee
(entitlement), the rest of it as a reservation, and a row of the block table that the device reads. Several spaces may
contain the same full page; a page that is not full belongs to one space."""

from __future__ import annotations

from ninfer.contract import Handle, HandleTable
from ninfer.errors import InvariantError
from ninfer.program.layout import PAGE, pages
from ninfer.program.stores.blocks import Branch, Demotion, HostReplica, KVAddressSpace, LogicalPage, PoolAudit
from ninfer.program.stores.host import HostArena
from ninfer.program.stores.pages import DevicePagePool, PageLease
from ninfer.program.stores.rows import ExecutionRows


class KVStore:
    """Pages and address spaces of one pool."""

    def __init__(self, pool: DevicePagePool, rows: ExecutionRows, logical_pages: int, arena: HostArena) -> None:
        self.kind = pool.kind
        self.pool = pool
        self.rows = rows
        self.arena = arena
        self.logical_pages = logical_pages
        self.spaces: HandleTable[KVAddressSpace] = HandleTable("space")
        self.pages: HandleTable[LogicalPage] = HandleTable("page")
        self._branch: Branch | None = None

    # -- making spaces -------------------------------------------------------------------------------------------

    def shared_tail(self, source: Handle, frontier: int) -> bool:
        """Whether the page that ``frontier`` cuts is contained in another space too."""
        block = self.spaces.get(source).blocks[frontier // PAGE] if frontier % PAGE else None
        return block is not None and self.pages.get(block).members > 1

    def branch_units(self, source: Handle | None, frontier: int, entitlement: int, in_place: bool) -> int:
        """Device pages that ``open_branch`` takes out of the pool."""
        if source is None:
            return entitlement
        blocks = self.spaces.get(source).blocks[: self._kept(frontier, in_place)]
        return entitlement - len(blocks) + sum(self.pages.get(block).device is None for block in blocks)

    def open_branch(
        self, source: Handle | None, frontier: int, entitlement: int, *, consume: bool, in_place: bool, active: bool
    ) -> Branch | None:
        """Take what a space of ``entitlement`` pages over ``source`` needs, or None, and no change.

        in_place: a partial last page is kept, not copied; only a consumed source's unshared page may be. One branch
        is open at a time. Its pages are pinned until ``close_branch`` or ``drop_branch``.
        """
        if not int(active) <= entitlement <= self.logical_pages or self._branch is not None:
            raise InvariantError(f"{self.kind.name}: no branch of {entitlement} pages, {self.logical_pages} at most")
        blocks: list[Handle] = []
        if source is not None:
            space = self.spaces.get(source)
            if (space.active and consume) or not 0 <= frontier <= space.committed or pages(frontier) > entitlement:
                raise InvariantError(f"{self.kind.name}: no branch at {frontier} of {space}")
            if in_place and not (consume and not self.shared_tail(source, frontier)):
                raise InvariantError(f"{self.kind.name}: the page at {frontier} cannot be taken over")
            blocks = space.blocks[: pages(frontier)]
        kept = blocks[: self._kept(frontier, in_place)]
        reservation = self.pool.reserve(self.branch_units(source, frontier, entitlement, in_place))
        if reservation is None:
            return None
        row = self.rows.lease(self.kind) if active else None
        if active and row is None:
            self.pool.cancel(reservation)
            return None
        for block in blocks:
            self.pages.get(block).pins += 1
        restored = [(b, self.pool.materialize(reservation)) for b in kept if self.pages.get(b).device is None]
        tail = (blocks[-1], self.pool.materialize(reservation)) if len(blocks) > len(kept) else None
        self._branch = Branch(source, frontier, entitlement, consume, reservation, row, kept, restored, tail)
        return self._branch

    def close_branch(self, branch: Branch) -> Handle:
        """Everything the branch needed has been copied: its space."""
        self._end_branch(branch)
        for block, lease in branch.restored:
            self.pages.get(block).device = lease
        if branch.consume and branch.source is not None:
            self._cut(self.spaces.remove(branch.source), branch.frontier)
        else:
            for block in branch.kept:
                self.pages.get(block).members += 1
        space = KVAddressSpace(list(branch.kept), branch.frontier, branch.entitlement, branch.reservation, branch.row)
        if branch.tail is not None:
            if branch.consume:  # the copy takes the place of the page it was made from
                self._leave(branch.tail[0])
            space.blocks.append(self.pages.insert(LogicalPage(branch.tail[1], committed=branch.frontier % PAGE)))
        handle = self.spaces.insert(space)
        if branch.row is None:
            self._deactivated(space)
            return handle
        if branch.frontier % PAGE:
            tail = self.pages.get(space.blocks[-1])
            tail.writer = handle
            self._drop_host(tail)  # what will be written next would make it incomplete
        leases = [self._lease(block).page for block in space.blocks]
        self.rows.publish(self.kind, branch.row, 0, leases)
        return handle

    def drop_branch(self, branch: Branch) -> None:
        """Give everything back; the source is as it was."""
        self._end_branch(branch)
        for _, lease in branch.restored:
            self.pool.release(lease)
        if branch.tail is not None:
            self.pool.release(branch.tail[1])
        self.pool.cancel(branch.reservation)
        if branch.row is not None:
            self.rows.release(self.kind, branch.row)

    # -- active spaces -------------------------------------------------------------------------------------------

    def ensure_mapped(self, space: Handle, tokens: int) -> int:
        """Map at least ``pages(tokens)`` pages and return how many were added. Never unmaps.

        Raises InvariantError beyond the entitlement: licences exclude it.
        """
        s = self.spaces.get(space)
        first, last = len(s.blocks), pages(tokens)
        if last <= first:
            return 0
        if s.reservation is None or s.row is None or last > s.entitlement:
            raise InvariantError(f"{self.kind.name}: {tokens} tokens exceed an entitlement of {s.entitlement} pages")
        leases = [self.pool.materialize(s.reservation) for _ in range(first, last)]
        s.blocks += [self.pages.insert(LogicalPage(lease, space)) for lease in leases]
        self.rows.publish(self.kind, s.row, first, [lease.page for lease in leases])
        return last - first

    def commit_frontier(self, space: Handle, tokens: int) -> None:
        """Make the first ``tokens`` columns readable history."""
        s = self.spaces.get(space)
        if s.row is None or not s.committed <= tokens <= PAGE * len(s.blocks):
            raise InvariantError(f"{self.kind.name}: frontier {tokens} outside {s.committed}..{PAGE * len(s.blocks)}")
        full, rest = divmod(tokens, PAGE)
        for whole in s.blocks[s.committed // PAGE : full]:
            page = self.pages.get(whole)
            page.committed, page.writer = PAGE, None
        if rest:
            self.pages.get(s.blocks[full]).committed = rest
        s.committed = tokens

    def deactivate(self, space: Handle, keep: int) -> None:
        """End an active space's guarantee and keep its first ``keep`` committed tokens."""
        s = self.spaces.get(space)
        if s.reservation is None or s.row is None:
            raise InvariantError(f"{self.kind.name}: {space} is not active")
        self.rows.release(self.kind, s.row)
        self._deactivated(s)
        self.truncate(space, keep)

    # -- inactive spaces -----------------------------------------------------------------------------------------

    def truncate(self, space: Handle, tokens: int) -> None:
        """Forget everything after the first ``tokens`` tokens of an inactive space."""
        s = self.spaces.get(space)
        if s.active or not 0 <= tokens <= s.committed:
            raise InvariantError(f"{self.kind.name}: {space} cannot be cut to {tokens} tokens")
        self._cut(s, tokens)

    def release(self, space: Handle) -> None:
        """Forget a space, and of its pages those that are in no other."""
        if self.spaces.get(space).active:
            self.deactivate(space, 0)
        else:
            self.truncate(space, 0)
        self.spaces.remove(space)

    # -- replicas of inactive pages ------------------------------------------------------------------------------

    def begin_demotion(self, page: Handle) -> Demotion | None:
        """A host slot for a copy of the page, which is pinned meanwhile; None when there is none."""
        p = self.pages.get(page)
        if p.writer is not None or p.device is None:
            raise InvariantError(f"{self.kind.name}: {page} is being written or not on the device")
        slot = self.arena.allocate(self.kind)
        if slot is None:
            return None
        p.pins += 1
        return Demotion(page, slot, p.epoch, p.committed)

    def end_demotion(self, demotion: Demotion, copied: bool) -> None:
        """The copy is complete: the page has a host replica. Not ``copied``: the slot goes back."""
        p = self.pages.get(demotion.page)
        p.pins -= 1
        if not copied:
            self.arena.free(demotion.slot)
            return
        if (p.epoch, p.committed) != (demotion.epoch, demotion.coverage):
            raise InvariantError(f"{self.kind.name}: {demotion.page} changed while it was copied")
        self._drop_host(p)
        p.host = HostReplica(demotion.slot, p.epoch, p.committed)

    def drop_device(self, page: Handle) -> None:
        """Keep the host replica alone."""
        p = self.pages.get(page)
        if p.device is None or p.pins or not p.hosted or p.writer is not None:
            raise InvariantError(f"{self.kind.name}: {page} would be lost or is in use")
        self.pool.release(p.device)
        p.device = None

    def drop_host(self, page: Handle) -> None:
        """Keep the device replica alone."""
        p = self.pages.get(page)
        if p.device is None or p.pins:
            raise InvariantError(f"{self.kind.name}: {page} would be lost or is in use")
        self._drop_host(p)

    # -- audit ---------------------------------------------------------------------------------------------------

    def audit(self) -> PoolAudit:
        """Walk every space and page. Raises InvariantError where they disagree with each other or the counters."""
        members: dict[Handle, int] = {}
        rows: set[int] = set()
        reserved = 0
        for handle, s in self.spaces.live():
            _require(len(s.blocks) * PAGE >= s.committed, "what is committed is mapped")
            if s.reservation is not None and s.row is not None:
                reserved += s.reservation.units
                rows.add(s.row)
                _require(len(s.blocks) + s.reservation.units == s.entitlement, "mapped + reserved is the entitlement")
            for block, page_handle in enumerate(s.blocks):
                page = self.pages.get(page_handle)
                members[page_handle] = members.get(page_handle, 0) + 1
                columns = min(max(s.committed - block * PAGE, 0), PAGE)
                _require(page.committed == columns or page.members > 1, "pages agree with their space")
                _require(page.writer == (handle if s.active and columns < PAGE else None), "one space writes a page")
                if s.row is not None:
                    table = self.rows.tables[self.kind]
                    _require(page.device is not None, "an active space's pages are on the device")
                    _require(table[s.row, block] == self._lease(page_handle).page, "the table names the page")
        open_branch = self._branch
        _require(len(rows) == sum(s.active for _, s in self.spaces.live()), "a row belongs to one space")
        if open_branch is not None and open_branch.row is not None:
            rows.add(open_branch.row)
        _require(len(rows) == self.rows.leased(self.kind), "a row belongs to a space or the open branch")
        leased, hosted = [], []
        for handle, page in self.pages.live():
            _require(members.get(handle) == page.members, "a page counts the spaces that contain it")
            _require(page.members == 1 or page.committed == PAGE, "a shared page is full")
            _require(page.device is not None or page.hosted, "a page is stored somewhere")
            leased += [page.device.page] if page.device else []
            hosted += [page.host.slot] if page.host else []
        _require(len(leased) == len(set(leased)) and len(hosted) == len(set(hosted)), "a place holds one page")
        taken = 0
        if open_branch is not None:
            taken = len(open_branch.restored) + (open_branch.tail is not None)
            reserved += open_branch.reservation.units
        _require((len(leased) + taken, reserved) == (self.pool.allocated, self.pool.reserved), "counters match")
        return PoolAudit(
            self.pool.capacity, len(leased) + taken, reserved, len(self.spaces), len(rows), self.arena.used(self.kind)
        )

    # -- own -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _kept(frontier: int, in_place: bool) -> int:
        return pages(frontier) if in_place else frontier // PAGE

    def _lease(self, page: Handle) -> PageLease:
        lease = self.pages.get(page).device
        if lease is None:
            raise InvariantError(f"{self.kind.name}: {page} is not on the device")
        return lease

    def _end_branch(self, branch: Branch) -> None:
        if branch is not self._branch:
            raise InvariantError(f"{self.kind.name}: a branch that is not open")
        self._branch = None
        for block in [*branch.kept, *([branch.tail[0]] if branch.tail else [])]:
            self.pages.get(block).pins -= 1

    def _deactivated(self, space: KVAddressSpace) -> None:
        if space.reservation is not None:
            self.pool.cancel(space.reservation)
        space.reservation, space.row, space.entitlement = None, None, 0
        for block in space.blocks:
            self.pages.get(block).writer = None

    def _cut(self, space: KVAddressSpace, tokens: int) -> None:
        """Leave the pages beyond ``tokens``. Columns that are cut off a page make its other copies older than it."""
        for block in space.blocks[pages(tokens) :]:
            self._leave(block)
        del space.blocks[pages(tokens) :]
        space.committed = min(space.committed, tokens)
        if tokens % PAGE:
            page = self.pages.get(space.blocks[-1])
            if page.members == 1 and page.committed > tokens % PAGE:
                page.committed = tokens % PAGE
                page.epoch += 1
                if page.host is not None:
                    page.host.epoch, page.host.coverage = page.epoch, min(page.host.coverage, page.committed)

    def _leave(self, block: Handle) -> None:
        page = self.pages.get(block)
        page.members -= 1
        if page.members:
            return
        if page.pins:
            raise InvariantError(f"{self.kind.name}: {block} was released while it is copied")
        self.pages.remove(block)
        if page.device is not None:
            self.pool.release(page.device)
        self._drop_host(page)

    def _drop_host(self, page: LogicalPage) -> None:
        if page.host is not None:
            self.arena.free(page.host.slot)
            page.host = None


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"KV store: broken rule: {rule}")

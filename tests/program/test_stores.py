"""The KV store and the state store alone, driven at random and compared with a naive model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from ninfer.program.kv import ExecutionRows, KVStore
from ninfer.program.pages import DevicePagePool
from ninfer.program.state import StateStore

from ninfer.contract import Handle
from ninfer.errors import InvariantError, StaleHandle
from ninfer.program.layout import PAGE, PoolKind, pages

MAIN = PoolKind.MAIN


def build(capacity: int, rows: int, logical: int) -> KVStore:
    return KVStore(DevicePagePool(MAIN, capacity), ExecutionRows([MAIN], rows, logical), logical)


class KVStoreMachine(RuleBasedStateMachine):
    """Content is simulated: ``memory[page][column]`` holds who wrote it. The store must never let a space lose a
    committed column, share a page, or break its guarantee."""

    spaces = Bundle("spaces")

    @initialize(capacity=st.integers(2, 12), rows=st.integers(1, 4), logical=st.integers(1, 6))
    def start(self, capacity: int, rows: int, logical: int) -> None:
        self.store = build(capacity, rows, logical)
        self.memory: dict[int, dict[int, tuple[Handle, int]]] = {}
        self.entitlement: dict[Handle, int] = {}
        self.committed: dict[Handle, int] = {}
        self.mapped: dict[Handle, int] = {}

    @rule(target=spaces, share=st.integers(1, 6))
    def create(self, share: int):
        share = min(share, self.store.logical_pages)
        free = self.store.pool.available
        space = self.store.create_active(share)
        fits = share <= free and len(self.entitlement) < len(self.store.rows.tables[MAIN])
        assert (space is not None) == fits
        if space is None:
            assert self.store.pool.available == free
            return Handle("space", 10**6, 1)
        assert self.store.pool.available == free - share
        self.entitlement[space], self.committed[space], self.mapped[space] = share, 0, 0
        return space

    def live(self, space: Handle) -> bool:
        return space in self.entitlement

    @rule(space=spaces, tokens=st.integers(0, 7 * PAGE))
    def ensure(self, space: Handle, tokens: int) -> None:
        if not self.live(space):
            with pytest.raises(StaleHandle):
                self.store.ensure_mapped(space, tokens)
            return
        free, before = self.store.pool.available, self.store.audit()
        if pages(tokens) > self.entitlement[space]:
            with pytest.raises(InvariantError):
                self.store.ensure_mapped(space, tokens)
            assert self.store.audit() == before
            return
        added = self.store.ensure_mapped(space, tokens)
        assert added == max(0, pages(tokens) - self.mapped[space])
        assert self.store.ensure_mapped(space, tokens) == 0
        self.mapped[space] += added
        assert self.store.pool.available == free

    @rule(space=spaces, more=st.integers(0, 2 * PAGE))
    def write_and_commit(self, space: Handle, more: int) -> None:
        if not self.live(space):
            return
        s = self.store.spaces.get(space)
        end = self.committed[space] + more
        if end > PAGE * self.mapped[space]:
            with pytest.raises(InvariantError):
                self.store.commit_frontier(space, end)
            return
        for position in range(self.committed[space], end):
            page = int(self.store.rows.tables[MAIN][s.row, position // PAGE])
            self.memory.setdefault(page, {})[position % PAGE] = (space, position)
        self.store.commit_frontier(space, end)
        self.committed[space] = end

    @rule(space=spaces, tokens=st.integers(0, 7 * PAGE))
    def truncate(self, space: Handle, tokens: int) -> None:
        if not self.live(space):
            return
        free = self.store.pool.available
        keep = min(self.mapped[space], pages(max(tokens, self.committed[space])))
        assert self.store.truncate_mapped(space, tokens) == self.mapped[space] - keep
        self.mapped[space] = keep
        assert self.store.pool.available == free

    @rule(space=consumes(spaces))
    def deactivate(self, space: Handle) -> None:
        if not self.live(space):
            return
        free = self.store.pool.available
        self.store.deactivate(space)
        assert self.store.pool.available == free + self.entitlement.pop(space)
        del self.committed[space], self.mapped[space]
        with pytest.raises(StaleHandle):
            self.store.deactivate(space)

    @invariant()
    def every_committed_column_is_still_there(self) -> None:
        for space, committed in self.committed.items():
            s = self.store.spaces.get(space)
            for position in range(committed):
                page = int(self.store.rows.tables[MAIN][s.row, position // PAGE])
                assert self.memory[page][position % PAGE] == (space, position)

    @invariant()
    def the_books_balance(self) -> None:
        audit = self.store.audit()
        assert audit.allocated == sum(self.mapped.values())
        assert audit.reserved == sum(self.entitlement.values()) - audit.allocated >= 0
        assert audit.allocated + audit.reserved + audit.available == audit.capacity
        assert audit.available == self.store.pool.available
        assert audit.spaces == audit.rows == len(self.entitlement)


class StateStoreMachine(RuleBasedStateMachine):
    images = Bundle("images")

    @initialize(slots=st.integers(1, 4))
    def start(self, slots: int) -> None:
        self.store = StateStore(slots)
        self.frontier: dict[Handle, int] = {}
        self.seen: set[Handle] = set()

    @rule(target=images)
    def new(self):
        room = self.store.available
        image = self.store.new_active()
        assert (image is not None) == (room > 0)
        if image is None:
            return Handle("image", 10**6, 1)
        assert image not in self.seen
        assert self.store.images.get(image).frontier == 0
        self.seen.add(image)
        self.frontier[image] = 0
        return image

    @precondition(lambda self: self.frontier)
    @rule(image=images, tokens=st.integers(0, 100))
    def advance(self, image: Handle, tokens: int) -> None:
        if image not in self.frontier or tokens < self.frontier[image]:
            with pytest.raises(InvariantError):
                self.store.advance(image, tokens)
            return
        self.store.advance(image, tokens)
        self.frontier[image] = tokens

    @rule(image=consumes(images))
    def release(self, image: Handle) -> None:
        if self.frontier.pop(image, None) is None:
            with pytest.raises(StaleHandle):
                self.store.release(image)
            return
        self.store.release(image)

    @invariant()
    def slots_are_held_once(self) -> None:
        audit = self.store.audit()
        assert audit.used == len(self.frontier) == audit.capacity - self.store.available
        assert len({self.store.images.get(image).slot for image in self.frontier}) == audit.used
        assert all(self.store.images.get(image).frontier == f for image, f in self.frontier.items())


TestKVStore = KVStoreMachine.TestCase
TestStateStore = StateStoreMachine.TestCase


def test_pages_are_leased_lowest_first_and_leases_go_stale() -> None:
    pool = DevicePagePool(MAIN, 3)
    reservation = pool.reserve(3)
    assert reservation is not None
    leases = [pool.materialize(reservation) for _ in range(3)]
    assert [lease.page for lease in leases] == [0, 1, 2]
    with pytest.raises(InvariantError):
        pool.materialize(reservation)
    pool.dematerialize(leases[2], reservation)
    pool.dematerialize(leases[0], reservation)
    again = pool.materialize(reservation)
    assert again.page == 0
    assert again.generation > leases[0].generation
    for stale in (leases[0], leases[2]):
        with pytest.raises(InvariantError):
            pool.release(stale)
    pool.cancel(reservation)
    with pytest.raises(InvariantError):
        pool.cancel(reservation)
    assert (pool.allocated, pool.reserved, pool.available) == (2, 0, 1)


def test_truncation_golden_case() -> None:
    store = build(20, 1, 20)
    space = store.create_active(20)
    assert space is not None
    store.ensure_mapped(space, 1100)
    store.commit_frontier(space, 1000)
    available = store.pool.available
    assert store.truncate_mapped(space, 1000) == 2
    assert len(store.spaces.get(space).blocks) == 16
    assert store.spaces.get(space).reservation.units == 4
    assert store.pool.available == available


def test_the_audit_sees_a_page_leased_twice_and_a_wrong_counter() -> None:
    store = build(4, 2, 4)
    space = store.create_active(2)
    assert space is not None
    store.ensure_mapped(space, 65)
    s = store.spaces.get(space)
    first, second = (store.pages.get(page) for page in s.blocks)
    keep, second.lease = second.lease, first.lease
    with pytest.raises(InvariantError):
        store.audit()
    second.lease = keep
    store.pool.reserved += 1
    with pytest.raises(InvariantError):
        store.audit()

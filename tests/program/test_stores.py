"""The stores alone, driven at random and compared with naive models that remember what was written where."""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer.contract import Handle
from ninfer.errors import InvariantError, StaleHandle
from ninfer.program.layout import PAGE, KVCodec, KVGeometry, PoolKind, PoolLayout, build_pool_layouts, pages
from ninfer.program.stores.host import HostArena, HostSlot
from ninfer.program.stores.images import ActiveStateBinding, StateStore
from ninfer.program.stores.pages import DevicePagePool
from ninfer.program.stores.rows import ExecutionRows
from ninfer.program.stores.spaces import KVStore

MAIN = PoolKind.MAIN
LAYOUT = build_pool_layouts({PoolKind.MAIN: KVGeometry(1, 1, 1)}, KVCodec.FP32)
EXAMPLES = 2000 if os.environ.get("NINFER_HYPOTHESIS_PROFILE") == "full" else 40


def build(capacity: int, rows: int, logical: int, host: int = 0) -> KVStore:
    arena = HostArena(LAYOUT, host * LAYOUT[0].host_stride, superblock=2 * LAYOUT[0].host_stride)
    return KVStore(DevicePagePool(MAIN, capacity), ExecutionRows([MAIN], rows, logical), logical, arena)


def active(store: KVStore, entitlement: int) -> Handle | None:
    branch = store.open_branch(None, 0, entitlement, consume=False, in_place=False, active=True)
    return None if branch is None else store.close_branch(branch)


class KVStoreMachine(RuleBasedStateMachine):
    """``device`` and ``host`` hold what was written last to each place; ``content`` what a space must read."""

    @initialize(capacity=st.integers(2, 10), rows=st.integers(1, 3), logical=st.integers(1, 5), host=st.integers(0, 6))
    def start(self, capacity: int, rows: int, logical: int, host: int) -> None:
        self.store = build(capacity, rows, logical, host)
        self.rows = rows
        self.device: dict[int, list[int]] = {}
        self.host: dict[HostSlot, list[int]] = {}
        self.content: dict[Handle, list[int]] = {}
        self.written = itertools.count()

    def choose(self, data: st.DataObject, active: bool | None = None) -> Handle | None:
        fit = [h for h in self.content if active is None or self.store.spaces.get(h).active == active]
        return data.draw(st.sampled_from(fit)) if fit else None

    def columns(self, page_id: int) -> list[int]:
        return self.device.setdefault(page_id, [-1] * PAGE)

    # -- making and ending spaces

    @rule(data=st.data(), more=st.integers(0, 5), consume=st.booleans(), active=st.booleans(), drop=st.booleans())
    def branch(self, data: st.DataObject, more: int, consume: bool, active: bool, drop: bool) -> None:
        store = self.store
        source = self.choose(data) if data.draw(st.booleans()) else None
        old = store.spaces.get(source) if source is not None else None
        if old is None or not old.committed:
            source, frontier = None, 0
        else:
            frontier = data.draw(st.integers(1, old.committed))
            consume = consume and not old.active
        consume = consume and source is not None
        in_place = consume and frontier % PAGE != 0 and not store.shared_tail(source, frontier)
        entitlement = min(store.logical_pages, max(1, pages(frontier)) + more)
        units, before, free = (
            store.branch_units(source, frontier, entitlement, in_place), store.audit(), store.pool.available,
        )  # fmt: skip
        branch = store.open_branch(source, frontier, entitlement, consume=consume, in_place=in_place, active=active)
        assert (branch is not None) == (units <= free and (not active or before.rows < self.rows))
        if branch is None:
            assert store.audit() == before
            return
        assert store.pool.available == free - units
        if drop:
            store.drop_branch(branch)
            assert store.audit() == before
            return
        assert len(branch.kept) == (pages(frontier) if in_place else frontier // PAGE)
        assert (branch.tail is not None) == (frontier % PAGE != 0 and not in_place)
        for page, lease in branch.restored:
            self.device[lease.page] = list(self.host[store.pages.get(page).host.slot])
        if branch.tail is not None:
            page = store.pages.get(branch.tail[0])
            origin = self.device[page.device.page] if page.device else self.host[page.host.slot]
            self.device[branch.tail[1].page] = list(origin)
        content = self.content[source][:frontier] if source is not None else []
        space = store.close_branch(branch)
        if consume:
            del self.content[source]
            with pytest.raises(StaleHandle):
                store.spaces.get(source)
        self.content[space] = content

    @rule(data=st.data(), release=st.booleans())
    def end(self, data: st.DataObject, release: bool) -> None:
        space = self.choose(data)
        if space is None:
            return
        s = self.store.spaces.get(space)
        if release:
            self.store.release(space)
            del self.content[space]
            return
        keep = data.draw(st.integers(0, s.committed))
        (self.store.deactivate if s.active else self.store.truncate)(space, keep)
        self.content[space] = self.content[space][:keep]

    # -- active spaces

    @rule(data=st.data(), tokens=st.integers(0, 6 * PAGE))
    def ensure(self, data: st.DataObject, tokens: int) -> None:
        space = self.choose(data, active=True)
        if space is None:
            return
        s, free = self.store.spaces.get(space), self.store.pool.available
        mapped = len(s.blocks)
        if pages(tokens) > max(s.entitlement, mapped):
            with pytest.raises(InvariantError):
                self.store.ensure_mapped(space, tokens)
        else:
            assert self.store.ensure_mapped(space, tokens) == max(0, pages(tokens) - mapped)
            assert self.store.ensure_mapped(space, tokens) == 0
        assert self.store.pool.available == free

    @rule(data=st.data(), more=st.integers(0, 2 * PAGE))
    def write_and_commit(self, data: st.DataObject, more: int) -> None:
        space = self.choose(data, active=True)
        if space is None:
            return
        s = self.store.spaces.get(space)
        end = s.committed + more
        if end > PAGE * len(s.blocks):
            with pytest.raises(InvariantError):
                self.store.commit_frontier(space, end)
            return
        for position in range(s.committed, end):
            assert self.store.pages.get(s.blocks[position // PAGE]).writer == space
            word = next(self.written)
            self.columns(int(self.store.rows.tables[MAIN][s.row, position // PAGE]))[position % PAGE] = word
            self.content[space].append(word)
        self.store.commit_frontier(space, end)

    # -- replicas

    @rule(data=st.data(), copied=st.booleans(), drop=st.booleans())
    def demote(self, data: st.DataObject, copied: bool, drop: bool) -> None:
        table = self.store.pages
        fit = [h for h, p in table.live() if p.device and p.writer is None and p.host is None]
        if not fit:
            return
        page = data.draw(st.sampled_from(fit))
        demotion = self.store.begin_demotion(page)
        if demotion is None:
            return
        if copied:
            self.host[demotion.slot] = list(self.columns(table.get(page).device.page))
        self.store.end_demotion(demotion, copied)
        readers = [s for _, s in self.store.spaces.live() if page in s.blocks]
        if copied and drop and not any(s.active for s in readers):
            self.store.drop_device(page)
            with pytest.raises(InvariantError):
                self.store.drop_host(page)

    @rule(data=st.data())
    def drop_duplicate(self, data: st.DataObject) -> None:
        fit = [h for h, p in self.store.pages.live() if p.device and p.host]
        if fit:
            self.store.drop_host(data.draw(st.sampled_from(fit)))

    # -- what always holds

    @invariant()
    def every_committed_column_is_still_there(self) -> None:
        for space, content in self.content.items():
            s = self.store.spaces.get(space)
            assert s.committed == len(content)
            for block in range(pages(len(content))):
                page = self.store.pages.get(s.blocks[block])
                part = content[block * PAGE : (block + 1) * PAGE]
                if page.device is not None:
                    assert self.device[page.device.page][: len(part)] == part
                if page.hosted:
                    assert self.host[page.host.slot][: len(part)] == part

    @invariant()
    def the_books_balance(self) -> None:
        audit = self.store.audit()
        assert audit.available == self.store.pool.available >= 0
        assert audit.spaces == len(self.content)

    def teardown(self) -> None:
        for space in list(getattr(self, "content", ())):
            self.store.release(space)
            audit = self.store.audit()
        if hasattr(self, "store"):
            audit = self.store.audit()
            assert (audit.allocated, audit.reserved, audit.host, audit.rows, len(self.store.pages)) == (0,) * 5


class StateStoreMachine(RuleBasedStateMachine):
    """``bindings``: of active rows. ``frozen``: references that checkpoints hold, by image."""

    @initialize(slots=st.integers(1, 5), host=st.integers(0, 3))
    def start(self, slots: int, host: int) -> None:
        self.store = StateStore(slots, host)
        self.bindings: list[ActiveStateBinding] = []
        self.frozen: list[Handle] = []

    @rule()
    def new(self) -> None:
        room = self.store.available
        image = self.store.new_active()
        assert (image is not None) == (room > 0)
        if image is not None:
            self.bindings.append(ActiveStateBinding(image, image))

    @precondition(lambda self: self.frozen)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        image = data.draw(st.sampled_from(self.frozen))
        if self.store.images.get(image).device is None:
            with pytest.raises(InvariantError):
                self.store.fork(image)
            return
        binding = self.store.fork(image)
        if binding is not None:
            assert binding.forked
            self.bindings.append(binding)
            with pytest.raises(InvariantError):
                self.store.thaw(image)

    @precondition(lambda self: self.bindings)
    @rule(data=st.data(), more=st.integers(0, 9), how=st.sampled_from(["advance", "freeze", "end"]))
    def use(self, data: st.DataObject, more: int, how: str) -> None:
        binding = data.draw(st.sampled_from(self.bindings))
        self.bindings.remove(binding)
        if how == "end":
            if binding.forked:
                self.store.abandon(binding)
            else:
                self.store.release(binding.write)
        elif how == "freeze" and not binding.forked:
            self.store.freeze(binding.write)
            with pytest.raises(InvariantError):
                self.store.advance(binding.write, 100)
            self.frozen.append(binding.write)
        else:
            frontier = self.store.images.get(binding.write).frontier
            self.store.advance(binding.write, frontier + more)
            self.bindings.append(self.store.settle(binding) if binding.forked else binding)

    @precondition(lambda self: self.frozen)
    @rule(data=st.data(), how=st.sampled_from(["retain", "release", "thaw", "down", "drop host", "drop device", "up"]))
    def keep(self, data: st.DataObject, how: str) -> None:
        image = data.draw(st.sampled_from(self.frozen))
        state = self.store.images.get(image)
        if how == "retain":
            self.store.retain(image)
            self.frozen.append(image)
        elif how == "release":
            self.frozen.remove(image)
            self.store.release(image)
        elif how == "thaw" and state.refs == 1 and not state.pins and state.device is not None:
            self.store.thaw(image)
            self.frozen.remove(image)
            self.bindings.append(ActiveStateBinding(image, image))
        elif how == "down" and state.host is None:
            slot = self.store.take_host()
            if slot is not None:
                self.store.publish_host(image, slot)
        elif how == "up" and state.device is None:
            slot = self.store.take_device()
            if slot is not None:
                self.store.publish_device(image, slot)
        elif how == "drop host" and state.device is not None:
            self.store.drop_host(image)
        elif how == "drop device":
            if state.host is None or state.pins:
                with pytest.raises(InvariantError):
                    self.store.drop_device(image)
            else:
                self.store.drop_device(image)

    @invariant()
    def every_image_is_held_as_often_as_it_counts(self) -> None:
        self.store.audit()
        for handle, image in self.store.images.live():
            reads = sum(b.forked and b.read == handle for b in self.bindings)
            writes = sum(b.write == handle for b in self.bindings)
            assert image.refs == reads + writes + self.frozen.count(handle)
            assert image.pins == reads
            assert writes <= 1
            assert image.mutable == (writes == 1)

    def teardown(self) -> None:
        for binding in getattr(self, "bindings", ()):
            (self.store.abandon(binding) if binding.forked else self.store.release(binding.write))
        for image in getattr(self, "frozen", ()):
            self.store.release(image)
        if hasattr(self, "store"):
            assert (self.store.available, self.store.host_available) == (self.store.capacity, self.store.host_capacity)


TestKVStore = KVStoreMachine.TestCase
TestKVStore.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
TestStateStore = StateStoreMachine.TestCase
TestStateStore.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)

POOLS = (PoolLayout(MAIN, LAYOUT[0].planes), PoolLayout(PoolKind.MTP, LAYOUT[0].planes * 3))


@given(st.integers(0, 12), st.integers(0, 2**32))
def test_host_memory_fits_exactly_what_it_says_it_fits(blocks: int, seed: int) -> None:
    dice = random.Random(seed)
    arena = HostArena(POOLS, blocks * 4608, superblock=4608)  # 9 pages of the one pool, 3 of the other
    held: list[HostSlot] = []
    for _ in range(30):
        dice.shuffle(held)
        released = held[: dice.randrange(len(held) + 1)]
        wanted = {pool: dice.randrange(12) for pool in arena.slots}
        superblocks = {
            pool: np.array([s.superblock for s in released if s.pool is pool], np.int64) for pool in arena.slots
        }
        lacking = arena.lacking(superblocks, wanted)
        for slot in released:
            arena.free(slot)
            held.remove(slot)
        missing = 0
        for pool, n in wanted.items():
            for _ in range(n):
                slot = arena.allocate(pool)
                missing += slot is None
                held += [slot] if slot is not None else []
        assert missing == lacking
        assert len(set(held)) == len(held) == sum(arena.used(pool) for pool in arena.slots)
        assert arena.used_bytes() <= blocks * 4608
    for slot in held:
        arena.free(slot)
    assert arena.used_bytes() == 0


@pytest.mark.parametrize(("page", "slots"), [(4_194_304, 4), (2_162_688, 7), (262_144, 64)])
def test_slots_of_a_superblock(page: int, slots: int) -> None:
    class Layout:
        kind, host_stride = MAIN, page

    arena = HostArena((Layout,), 64 << 20, 16 << 20)
    assert arena.slots[MAIN] == slots
    taken = [arena.allocate(MAIN) for _ in range(slots + 1)]
    assert [(s.superblock, s.slot) for s in taken[-2:]] == [(0, slots - 1), (1, 0)]
    arena.free(taken[0])
    with pytest.raises(InvariantError):
        arena.free(taken[0])
    assert arena.allocate(MAIN) == taken[0]


def test_pages_are_leased_lowest_first_and_leases_go_stale() -> None:
    pool = DevicePagePool(MAIN, 3)
    reservation = pool.reserve(3)
    assert reservation is not None
    leases = [pool.materialize(reservation) for _ in range(3)]
    assert [lease.page for lease in leases] == [0, 1, 2]
    with pytest.raises(InvariantError):
        pool.materialize(reservation)
    pool.release(leases[2])
    pool.release(leases[0])
    following = pool.reserve(2)
    assert following is not None
    again = pool.materialize(following)
    assert again.page == 0
    assert again.generation > leases[0].generation
    for stale in (leases[0], leases[2]):
        with pytest.raises(InvariantError):
            pool.release(stale)
    assert (pool.allocated, pool.reserved, pool.available) == (2, 1, 0)
    pool.cancel(following)
    with pytest.raises(InvariantError):
        pool.cancel(following)
    assert (pool.allocated, pool.reserved, pool.available) == (2, 0, 1)


def test_truncation_golden_case() -> None:
    store = build(20, 1, 20)
    space = active(store, 20)
    assert space is not None
    store.ensure_mapped(space, 1100)
    store.commit_frontier(space, 1000)
    assert (store.audit().allocated, store.audit().reserved) == (18, 2)
    store.deactivate(space, 1000)
    assert len(store.spaces.get(space).blocks) == 16
    assert (store.audit().allocated, store.audit().reserved) == (16, 0)


@pytest.mark.parametrize(("consume", "kept", "copies", "reserved"), [(False, 15, 1, 4), (True, 16, 0, 4)])
def test_fork_and_move_golden_cases(consume: bool, kept: int, copies: int, reserved: int) -> None:
    store = build(64, 2, 32)
    space = active(store, 16)
    assert space is not None
    store.ensure_mapped(space, 1000)
    store.commit_frontier(space, 1000)
    store.deactivate(space, 1000)
    branch = store.open_branch(space, 1000, 20, consume=consume, in_place=consume, active=True)
    assert branch is not None
    assert (len(branch.kept), int(branch.tail is not None)) == (kept, copies)
    copy = store.spaces.get(store.close_branch(branch))
    assert (len(copy.blocks), copy.reservation.units) == (16, reserved)
    assert store.audit().allocated == 16 + copies


def test_the_audit_sees_a_page_leased_twice_and_a_wrong_counter() -> None:
    store = build(4, 2, 4)
    space = active(store, 2)
    assert space is not None
    store.ensure_mapped(space, 65)
    s = store.spaces.get(space)
    first, second = (store.pages.get(page) for page in s.blocks)
    keep, second.device = second.device, first.device
    with pytest.raises(InvariantError):
        store.audit()
    second.device = keep
    store.pool.reserved += 1
    with pytest.raises(InvariantError):
        store.audit()

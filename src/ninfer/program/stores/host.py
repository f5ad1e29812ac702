"""Host memory for pages. Equal superblocks, each free or bound to one pool and cut into slots of that pool's page
size. Which slot comes next depends on nothing but what is in use, so whether a set of pages fits can be computed
exactly, without looking at free bytes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ninfer.errors import InvariantError
from ninfer.program.layout import PoolKind, PoolLayout

SUPERBLOCK = 32 << 20
"""Bytes of one superblock, unless a page is larger."""


@dataclass(frozen=True, slots=True)
class HostSlot:
    """One page's place: a slot of a superblock."""

    pool: PoolKind
    superblock: int
    slot: int


class HostArena:
    """capacity: bytes of all pools together; what does not make a whole superblock is not used.

    slots: per pool, how many pages a superblock holds.
    """

    def __init__(self, layouts: tuple[PoolLayout, ...], capacity: int, superblock: int = SUPERBLOCK) -> None:
        largest = max(layout.host_stride for layout in layouts)
        self.superblock = max(largest, min(superblock, capacity))
        self.slots: Mapping[PoolKind, int] = {layout.kind: self.superblock // layout.host_stride for layout in layouts}
        count = capacity // self.superblock
        self.bound: list[PoolKind | None] = [None] * count
        self._bindings = [0] * count  # how often a superblock was bound: older entries of the heaps below are void
        self._live: list[set[int]] = [set() for _ in range(count)]
        self._empty = list(range(count))  # a heap
        self._free: dict[PoolKind, list[tuple[int, int, int]]] = {kind: [] for kind in self.slots}  # heaps

    def allocate(self, pool: PoolKind) -> HostSlot | None:
        """The lowest free slot of the pool's superblocks, else the first of the lowest free superblock, else None."""
        free = self._free[pool]
        while free and self._bindings[free[0][0]] != free[0][2]:
            heapq.heappop(free)
        if not free:
            if not self._empty:
                return None
            index = heapq.heappop(self._empty)
            self.bound[index] = pool
            self._bindings[index] += 1
            free.extend((index, slot, self._bindings[index]) for slot in range(self.slots[pool]))
        index, slot, _ = heapq.heappop(free)
        self._live[index].add(slot)
        return HostSlot(pool, index, slot)

    def free(self, slot: HostSlot) -> None:
        """Return a slot; a superblock without one in use belongs to nobody again."""
        index, live = slot.superblock, self._live[slot.superblock]
        if self.bound[index] is not slot.pool or slot.slot not in live:
            raise InvariantError(f"{slot} is not in use")
        live.remove(slot.slot)
        if live:
            heapq.heappush(self._free[slot.pool], (index, slot.slot, self._bindings[index]))
        else:
            self.bound[index] = None
            self._bindings[index] += 1
            heapq.heappush(self._empty, index)

    def used(self, pool: PoolKind) -> int:
        """Slots that hold pages of a pool."""
        return sum(len(live) for bound, live in zip(self.bound, self._live) if bound is pool)

    def used_bytes(self) -> int:
        """Bytes of superblocks that hold anything."""
        return self.superblock * sum(bound is not None for bound in self.bound)

    def lacking(self, released: Mapping[PoolKind, npt.NDArray[np.int64]], wanted: Mapping[PoolKind, int]) -> int:
        """Pages that would find no place if ``released`` slots (their superblocks' indices) were freed and then
        ``wanted`` pages allocated, pool by pool in the order of ``wanted``. 0: all of them fit."""
        left = [len(live) for live in self._live]
        for superblocks in released.values():
            for index, n in enumerate(np.bincount(superblocks, minlength=len(left)).tolist()):
                left[index] -= n
        empty = sum(n == 0 for n in left)
        lacking = 0
        for pool, n in wanted.items():
            slots = self.slots[pool]
            n -= sum(slots - used for used, bound in zip(left, self.bound) if bound is pool and used)
            blocks = min(empty, -(-max(n, 0) // slots))
            empty -= blocks
            lacking += max(0, n - blocks * slots)
        return lacking

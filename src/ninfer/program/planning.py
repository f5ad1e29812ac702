"""One planning session: what each target would do to every replica, whether it fits at its fullest stage, and the plan
that carries it out. Nothing here changes anything.

Stages of a transition, in order: host replicas go; device replicas go; copies to the host; the device replicas these
replace go; the incoming row or checkpoint takes what it needs; copies from the host; copies on the device. Nothing is
taken on the device before the fifth, so the device is fullest from there on and the host after the third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from ninfer.context import Assessment, CheckpointRef, OwnerLevel, ResourcePlan, Shortage, Target, TransactionKind
from ninfer.contract import Handle
from ninfer.errors import InvariantError
from ninfer.program.incoming import NOTHING, Incoming
from ninfer.program.ladders import ladder
from ninfer.program.layout import PoolKind, pages
from ninfer.program.licensing import checkpoint_tokens
from ninfer.program.projection import Axis, Index, Moves, Stance
from ninfer.program.store import Store
from ninfer.work import MachineWork, RecoveryRecipe

Flags = npt.NDArray[np.bool_]
"""One flag for each object of an axis."""

_ids = count(1)


@dataclass(frozen=True, slots=True, eq=False)
class SealedPlan:
    """A plan and what only Program needs of it. pages, images: replicas that go or are copied to the host.
    snapshot: a capture copies its state to the host, because no device slot can be had."""

    plan: ResourcePlan
    incoming: Incoming
    levels: Mapping[Handle, OwnerLevel]
    pages: Mapping[PoolKind, Moves]
    images: Moves
    snapshot: bool


class Session:
    """Implements :class:`ninfer.context.PlanningSession`. ``sealed`` gets what ``seal`` makes."""

    def __init__(
        self,
        store: Store,
        kind: TransactionKind,
        incoming: Sequence[Incoming],
        victims: Sequence[Handle],
        sealed: Callable[[SealedPlan], None],
    ) -> None:
        self.revision = store.revision
        self._store = store
        self._kind = kind
        self._incoming = incoming
        self._sealed = sealed
        self._victims = [
            tuple(v for v in victims if v != i.owner and store.histories.try_get(v) is not None) for i in incoming
        ]
        self._ladders: dict[Handle, tuple[OwnerLevel, ...]] = {}
        self._stances: dict[tuple[Handle, int], tuple[Mapping[PoolKind, Stance], Stance]] = {}
        self._axes: tuple[Mapping[PoolKind, Axis], Axis] | None = None
        self._counted: dict[Handle, int] = {}  # the level at which each owner is counted in the axes
        self._known: dict[tuple[Handle, int], dict[int, tuple[RecoveryRecipe, ...]]] = {}

    def victims(self, candidate: int) -> tuple[Handle, ...]:
        return self._victims[candidate]

    def ladder(self, candidate: int, victim: int) -> tuple[OwnerLevel, ...]:
        return self._levels(self._victims[candidate][victim])

    def recovery(self, owner: Handle) -> Mapping[int, tuple[RecoveryRecipe, ...]]:
        pools, states = self._places()
        absent = {kind: ~axis.device for kind, axis in pools.items()}
        return self._ways(owner, frozenset(self._store.histories.get(owner).checkpoints), absent, ~states.device)

    def assess(self, target: Target) -> Assessment:
        incoming = self._incoming[target.candidate]
        pages, images = self._moves(target)
        shortages, snapshot = self._shortages(incoming, pages, images)
        down = self._store.transfer("d2h", {k: len(m.demoted) for k, m in pages.items()}, len(images.demoted))
        if snapshot:
            down += self._store.transfer("d2h", {}, 1)
        transfers = (*down, *incoming.transfers)
        return Assessment(
            shortages,
            MachineWork(transfers, incoming.prefill),
            self._recovery(target, pages, images),
            incoming.source,
            ready=all(batch.direction == "d2d" for batch in transfers),
        )

    def seal(self, target: Target) -> ResourcePlan:
        incoming, victims = self._incoming[target.candidate], self._victims[target.candidate]
        pages, images = self._moves(target)
        shortages, snapshot = self._shortages(incoming, pages, images)
        if shortages or self.revision != self._store.revision:
            raise InvariantError(f"a target that is not feasible was sealed: {shortages}")
        levels = {v: self._levels(v)[n] for v, n in zip(victims, target.levels, strict=True) if n}
        manifest = {v: frozenset(self._store.histories.get(v).checkpoints) - level.kept for v, level in levels.items()}
        if incoming.shed and incoming.owner is not None:
            manifest[incoming.owner] = incoming.shed
        plan = ResourcePlan(
            next(_ids), self.revision, self._kind, incoming.request.id if incoming.request else None, incoming.lane,
            target, manifest,
        )  # fmt: skip
        self._sealed(SealedPlan(plan, incoming, levels, pages, images, snapshot))
        return plan

    # -- projection ----------------------------------------------------------------------------------------------

    def _levels(self, owner: Handle) -> tuple[OwnerLevel, ...]:
        found = self._ladders.get(owner)
        if found is None:
            store = self._store
            hosted = store.states.host_capacity > 0 and len(store.arena.bound) > 0
            found = self._ladders[owner] = ladder(store.histories.get(owner), len(store.kv), hosted)
        return found

    def _stance(self, owner: Handle, number: int) -> tuple[Mapping[PoolKind, Stance], Stance]:
        """What an owner asks of every axis at one level."""
        found = self._stances.get((owner, number))
        if found is None:
            store, level = self._store, self._levels(owner)[number]
            history = store.histories.get(owner)
            kept = {i: history.checkpoints[i] for i in sorted(level.kept)}
            deepest = max((c.frontier for c in kept.values()), default=0)
            by_pool = {}
            for (kind, kv), keep in zip(store.kv.items(), level.device_pages, strict=True):
                blocks = np.array([b.index for b in kv.spaces.get(history.spaces[kind]).blocks], np.int64)
                required = pages(checkpoint_tokens(kind, deepest))
                by_pool[kind] = Stance(blocks[:required], blocks[: min(keep, required)], level.duplicates)
            images = Stance(
                _indices({c.image for c in kept.values()}),
                _indices({c.image for i, c in kept.items() if i in level.device_states}),
                level.duplicates,
            )
            found = self._stances[owner, number] = by_pool, images
        return found

    def _places(self) -> tuple[Mapping[PoolKind, Axis], Axis]:
        """Every replica there is. Walked at the first target that degrades somebody."""
        if self._axes is None:
            by_pool, images = pool_axes(self._store), image_axis(self._store)
            for owner, _ in self._store.histories.live():
                pools, states = self._stance(owner, 0)
                for kind, stance in pools.items():
                    by_pool[kind].add(stance)
                images.add(states)
                self._counted[owner] = 0
            self._axes = by_pool, images
        return self._axes

    def _moves(self, target: Target) -> tuple[dict[PoolKind, Moves], Moves]:
        incoming, victims = self._incoming[target.candidate], self._victims[target.candidate]
        if len(target.levels) != len(victims):
            raise InvariantError(f"{target} does not name a level for each of {len(victims)} victims")
        if not any(target.levels):
            nothing = Moves(NOTHING, NOTHING, NOTHING)
            return dict.fromkeys(self._store.kv, nothing), nothing
        by_pool, images = self._places()
        levels = dict(zip(victims, target.levels))
        for owner, counted in self._counted.items():  # one target differs from the one before in few owners
            level = levels.get(owner, 0)
            if level != counted:
                for number, sign in ((counted, -1), (level, 1)):
                    pools, states = self._stance(owner, number)
                    for kind, stance in pools.items():
                        by_pool[kind].add(stance, sign)
                    images.add(states, sign)
                self._counted[owner] = level
        moves = {kind: axis.project(incoming.pages.get(kind, NOTHING)) for kind, axis in by_pool.items()}
        return moves, images.project(incoming.image)

    # -- feasibility ---------------------------------------------------------------------------------------------

    def _shortages(
        self, incoming: Incoming, by_pool: Mapping[PoolKind, Moves], images: Moves
    ) -> tuple[tuple[Shortage, ...], bool]:
        """What is missing at the fullest stage, and whether a capture's state goes to the host."""
        store, states = self._store, self._store.states
        missing = {}
        for kind, units in incoming.units.items():
            m = by_pool[kind]
            free = store.kv[kind].pool.available + len(m.device) + len(m.demoted)
            missing[f"pages.{kind.name.lower()}"] = units - free
        missing["host.pages"] = store.arena.lacking(
            {kind: host_superblocks(store, kind, m.host) for kind, m in by_pool.items()},
            {kind: len(m.demoted) for kind, m in by_pool.items()},
        )
        host_free = states.host_available + len(images.host) - len(images.demoted)
        missing["host.state"] = -host_free
        free_slots = states.available + len(images.device) + len(images.demoted) + incoming.freed
        lacking = max(incoming.states - free_slots, incoming.held - store.spare)
        snapshot = incoming.source == "capture" and lacking > 0 and host_free > 0 and incoming.states > 0
        missing["state"] = 0 if snapshot else lacking
        missing["unsettled_fork"] = int(store.unsettled)
        return tuple(Shortage(axis, n) for axis, n in missing.items() if n > 0), snapshot

    # -- recovery ------------------------------------------------------------------------------------------------

    def _recovery(
        self, target: Target, by_pool: Mapping[PoolKind, Moves], images: Moves
    ) -> dict[CheckpointRef, tuple[RecoveryRecipe, ...]]:
        """Ways back to the checkpoints of degraded victims: the deepest surviving one of the same history that is not
        beyond it and the gap, and from nothing."""
        recipes: dict[CheckpointRef, tuple[RecoveryRecipe, ...]] = {}
        degraded = [(v, n) for v, n in zip(self._victims[target.candidate], target.levels) if n]
        if not degraded:
            return recipes
        pools, states = self._places()
        absent = {kind: _gone(axis, by_pool[kind]) for kind, axis in pools.items()}
        off = _gone(states, images)
        for owner, number in degraded:
            kept = self._levels(owner)[number].kept
            ways = self._known.get((owner, number))
            if ways is None:
                ways = self._ways(owner, kept, absent, off)
                if not kept or self._alone(owner):  # nobody else decides where what it needs is
                    self._known[owner, number] = ways
            for i, found in ways.items():
                recipes[CheckpointRef(owner, i)] = found
        return recipes

    def _alone(self, owner: Handle) -> bool:
        """Whether no other owner or row has a page or an image of this one."""
        store, history = self._store, self._store.histories.get(owner)
        images = [c.image for c in history.checkpoints.values()]
        return all(store.states.images.get(i).refs == images.count(i) for i in images) and all(
            page.members == 1 for kind in store.kv for page in store.blocks(history, kind, history.frontier)
        )

    def _ways(
        self, owner: Handle, kept: frozenset[int], absent: Mapping[PoolKind, Flags], off: Flags
    ) -> dict[int, tuple[RecoveryRecipe, ...]]:
        store, history, before = self._store, self._store.histories.get(owner), self._stance(owner, 0)[0]
        survivors = sorted((history.checkpoints[i].frontier, i) for i in kept)
        found = {}
        for i, checkpoint in history.checkpoints.items():
            ways = []
            below = [(f, j) for f, j in survivors if f <= checkpoint.frontier]
            if below:
                frontier, j = below[-1]
                counts = {}
                for kind, stance in before.items():
                    blocks = stance.required[: pages(checkpoint_tokens(kind, frontier))]
                    counts[kind] = int(np.count_nonzero(absent[kind][blocks]))
                state = int(off[history.checkpoints[j].image.index])
                ways.append(
                    RecoveryRecipe(store.transfer("h2d", counts, state), store.span(frontier, checkpoint.frontier))
                )
            ways.append(RecoveryRecipe((), store.span(0, checkpoint.frontier)))
            found[i] = tuple(ways)
        return found


def pool_axes(store: Store) -> dict[PoolKind, Axis]:
    """Where every page is. Active rows need theirs as they are."""
    axes = {}
    for kind, kv in store.kv.items():
        live = kv.pages.live()
        n = 1 + max((h.index for h, _ in live), default=-1)
        device, host, needed = (np.zeros(n, np.bool_) for _ in range(3))
        for h, page in live:
            device[h.index], host[h.index], needed[h.index] = page.device is not None, page.hosted, page.pins > 0
        for _, space in kv.spaces.live():
            if space.active:
                needed[[b.index for b in space.blocks]] = True
        axes[kind] = Axis(device, host, needed)
    return axes


def image_axis(store: Store) -> Axis:
    """Where every state image is. Active rows need theirs, and the checkpoints they hold, as they are."""
    live = store.states.images.live()
    n = 1 + max((h.index for h, _ in live), default=-1)
    device, host, needed = (np.zeros(n, np.bool_) for _ in range(3))
    for h, image in live:
        device[h.index], host[h.index] = image.device is not None, image.host is not None
        needed[h.index] = image.mutable or image.pins > 0
    for _, record in store.sequences.live():
        needed[[c.image.index for c in record.checkpoints.values()]] = True
    return Axis(device, host, needed)


def host_superblocks(store: Store, kind: PoolKind, released: Index) -> Index:
    """The superblock of each released page's host slot."""
    table = store.kv[kind].pages
    pages = [table.get(handle) for handle in map(table.at, released.tolist()) if handle is not None]
    return np.array([page.host.slot.superblock for page in pages if page.host is not None], np.int64)


def _gone(axis: Axis, moves: Moves) -> Flags:
    """Objects that are not on the device after the moves."""
    off = ~axis.device
    off[moves.device] = True
    off[moves.demoted] = True
    return off


def _indices(handles: set[Handle]) -> Index:
    return np.array(sorted(h.index for h in handles), np.int64)

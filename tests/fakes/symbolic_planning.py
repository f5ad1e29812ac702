"""A planning session over a world of sets: pages with replicas, owners that share them, and stages whose peaks are
counted. It answers what the planner asks by brute force and knows nothing of how targets are chosen."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from ninfer.context import (
    Assessment,
    Candidate,
    CheckpointRef,
    OwnerLevel,
    ResourcePlan,
    Shortage,
    Target,
    TransactionKind,
)
from ninfer.contract import Handle
from ninfer.runtime.costs import pairs
from ninfer.work import MachineWork, PrefillWork, RecoveryRecipe, TransferBatch

PAGE = 64
NONE: frozenset[int] = frozenset()
PAGE_BYTES, IMAGE_BYTES = 1 << 16, 1 << 20


@dataclass
class Point:
    """A checkpoint: the pages it needs, and where its state is."""

    frontier: int
    pages: tuple[int, ...]
    device: bool = True
    host: bool = False


@dataclass
class World:
    """device, host: capacity (pages, images). pages: id -> [on device, on host]. owners: what is retained.
    busy: (pages, images) of active sequences; pinned: pages they share with owners."""

    device: tuple[int, int]
    host: tuple[int, int]
    pages: dict[int, list[bool]]
    owners: dict[Handle, dict[int, Point]]
    busy: tuple[int, int] = (0, 0)
    pinned: frozenset[int] = frozenset()


def transfer(direction: str, pages: int, images: int) -> tuple[TransferBatch, ...]:
    if not pages + images:
        return ()
    return (TransferBatch(direction, 1, pages + images, pages * PAGE_BYTES + images * IMAGE_BYTES),)  # type: ignore[arg-type]


def prefill(reused: int, total: int) -> PrefillWork:
    suffix = total - reused
    return PrefillWork(-(-suffix // 256), suffix, pairs(reused, suffix))


@dataclass
class SymbolicSession:
    """A request of ``prompt`` tokens that may ever need ``need`` pages; ``candidates`` as for the planner."""

    world: World
    prompt: int
    need: int
    candidates: list[Candidate]
    revision: int = 0
    assessed: int = 0
    recipes: dict[tuple, tuple[RecoveryRecipe, ...]] = field(default_factory=dict)

    def candidate(self, ref: CheckpointRef | None, consume: bool = False) -> Candidate:
        reused = 0 if ref is None else self.world.owners[ref.owner][ref.checkpoint].frontier
        least: tuple[TransferBatch, ...] = ()
        if ref is not None:
            point = self.world.owners[ref.owner][ref.checkpoint]
            least = transfer("h2d", sum(not self.world.pages[p][0] for p in point.pages), not point.device)
        return Candidate(ref, reused, consume, prefill(reused, self.prompt), least)

    def victims(self, candidate: int) -> tuple[Handle, ...]:
        source = self.candidates[candidate].ref
        return tuple(owner for owner in self.world.owners if source is None or owner != source.owner)

    def ladder(self, candidate: int, victim: int) -> tuple[OwnerLevel, ...]:
        points = self.world.owners[self.victims(candidate)[victim]]
        every = frozenset(points)
        levels = [OwnerLevel(every, every, (99,), True)]
        if any(self.world.host):
            levels.append(OwnerLevel(every, NONE, (0,), True))
            if len(points) > 1:
                shallowest = min(points, key=lambda q: points[q].frontier)
                levels.append(OwnerLevel(frozenset((shallowest,)), NONE, (0,), True))
        return (*levels, OwnerLevel(NONE, NONE, (0,), False))

    def assess(self, target: Target) -> Assessment:
        self.assessed += 1
        w, candidate = self.world, self.candidates[target.candidate]
        victims = self.victims(target.candidate)
        level = {o: self.ladder(target.candidate, v)[n] for v, (o, n) in enumerate(zip(victims, target.levels))}
        source = candidate.ref and candidate.ref.owner
        kept = {o: [(q, w.owners[o][q]) for q in level[o].kept] for o in victims}
        survivors = [p for points in kept.values() for _, p in points]
        wanted = set(w.pinned).union(*[p.pages for o in victims for _, p in kept[o] if not _demoted(level[o])])
        start = w.owners[source][candidate.ref.checkpoint] if source else None
        moved = bool(candidate.consume and start and not self._shared(start, survivors))
        if source and not moved:
            survivors += w.owners[source].values()
            wanted.update(*[p.pages for p in w.owners[source].values()])
        required = set(w.pinned).union(*[p.pages for p in survivors], start.pages if start else ())
        if start:
            wanted.update(start.pages)
        on_device = {p for p, (device, _) in w.pages.items() if device}
        on_host = {p for p, (_, host) in w.pages.items() if host}
        demoted = {p for p in required & on_device if p not in wanted}
        copied = demoted - on_host
        images = [p for o in victims for _, p in kept[o] if _demoted(level[o]) and p.device]
        image_copies = [p for p in images if not p.host]
        # stages: release, demote (both copies), release what was demoted, reserve, restore
        others = [p for points in w.owners.values() for p in points.values()]
        held_images = [p for p in survivors if p.device] + ([start] if moved and start.device else [])
        held_host = [p for p in survivors if p.host]
        host_pages = len(required & on_host) + len(copied)
        host_images = len(held_host) + len(image_copies)
        restored = {p for p in (start.pages if start else ()) if p not in on_device}
        kept_pages = len((required & on_device) - demoted)
        own = len(start.pages) if start else 0
        shared = own if moved else (start.frontier // PAGE if start else 0)
        growth = self.need - shared
        new_image = 0 if moved and start.device else 1
        restore_image = bool(start and not start.device and not moved)
        assert len(others) >= len(survivors)
        peaks = {
            "host pages": (host_pages, w.host[0]),
            "host images": (host_images, w.host[1]),
            "pages": (kept_pages + len(restored) + growth + w.busy[0], w.device[0]),
            "images": (len(held_images) - len(images) + new_image + restore_image + w.busy[1], w.device[1]),
        }
        short = tuple(Shortage(axis, used - most) for axis, (used, most) in peaks.items() if used > most)
        cow = 1 if start and not moved and start.frontier % PAGE else 0
        transfers = (
            *transfer("d2h", len(copied), len(image_copies)),
            *transfer("h2d", len(restored), bool(start and not start.device)),
            *transfer("d2d", cow, 0),
        )
        op = "root" if start is None else "move" if moved else "fork"
        recovery = {
            CheckpointRef(o, q): self._recipes(o, q, kept, _demoted(level[o]), wanted)
            for o, n in zip(victims, target.levels) for q in w.owners[o] if n
        }  # fmt: skip
        return Assessment(short, MachineWork(transfers, candidate.prefill), recovery, op, not transfers)

    def recovery(self, owner: Handle):
        points = self.world.owners[owner]
        everywhere = set(self.world.pages)
        return {q: self._recipes(owner, q, {owner: list(points.items())}, False, everywhere) for q in points}

    def seal(self, target: Target) -> ResourcePlan:
        manifest = {
            owner: frozenset(self.world.owners[owner]) - self.ladder(target.candidate, v)[level].kept
            for v, (owner, level) in enumerate(zip(self.victims(target.candidate), target.levels))
            if level
        }
        return ResourcePlan(1, self.revision, TransactionKind.MATERIALIZE, None, 0, target, manifest)

    def _shared(self, start: Point, survivors: list[Point]) -> bool:
        return any(set(start.pages) & set(p.pages) for p in survivors) or bool(set(start.pages) & self.world.pinned)

    def _recipes(self, owner, checkpoint, kept, demoted, wanted) -> tuple[RecoveryRecipe, ...]:
        w, total = self.world, self.world.owners[owner][checkpoint].frontier
        found = []
        for _, p in kept[owner]:
            if p.frontier <= total:
                away = sum(not w.pages[x][0] or x not in wanted for x in p.pages)
                image = demoted or not p.device
                found.append(RecoveryRecipe(transfer("h2d", away, image), prefill(p.frontier, total)))
        found.append(RecoveryRecipe((), prefill(0, total)))
        return self.recipes.setdefault((owner, checkpoint, tuple(found)), tuple(found))


def _demoted(level: OwnerLevel) -> bool:
    return level.device_pages == (0,)


def all_targets(session: SymbolicSession) -> list[Target]:
    """Every target there is."""
    found = []
    for c in range(len(session.candidates)):
        ranges = [range(len(session.ladder(c, v))) for v in range(len(session.victims(c)))]
        found += [Target(c, levels) for levels in itertools.product(*ranges)]
    return found

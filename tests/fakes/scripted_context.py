"""What a scripted program keeps of finished requests: real tokens, real pages, checkpoints that are compared for
equality, and planning sessions over them. No page is ever shared, and there is no host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ninfer.context import (
    Assessment,
    Candidate,
    CaptureOffer,
    CheckpointKind,
    CheckpointRef,
    CheckpointSummary,
    OwnerLevel,
    OwnerOutcome,
    OwnerSummary,
    ResourcePlan,
    Shortage,
    ShortlistKey,
    Target,
    TransactionKind,
)
from ninfer.contract import Handle, PreparedRequest, SequenceHandle
from ninfer.identity import PrefixIdentity, digest_at, digest_chain
from ninfer.runtime.costs import pairs
from ninfer.work import MachineWork, PrefillWork, RecoveryRecipe


@dataclass
class Owner:
    """tokens: the history. points: its checkpoints, id -> (frontier, kind)."""

    tokens: tuple[int, ...]
    points: dict[int, tuple[int, CheckpointKind]]
    busy: bool = False

    @property
    def depth(self) -> int:
        return max(frontier for frontier, _ in self.points.values())


@dataclass
class Kept:
    """Owners by handle. page: tokens of a page."""

    page: int
    owners: dict[Handle, Owner] = field(default_factory=dict)
    made: int = 0

    def pages(self) -> int:
        return sum(-(-owner.depth // self.page) for owner in self.owners.values())

    def insert(self, kind: str, owner: Owner) -> Handle:
        self.made += 1
        handle = Handle(kind, self.made, 1)
        self.owners[handle] = owner
        return handle

    def summary(self, handle: Handle, revision: int) -> OwnerSummary:
        owner = self.owners[handle]
        identity = identity_of(owner.tokens)
        chain = digest_chain(identity)
        points = tuple(
            CheckpointSummary(
                CheckpointRef(handle, q), kind, ShortlistKey(f, "text", digest_at(identity, chain, f)), True, False
            )
            for q, (f, kind) in owner.points.items()
        )
        return OwnerSummary(handle, points, owner.depth, 0, revision)

    def inspect(self, ref: CheckpointRef | None, request: PreparedRequest, consume: bool) -> Candidate | None:
        n = len(request.identity.tokens)
        if ref is None:
            return Candidate(None, 0, False, PrefillWork(1, n, pairs(0, n)))
        owner = self.owners.get(ref.owner)
        if owner is None or ref.checkpoint not in owner.points:
            return None
        frontier = owner.points[ref.checkpoint][0]
        if frontier > n or tuple(request.identity.tokens[:frontier].tolist()) != owner.tokens[:frontier]:
            return None
        return Candidate(ref, frontier, consume, PrefillWork(1, n - frontier, pairs(frontier, n - frontier)))


def identity_of(tokens: tuple[int, ...]) -> PrefixIdentity:
    n = len(tokens)
    return PrefixIdentity(np.array(tokens, np.int32), np.zeros(n, np.uint8), np.zeros((3, n), np.int32))


@dataclass
class KeptSession:
    """Plans over what is kept. free: pages that nobody holds; need: pages the outcome takes."""

    kept: Kept
    candidates: list[Candidate]
    victim_handles: tuple[Handle, ...]
    free: int
    need: int
    revision: int
    plan: ResourcePlan
    fault: object = None
    request: PreparedRequest | None = None
    offer: CaptureOffer | None = None
    sequence: SequenceHandle | None = None

    def victims(self, candidate: int) -> tuple[Handle, ...]:
        source = self.candidates[candidate].ref
        return tuple(h for h in self.victim_handles if source is None or h != source.owner)

    def ladder(self, candidate: int, victim: int) -> tuple[OwnerLevel, ...]:
        points = self.kept.owners[self.victims(candidate)[victim]].points
        every = frozenset(points)
        levels = [OwnerLevel(every, every, (99,), True)]
        if len(points) > 1:
            first = frozenset((min(points, key=lambda q: points[q][0]),))
            levels.append(OwnerLevel(first, first, (99,), True))
        return (*levels, OwnerLevel(frozenset(), frozenset(), (0,), False))

    def assess(self, target: Target) -> Assessment:
        if self.fault is not None:
            self.fault.check("assess", "before")  # type: ignore[attr-defined]
        candidate, gained, recovery = self.candidates[target.candidate], 0, {}
        for v, (handle, level) in enumerate(zip(self.victims(target.candidate), target.levels)):
            owner, outcome = self.kept.owners[handle], self.ladder(target.candidate, v)[level]
            left = max((owner.points[q][0] for q in outcome.kept), default=0)
            gained += -(-owner.depth // self.kept.page) - -(-left // self.kept.page)
            for q, (frontier, _) in owner.points.items():
                if level:
                    depths = [owner.points[k][0] for k in outcome.kept if owner.points[k][0] <= frontier]
                    recovery[CheckpointRef(handle, q)] = tuple(
                        RecoveryRecipe((), PrefillWork(1, frontier - d, pairs(d, frontier - d))) for d in (*depths, 0)
                    )
        moved = candidate.consume and candidate.ref is not None
        if moved:
            gained += -(-self.kept.owners[candidate.ref.owner].depth // self.kept.page)
        missing = self.need - self.free - gained
        source = "capture" if self.offer else "root" if candidate.ref is None else "move" if moved else "fork"
        short = (Shortage("pages", missing),) if missing > 0 else ()
        return Assessment(short, MachineWork((), candidate.prefill), recovery, source, True)  # type: ignore[arg-type]

    def recovery(self, owner: Handle):
        points = self.kept.owners[owner].points
        return {q: (RecoveryRecipe((), PrefillWork()),) for q in points}

    def seal(self, target: Target) -> ResourcePlan:
        assert self.assess(target).feasible
        manifest = {
            handle: frozenset(self.kept.owners[handle].points) - self.ladder(target.candidate, v)[level].kept
            for v, (handle, level) in enumerate(zip(self.victims(target.candidate), target.levels))
            if level
        }
        p = self.plan
        return ResourcePlan(p.id, p.revision, p.kind, p.request, p.lane, target, manifest)


def carry_out(kept: Kept, manifest, revision: int) -> tuple[OwnerOutcome, ...]:
    """Delete what a plan deletes."""
    outcomes = []
    for handle, gone in manifest.items():
        owner = kept.owners[handle]
        owner.points = {q: point for q, point in owner.points.items() if q not in gone}
        if owner.points:
            owner.tokens = owner.tokens[: owner.depth]
            outcomes.append(OwnerOutcome(handle, frozenset(owner.points), kept.summary(handle, revision)))
        else:
            del kept.owners[handle]
            outcomes.append(OwnerOutcome(handle, frozenset(), None))
    return tuple(outcomes)


__all__ = ["Kept", "KeptSession", "Owner", "TransactionKind", "carry_out"]

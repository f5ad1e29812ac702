"""What the planner is asked: where a request starts, and whether a checkpoint is worth making. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ninfer.context import (
    AdoptionTicket,
    Candidate,
    CaptureOffer,
    CaptureSkip,
    OwnerLevel,
    ResourcePlan,
    Shortage,
    Target,
)
from ninfer.contract import Handle, PreparedRequest, ProgramPort
from ninfer.runtime.captures import PlannedCapture
from ninfer.runtime.catalogue import PRIVATE, SHARED, Catalogue
from ninfer.runtime.costs import CostModel, pairs
from ninfer.runtime.lanes import Lane
from ninfer.runtime.planner import plan
from ninfer.runtime.question import Diagnostics, PlannerBudget, Question
from ninfer.runtime.retention import ONE, Retention
from ninfer.runtime.sessions import SessionIndex
from ninfer.runtime.settings import CacheSettings
from ninfer.runtime.sources import ask, find_sources, values
from ninfer.work import PrefillWork


@dataclass(frozen=True, slots=True)
class Planned:
    """A sealed plan of this boundary.

    Of a materialization: its request, its source and how many checkpoints the prompt's digests suggested. Of a capture:
    what it makes. A demotion has no lane.
    """

    plan: ResourcePlan
    ticket: AdoptionTicket
    lane: int | None
    diagnostics: Diagnostics
    request: PreparedRequest | None = None
    source: Candidate | None = None
    listed: int = 0
    offer: CaptureOffer | None = None

    @property
    def row(self) -> int:
        """The lane of what has one."""
        assert self.lane is not None
        return self.lane


@dataclass(frozen=True, slots=True)
class Chooser:
    """``clock`` reads nanoseconds: it bounds the planner's search."""

    program: ProgramPort
    catalogue: Catalogue
    sessions: SessionIndex
    settings: CacheSettings
    costs: CostModel
    budget: PlannerBudget
    clock: Callable[[], int]

    def start(self, request: PreparedRequest, lane: int, places: int) -> Planned | tuple[Shortage, ...]:
        """Where the request starts and what must go for it, or what it lacks. ``places``: free ones for what it
        leaves."""
        sources = find_sources(self.program, self.catalogue, self.sessions, request, self.settings.candidates)
        short = {PRIVATE: 1} if request.participation == "read_write" and places < 1 else {}
        question = ask(self.catalogue, self.sessions, request, sources, self.costs, short)
        session = self.program.open_session(request, lane, sources.candidates, self._victims())
        outcome = plan(session, question, self.costs, self.budget, self.clock)
        if outcome.target is None:
            return outcome.shortages
        sealed = session.seal(outcome.target)
        source = sources.candidates[outcome.target.candidate]
        return Planned(sealed, _ticket(sealed), lane, outcome.diagnostics, request, source, sources.listed)

    def capture(self, row: Lane, index: int, capture: PlannedCapture, places: int) -> Planned | str:
        """How to make a checkpoint, or in one word why not. ``places``: free ones for a shared prefix.

        What others lose and the time the row stands still must be worth less than the checkpoint. Where a shared prefix
        is not to be had, the row's own checkpoint at that frontier still is.
        """
        offer = capture.offer
        assert row.sequence is not None
        if offer.private is not None:
            replaced = row.replaced_by(offer.private, self.settings.long_anchors)
            offer = CaptureOffer(offer.frontier, offer.private, offer.shared, replaced)
        session = self.program.open_capture(row.sequence, offer, self._victims())
        if isinstance(session, CaptureSkip):
            return session.value
        candidate = Candidate(None, offer.frontier, False, PrefillWork())
        short = {SHARED: 1} if offer.shared and places < 1 else {}
        question = Question((candidate,), values(self.catalogue), slots_short=short)
        outcome = plan(session, question, self.costs, self.budget, self.clock)
        target = outcome.target
        if target is not None and (not any(target.levels) or self._worth(row, offer, capture) > outcome.cost):
            sealed = session.seal(target)
            return Planned(sealed, _ticket(sealed), index, outcome.diagnostics, offer=offer)
        if offer.shared and offer.private is not None:
            own = PlannedCapture(CaptureOffer(offer.frontier, offer.private, False), wanted=True)
            return self.capture(row, index, own, places)
        return "capacity"

    def demotion(self, session: str | None) -> Planned | None:
        """How to move what a session has left on the device, or everything, to host memory, the most recently used
        first as far as there is room; None where there is nothing to move."""
        entries = [e for e in self.catalogue if e.hold is None and (session is None or e.session == session)]
        on_device = [e.owner for e in entries if self.program.summary(e.owner).device_bytes]
        question = self.program.open_demotion(on_device)
        levels = [0] * len(on_device)
        for v in sorted(range(len(levels)), key=lambda v: self.catalogue.age(self.catalogue.get(on_device[v]))):
            ladder = question.ladder(0, v)
            away = next((n for n, level in enumerate(ladder) if _away(level) and level.kept == ladder[0].kept), 0)
            trial = [*levels[:v], away, *levels[v + 1 :]]
            if question.assess(Target(0, tuple(trial))).feasible:
                levels = trial
        if not any(levels):
            return None
        sealed = question.seal(Target(0, tuple(levels)))
        return Planned(sealed, _ticket(sealed), None, Diagnostics("no_pressure"))

    def _victims(self) -> tuple[Handle, ...]:
        return tuple([entry.owner for entry in self.catalogue])

    def _worth(self, row: Lane, offer: CaptureOffer, capture: PlannedCapture) -> int:
        """1/256 nanoseconds that having the checkpoint is expected to spare."""
        if not capture.wanted or row.request is None:
            return 0
        gap = offer.frontier - row.reused
        spared = self.costs.prefill_ns(PrefillWork(1, gap, pairs(row.reused, gap)))
        retention = Retention.SHARED_STABLE if offer.shared else retention_of(row.request)
        return retention.value * ONE * spared


def _away(level: OwnerLevel) -> bool:
    """Whether nothing of an owner needs to be on the device."""
    return not level.device_states and not any(level.device_pages)


def _ticket(sealed: ResourcePlan) -> AdoptionTicket:
    return AdoptionTicket(sealed.id, sealed.lane, sealed.manifest)


def retention_of(request: PreparedRequest) -> Retention:
    """Of what the request leaves."""
    named = request.session is not None and request.update_session
    return Retention.LIVE_SESSION if named else Retention.RECENT_PRIVATE

"""Logical lanes and the one open resource transaction. Holds no page, slot or byte count: those are Program's."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ninfer.context import (
    AdoptionTicket,
    ResourcePlan,
    ResourceResult,
    Shortage,
    StartStatus,
    Target,
    TerminalResult,
    TransactionKind,
    TransactionStatus,
)
from ninfer.contract import PreparedRequest, ProgramPort, SequenceHandle
from ninfer.errors import InvariantError


class LaneState(enum.Enum):
    FREE = "free"
    MATERIALIZING = "materializing"
    ACTIVE = "active"
    TERMINAL_PENDING = "terminal_pending"


@dataclass(slots=True)
class Lane:
    """One long-lived position of an active request."""

    state: LaneState = LaneState.FREE
    request: int | None = None
    sequence: SequenceHandle | None = None
    retain: bool = False


@dataclass(frozen=True, slots=True)
class Adoption:
    """A materialized request: its lane, sequence, and the prompt tokens that need no prefill."""

    request: int
    lane: int
    sequence: SequenceHandle
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """ready: adopted. started: a transaction is open. blocked: nothing changed; ``shortages`` say why."""

    kind: Literal["ready", "started", "blocked"]
    adoption: Adoption | None = None
    shortages: tuple[Shortage, ...] = ()


class ResourceManager:
    """Decides about lanes; asks Program about everything physical and adopts its absolute results."""

    def __init__(self, program: ProgramPort, lanes: int) -> None:
        self._program = program
        self._lanes = [Lane() for _ in range(lanes)]
        self._open: AdoptionTicket | None = None
        self.lane_version = 0
        self.transaction_version = 0

    @property
    def open(self) -> bool:
        """Whether a resource transaction is open."""
        return self._open is not None

    def free_lane(self) -> int | None:
        """The lowest free lane, or None."""
        return next((i for i, lane in enumerate(self._lanes) if lane.state is LaneState.FREE), None)

    def lane_states(self) -> tuple[LaneState, ...]:
        return tuple(lane.state for lane in self._lanes)

    # admission

    def plan(self, request: PreparedRequest, lane: int) -> ResourcePlan | tuple[Shortage, ...]:
        """Pure planning of a start from nothing."""
        root = self._program.inspect(None, request, False)
        assert root is not None
        session = self._program.open_session(request, lane, [root], [])
        assessment = session.assess(Target(0, ()))
        return session.seal(Target(0, ())) if assessment.feasible else assessment.shortages

    def start(self, plan: ResourcePlan) -> AdmissionVerdict:
        """Start a plan of this boundary. A stale or refused plan leaves everything as it was."""
        if self._open is not None:
            raise InvariantError("a resource transaction is already open")
        index, request = plan.lane, plan.request
        if index is None or request is None or self._lanes[index].state is not LaneState.FREE:
            raise InvariantError(f"plan {plan.id} names no free lane")
        lane = self._lanes[index]
        lane.state, lane.request = LaneState.MATERIALIZING, request
        ticket = AdoptionTicket(plan.id, index, plan.manifest)
        if self._program.start(plan, ticket) is not StartStatus.STARTED:
            self._lanes[index] = Lane()
            return AdmissionVerdict("blocked")
        self._open = ticket
        self.transaction_version += 1
        adoption = self.progress()
        return AdmissionVerdict("started") if adoption is None else AdmissionVerdict("ready", adoption)

    def progress(self) -> Adoption | None:
        """Commit and adopt the open transaction if its copies are done. Never blocks."""
        ticket = self._require_open()
        status = self._program.poll()
        if status is TransactionStatus.RUNNING:
            return None
        if status is TransactionStatus.IDLE:
            raise InvariantError("the open resource transaction is unknown to Program")
        result = self._program.commit_transaction()
        lane = self._check(ticket, result, committed=True)
        if result.sequence is None or lane.request is None or ticket.lane is None:
            raise InvariantError("a materialization committed without a sequence")
        lane.state, lane.sequence = LaneState.ACTIVE, result.sequence
        self._closed()
        return Adoption(lane.request, ticket.lane, result.sequence, result.reused_tokens)

    def abort(self) -> None:
        """Abort the open transaction and adopt what Program says became of it."""
        ticket = self._require_open()
        result = self._program.abort_transaction()
        self._check(ticket, result, committed=False)
        assert ticket.lane is not None
        self._lanes[ticket.lane] = Lane()
        self.lane_version += 1
        self._closed()

    # the end of a request

    def mark_terminal(self, index: int, retain: bool) -> None:
        """The row has run its last unit. ``retain``: it ended normally, so Program may keep a continuation."""
        lane = self._lanes[index]
        if lane.state is not LaneState.ACTIVE:
            raise InvariantError(f"lane {index} cannot end while {lane.state.value}")
        lane.state, lane.retain = LaneState.TERMINAL_PENDING, retain

    def settle_terminal(self, index: int) -> TerminalResult:
        """Release the row's sequence and free its lane. Requires that no transaction is open."""
        lane = self._lanes[index]
        if self._open is not None or lane.state is not LaneState.TERMINAL_PENDING or lane.sequence is None:
            raise InvariantError(f"lane {index} cannot settle")
        result = self._program.discard(lane.sequence)
        self._lanes[index] = Lane()
        self.lane_version += 1
        return result

    def clear(self) -> None:
        """Forget all lanes and the open transaction; Program has been cleaned up."""
        self._lanes = [Lane() for _ in self._lanes]
        self._open = None

    def _require_open(self) -> AdoptionTicket:
        if self._open is None:
            raise InvariantError("no resource transaction is open")
        return self._open

    def _closed(self) -> None:
        self._open = None
        self.transaction_version += 1

    def _check(self, ticket: AdoptionTicket, result: ResourceResult, *, committed: bool) -> Lane:
        """Validate a result completely before anything is adopted."""
        if (
            result.transaction != ticket.transaction
            or result.kind is not TransactionKind.MATERIALIZE
            or result.committed is not committed
            or ticket.lane is None
            or self._lanes[ticket.lane].state is not LaneState.MATERIALIZING
        ):
            raise InvariantError(f"resource result {result} does not answer {ticket}")
        return self._lanes[ticket.lane]

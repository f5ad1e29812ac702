"""Logical lanes, the catalogue of retained histories and the one open resource transaction.

Holds no page, slot or byte count: what is possible, and what became of it, Program says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal

from ninfer.context import CheckpointKind, ResourceResult, Shortage, StartStatus, TransactionStatus
from ninfer.contract import Handle, PreparedRequest, ProgramPort, SequenceHandle
from ninfer.errors import InvariantError
from ninfer.runtime.adoption import Adoption, Captured, Demoted, Outcome
from ninfer.runtime.captures import Demand, PlannedCapture, plan_captures
from ninfer.runtime.catalogue import PRIVATE, SHARED, Catalogue, Entry
from ninfer.runtime.choices import Chooser, Planned, retention_of
from ninfer.runtime.costs import CostModel
from ninfer.runtime.lanes import Keep, Lane, LaneState
from ninfer.runtime.question import DEFAULT_BUDGET, PlannerBudget
from ninfer.runtime.retention import Retention
from ninfer.runtime.reuse import ContextStats, Reuse
from ninfer.runtime.sessions import SessionIndex
from ninfer.runtime.settings import CacheSettings


class ResourceManager:
    """Decides about lanes and about what is kept; asks Program about everything physical and adopts its results.

    ``clock`` reads nanoseconds: it bounds the planner's search.
    """

    def __init__(
        self,
        program: ProgramPort,
        lanes: int,
        settings: CacheSettings,
        costs: CostModel,
        budget: PlannerBudget = DEFAULT_BUDGET,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._program = program
        self._lanes = [Lane() for _ in range(lanes)]
        self._settings = settings
        self._open: Planned | None = None
        self._demand = Demand()
        self._spare_states = settings.device_state_slots + settings.host_state_slots
        self.catalogue = Catalogue(settings.continuations, settings.shared_prefixes, settings.aging_window)
        self.sessions = SessionIndex()
        self._choose = Chooser(program, self.catalogue, self.sessions, settings, costs, budget, clock)
        self.reuse = Reuse()
        self._paused: set[int] = set()
        self._ended_paused: set[int] = set()
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

    # -- requests --------------------------------------------------------------------------------------------------

    def stats(self) -> ContextStats:
        """What is kept, and what it has done."""
        return self.reuse.snapshot(self.catalogue, len(self.sessions))

    def enter(self, request: PreparedRequest) -> None:
        """A request has entered the engine."""
        if request.session is not None:
            self.sessions.enter(request.session)

    def leave(self, request: PreparedRequest) -> None:
        """A request has ended."""
        if request.id in self._paused:
            self._ended_paused.add(request.id)
        if request.session is not None:
            self.sessions.leave(request.session)

    # -- admission -------------------------------------------------------------------------------------------------

    def plan(self, request: PreparedRequest, lane: int) -> Planned | tuple[Shortage, ...]:
        """Choose what the request starts from and what must go for it; or say what it lacks. Changes nothing."""
        return self._choose.start(request, lane, self._private_places())

    def prove_backfill(
        self, head: PreparedRequest, donors: Collection[SequenceHandle], extra: PreparedRequest | None
    ) -> bool:
        """Whether ``head`` can start from nothing once the donors have ended, even if every other row, and ``extra``,
        never does. Changes nothing."""
        lanes = sum(lane.state is not LaneState.FREE for lane in self._lanes) - len(donors) + (extra is not None)
        return lanes < len(self._lanes) and self._program.prove_backfill(head, donors, extra)

    def start(self, planned: Planned) -> Outcome | Literal["started", "refused"]:
        """Start a plan of this boundary. A stale or refused one leaves everything as it was."""
        if self._open is not None:
            raise InvariantError("a resource transaction is already open")
        request = planned.request
        if request is not None:
            lane = self._lanes[planned.row]
            if lane.state is not LaneState.FREE:
                raise InvariantError(f"plan {planned.plan.id} names no free lane")
            lane.state, lane.request = LaneState.MATERIALIZING, request
        if self._program.start(planned.plan, planned.ticket) is not StartStatus.STARTED:
            if request is not None:
                self._lanes[planned.row] = Lane()
            return "refused"
        self._open = planned
        self.transaction_version += 1
        outcome = self.progress()
        return "started" if outcome is None or isinstance(outcome, str) else outcome

    def progress(self) -> Outcome | Literal["failed"] | None:
        """Commit and adopt the open transaction if its copies are done; "failed" when one of them did not happen, and
        it must be aborted. Never blocks."""
        planned = self._require_open()
        status = self._program.poll()
        if status is TransactionStatus.RUNNING:
            return None
        if status is TransactionStatus.FAILED:
            return "failed"
        if status is TransactionStatus.IDLE:
            raise InvariantError("the open resource transaction is unknown to Program")
        result = self._program.commit_transaction()
        self._check(planned, result, committed=True)
        if planned.request is not None:
            return self._adopt_sequence(planned, result)
        if planned.offer is not None:
            return self._adopt_capture(planned, result)
        self._adopt_owners(planned, result)
        self._closed()
        return Demoted()

    def abort(self) -> None:
        """Abort the open transaction and adopt what Program says became of it."""
        planned = self._require_open()
        result = self._program.abort_transaction()
        self._check(planned, result, committed=False)
        self._adopt_owners(planned, result)
        if planned.request is not None:
            self._lanes[planned.row] = Lane()
            self.lane_version += 1
        self._closed()

    # -- captures --------------------------------------------------------------------------------------------------

    def plan_capture(self, index: int, capture: PlannedCapture) -> Planned | str:
        """How to make a checkpoint of an active row, or in one word why not. Changes nothing."""
        lane = self._lanes[index]
        if self._open is not None or lane.sequence is None or lane.state is not LaneState.ACTIVE:
            return "transaction"
        return self._choose.capture(lane, index, capture, self._shared_places())

    def plan_demotion(self, session: str | None) -> Planned | None:
        """How to move a session's histories, or all, to host memory; None where none can be. Changes nothing."""
        return self._choose.demotion(session)

    # -- the end of a request --------------------------------------------------------------------------------------

    def mark_terminal(self, index: int, keep: Keep) -> None:
        """The row has run its last unit."""
        lane = self._lanes[index]
        if lane.state is not LaneState.ACTIVE:
            raise InvariantError(f"lane {index} cannot end while {lane.state.value}")
        lane.state, lane.keep = LaneState.TERMINAL_PENDING, keep if lane.publishes else Keep.NOTHING

    def settle_terminal(self, index: int) -> None:
        """Keep or release what the row holds and free its lane. Requires that no transaction is open."""
        lane = self._lanes[index]
        if self._open is not None or lane.state is not LaneState.TERMINAL_PENDING or lane.sequence is None:
            raise InvariantError(f"lane {index} cannot settle")
        if lane.keep is Keep.NOTHING:
            result = self._program.discard(lane.sequence)
        else:
            result = self._program.finish(lane.sequence, endpoint=lane.keep is Keep.ENDPOINT)
        request = lane.request
        assert request is not None
        self._lanes[index] = Lane()
        self.lane_version += 1
        if result.retained is None:
            return
        entry = Entry(result.retained.owner, retention_of(request), request.ticket, self.catalogue.clock)
        self.catalogue.add(entry, result.retained)
        if request.session is not None and request.update_session:
            self._bind(request.session, entry)

    def _bind(self, session: str, entry: Entry) -> None:
        before = self.sessions.lookup(session)
        if not self.sessions.publish(session, entry.owner, entry.order):
            entry.retention = Retention.RECENT_PRIVATE
            return
        entry.session = session
        older = self.catalogue.find(before) if before is not None else None
        if older is not None:
            older.session, older.retention = None, Retention.RECENT_PRIVATE

    # -- pauses ----------------------------------------------------------------------------------------------------

    def pause(self, index: int, snapshot: bool) -> tuple[PreparedRequest, bool]:
        """Take a row off its lane: what to admit in its place, and whether it can go on from where it stood. Requires
        that no transaction is open."""
        lane = self._lanes[index]
        if self._open is not None or lane.state is not LaneState.ACTIVE or lane.sequence is None:
            raise InvariantError(f"lane {index} cannot be paused")
        result = self._program.pause(lane.sequence, snapshot=snapshot)
        self._lanes[index] = Lane()
        self.lane_version += 1
        self._paused.add(result.request.id)
        if result.retained is not None:
            owner, ticket = result.retained.owner, result.request.ticket
            entry = Entry(owner, Retention.SHARED_STABLE, ticket, self.catalogue.clock, hold=result.request.id)
            self.catalogue.add(entry, result.retained)
        return result.request, result.point

    @property
    def holds(self) -> bool:
        """Whether ``drop_holds`` has something to release."""
        return bool(self._ended_paused)

    def drop_holds(self) -> None:
        """Release what paused requests left that have ended since. Requires that no transaction is open."""
        for request in tuple(self._ended_paused):
            self._release_hold(request)
        self._ended_paused.clear()

    def _release_hold(self, request: int) -> None:
        self._paused.discard(request)
        entry = self.catalogue.hold_of(request)
        if entry is not None:
            self._program.release_inactive(entry.owner)
            self._forget(entry.owner, None)

    # -- all of it -------------------------------------------------------------------------------------------------

    def release_all(self) -> int:
        """Delete everything that is retained; returns how many entries. Requires that no transaction is open."""
        if self._open is not None:
            raise InvariantError("a resource transaction is open")
        owners = [entry.owner for entry in self.catalogue if entry.hold is None]
        for owner in owners:
            self._program.release_inactive(owner)
            self._forget(owner, "cleared")
        self._demand.clear()
        return len(owners)

    def clear(self) -> None:
        """Forget all lanes, all entries and the open transaction; Program has been cleaned up."""
        self._lanes = [Lane() for _ in self._lanes]
        self._open = None
        self.catalogue.clear()
        self.sessions.clear()
        self._paused.clear()
        self._ended_paused.clear()

    # -- adoption --------------------------------------------------------------------------------------------------

    def _check(self, planned: Planned, result: ResourceResult, *, committed: bool) -> None:
        """Validate a result completely before anything is adopted."""
        source = planned.source.ref if planned.source is not None else None
        gone = {source.owner} if source is not None and result.source == "consumed" else set()
        answers = (
            result.transaction == planned.ticket.transaction
            and result.kind is planned.plan.kind
            and result.committed is committed
            and (planned.request is None or self._lanes[planned.row].state is LaneState.MATERIALIZING)
            and (result.sequence is not None) == (committed and planned.request is not None)
            and {outcome.owner for outcome in result.owners} == set(planned.ticket.claimed) - gone
        )
        if not answers:
            raise InvariantError(f"resource result {result} does not answer {planned.ticket}")
        for outcome in result.owners:
            before = self.catalogue.get(outcome.owner).checkpoints.keys()
            least = before - planned.ticket.claimed[outcome.owner]
            right = outcome.surviving == least if committed else least <= outcome.surviving <= before
            if not right or outcome.evicted != (not outcome.surviving):
                raise InvariantError(f"{outcome} does not follow from the plan's claims")
        consumed = result.source == "consumed"
        if consumed and (planned.source is None or not planned.source.consume or not committed):
            raise InvariantError("a source was consumed that was not given away")

    def _adopt_sequence(self, planned: Planned, result: ResourceResult) -> Adoption:
        index, request, source, sequence = planned.row, planned.request, planned.source, result.sequence
        assert request is not None
        assert source is not None
        assert sequence is not None
        self._adopt_owners(planned, result)
        lane = self._lanes[index]
        lane.state, lane.sequence, lane.reused = LaneState.ACTIVE, sequence, result.reused_tokens
        self.catalogue.clock += 1
        moved, resuming = result.source == "consumed", request.id in self._paused
        if source.ref is not None:
            entry = self.catalogue.get(source.ref.owner)
            if not resuming:
                self.reuse.hit(entry.checkpoints[source.ref.checkpoint].kind, result.reused_tokens)
                self.catalogue.hit(source.ref)
            if moved:
                lane.private = {
                    q: (c.key.frontier, c.kind)
                    for q, c in entry.checkpoints.items()
                    if c.key.frontier < result.reused_tokens
                }
                self._forget(entry.owner, None)
        elif not resuming:
            self.reuse.misses[self._why_missed(request, planned)] += 1
        self.reuse.planned(planned.diagnostics)
        self._closed()
        captures: tuple[PlannedCapture, ...] = ()
        if resuming:
            self._release_hold(request.id)
        elif lane.publishes:
            room = self._shared_places() > 0 and self._spare_states > 1  # one is for what the request itself leaves
            captures = plan_captures(
                request, lane.reused, self.catalogue.index, self._demand, self._settings, room=room, moved=moved
            )
        return Adoption(request.id, index, sequence, result.reused_tokens, captures)

    def _adopt_capture(self, planned: Planned, result: ResourceResult) -> Captured:
        index, offer = planned.row, planned.offer
        assert offer is not None
        self._adopt_owners(planned, result)
        lane = self._lanes[index]
        if result.captured is not None and offer.private is not None:
            for replaced in offer.replace:
                lane.private.pop(replaced, None)
            lane.private[result.captured] = (offer.frontier, offer.private)
            self.reuse.captures[offer.private.value] += 1
        if result.published is not None:
            request = lane.request
            assert request is not None
            entry = Entry(result.published.owner, Retention.SHARED_STABLE, request.ticket, self.catalogue.clock)
            self.catalogue.add(entry, result.published)
            self.reuse.captures[CheckpointKind.SHARED_STABLE_PREFIX.value] += 1
        self._closed()
        return Captured(index)

    def _adopt_owners(self, planned: Planned, result: ResourceResult) -> None:
        for outcome in result.owners:
            if outcome.summary is None:
                self._forget(outcome.owner, result.kind.value)
            else:
                self.catalogue.refresh(self.catalogue.get(outcome.owner), outcome.summary)
                self.reuse.degraded += 1
        self.reuse.copied(result.transfers)

    def _forget(self, owner: Handle, why: str | None) -> None:
        entry = self.catalogue.remove(owner)
        if entry.session is not None:
            self.sessions.forget_owner(entry.session, owner)
        if why is not None:
            self.reuse.evictions[why] += 1

    def _why_missed(self, request: PreparedRequest, planned: Planned) -> str:
        if request.participation == "disabled":
            return "disabled"
        if planned.diagnostics.offered_reuse:
            return "pressure"
        return "mismatch" if planned.listed else "new"

    # -- places ----------------------------------------------------------------------------------------------------

    def _private_places(self) -> int:
        """Entries that can still be promised to a row; every row that publishes holds one."""
        held = sum(lane.publishes for lane in self._lanes)
        return self._settings.continuations - self.catalogue.count(PRIVATE) - held

    def _shared_places(self) -> int:
        return self._settings.shared_prefixes - self.catalogue.count(SHARED)

    def _require_open(self) -> Planned:
        if self._open is None:
            raise InvariantError("no resource transaction is open")
        return self._open

    def _closed(self) -> None:
        self._open = None
        self.transaction_version += 1

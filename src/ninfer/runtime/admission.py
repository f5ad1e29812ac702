"""How requests get their lanes, and rows their checkpoints: planning, and the one open resource transaction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from ninfer.context import Shortage
from ninfer.contract import ProgramPort, SequenceHandle
from ninfer.errors import InvalidRequest, InvariantError, RequestAborted
from ninfer.results import GenerationStart
from ninfer.runtime.adoption import Adoption, Outcome
from ninfer.runtime.choices import Planned
from ninfer.runtime.metrics import Metrics
from ninfer.runtime.outbox import Outbox
from ninfer.runtime.purity import PlanningFault, Purity
from ninfer.runtime.record import Ending, RequestRecord, RequestState
from ninfer.runtime.requests import Requests, stop_reason
from ninfer.runtime.resources import ResourceManager
from ninfer.runtime.scheduler import AdmissionEpoch, Attempt, Scheduler

T = TypeVar("T")


class Admission:
    """Takes requests from the queue into lanes. ``relieve`` may make room for a blocked head by pausing others, and
    says whether it did."""

    def __init__(
        self,
        program: ProgramPort,
        resources: ResourceManager,
        scheduler: Scheduler,
        requests: Requests,
        outbox: Outbox,
        metrics: Metrics,
        purity: Purity,
        relieve: Callable[[RequestRecord], bool],
    ) -> None:
        self._relieve = relieve
        self._program = program
        self._resources = resources
        self._scheduler = scheduler
        self._requests = requests
        self._outbox = outbox
        self._metrics = metrics
        self._waiting_for: RequestRecord | None = None
        """The request, materializing or standing still for a checkpoint, that the open transaction is about."""
        self._purity = purity

    # -- the queue -------------------------------------------------------------------------------------------------

    def accept(self, record: RequestRecord) -> None:
        """Queue a new request, or end it when it could not run even alone."""
        self._requests.adopt(record)
        try:
            lacking = self._pure(record, lambda: self._program.isolated_root_fits(record.request))
        except PlanningFault:
            return
        if lacking is None:
            self._scheduler.enqueue(record.id)
        else:
            short = ", ".join(f"{s.missing} {s.axis}" for s in lacking.shortages)
            error = InvalidRequest(f"too large for the engine even alone: it lacks {short}", field="max_tokens")
            self._requests.complete(record, Ending.failed(error))

    def end_waiting(self, now: float) -> None:
        """End waiting requests that have been cancelled or whose time is up."""
        for number in tuple(self._scheduler.waiting):
            ending = stop_reason(self._requests[number], now)
            if ending is not None:
                self._scheduler.withdraw(number)
                self._requests.complete(self._requests[number], ending)

    # -- one attempt -----------------------------------------------------------------------------------------------

    def attempt(self, now: float) -> None:
        """Let the one request that may try start. Requires that no transaction is open."""
        epoch = AdmissionEpoch(
            queue=self._scheduler.queue_version,
            lanes=self._resources.lane_version,
            prefill=self._scheduler.prefill_version,
            transactions=self._resources.transaction_version,
            revision=self._program.resource_revision,
        )
        attempt = self._scheduler.next_attempt(epoch, self._requests.active)
        if attempt is None:
            return
        record = self._requests[attempt.request]
        try:
            lacking = self._try_start(record, attempt, now)
            if lacking is not None and not self._requests.active:
                raise InvariantError(f"an idle engine has no room for a request that fits it: {lacking}")
            if lacking is not None:
                self._scheduler.on_refused(record.id)
                if attempt.past is None and not self._relieve(record):
                    self._protect(record)
        except PlanningFault:
            self._scheduler.withdraw(record.id)

    def _try_start(self, record: RequestRecord, attempt: Attempt, now: float) -> tuple[Shortage, ...] | None:
        """Plan and start; else what it lacks, if that has a name. It may also break the promise to the protected
        head."""
        lane = self._resources.free_lane()
        if lane is None:
            return (Shortage("lanes", 1),)
        if attempt.past is not None:
            head, donors = self._requests[attempt.past.request], attempt.past.donors
            rows = self._sequences(donors)
            if not self._pure(record, lambda: self._resources.prove_backfill(head.entering, rows, record.entering)):
                return ()
        for _ in range(2):  # a plan that goes stale before it starts is made again, once
            planned = self._pure(record, lambda: self._resources.plan(record.entering, lane))
            if not isinstance(planned, Planned):
                return planned
            outcome = self._resources.start(planned)
            if outcome != "refused":
                self._scheduler.on_started(record.id)
                record.state = RequestState.MATERIALIZING
                self._waiting_for = record
                self._follow(outcome, now)
                return None
        return ()

    def _protect(self, head: RequestRecord) -> None:
        """Of the active rows, taken by the work they have left, the fewest whose end lets the head start."""
        protected = self._scheduler.protected
        if self._resources.free_lane() is None or (protected is not None and protected.request == head.id):
            return
        rows = sorted(self._requests.active, key=lambda row: (self._work_left(row), row.request.ticket))
        for count in range(1, len(rows) + 1):
            donors = [row.id for row in rows[:count]]
            sequences = self._sequences(set(donors))
            if self._pure(head, lambda: self._resources.prove_backfill(head.entering, sequences, None)):  # noqa: B023
                self._scheduler.protect(head.id, donors)
                return

    def _work_left(self, row: RequestRecord) -> int:
        assert row.sequence is not None
        return self._program.prefill_remaining(row.sequence) + row.left

    def _sequences(self, requests: set[int]) -> list[SequenceHandle]:
        return [row.sequence for row in self._requests.active if row.id in requests and row.sequence is not None]

    # -- the open transaction --------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Poll the open transaction; abort it when its request is to stop or a copy has failed."""
        record = self._waiting_for
        assert record is not None
        materializing = record.state is RequestState.MATERIALIZING
        ending = stop_reason(record, now) if materializing else None
        if ending is None:
            outcome = self._resources.progress()
            if outcome != "failed":
                self._follow(outcome or "started", now)
                return
            ending = Ending.failed(RequestAborted("copying what the request was to start from has failed"))
        self._resources.abort()
        self._waiting_for = None
        if materializing:
            self._requests.complete(record, ending)
        elif record.state is RequestState.CAPTURE:
            record.state = RequestState.PREFILL

    def _follow(self, outcome: Outcome | str, now: float) -> None:
        """What a started or advanced transaction has led to."""
        if isinstance(outcome, str):
            return
        record, self._waiting_for = self._waiting_for, None
        assert record is not None
        if isinstance(outcome, Adoption):
            self._activate(record, outcome, now)
        elif record.state is RequestState.CAPTURE:
            record.state = RequestState.PREFILL

    def _activate(self, record: RequestRecord, adoption: Adoption, now: float) -> None:
        self._purity.carried_out()
        record.state, record.progressed = RequestState.PREFILL, False
        record.lane, record.sequence, record.captures = adoption.lane, adoption.sequence, adoption.captures
        self._requests.activate(record)
        if record.resumed is not None:
            if record.resumed.resume is not None and not self._program.prefill_remaining(adoption.sequence):
                record.state = record.ready
            return
        record.cached_tokens, record.admitted, record.queue_deadline = adoption.reused_tokens, now, math.inf
        prompt = len(record.request.identity.tokens)
        self._metrics.prompt_tokens += prompt
        self._metrics.cached_tokens += adoption.reused_tokens
        self._metrics.observe(self._program, self._resources)
        start = GenerationStart(prompt, adoption.reused_tokens)
        self._outbox.publish(record.response, lambda: (start,))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def capture(self, row: RequestRecord, position: int, now: float) -> bool:
        """Make the checkpoint that the row owes at its position. True: the row must not run until it is made, or has
        just ended because planning it failed. A checkpoint that cannot be had is passed over."""
        (capture, *rest) = row.captures
        row.captures = tuple(rest)
        if self._resources.open:
            planned: Planned | str = "transaction"
        else:
            try:
                planned = self._pure(row, lambda: self._resources.plan_capture(row.lane, capture), now)
            except PlanningFault:
                return True
        outcome = self._resources.start(planned) if isinstance(planned, Planned) else planned
        if outcome == "started":
            row.state = RequestState.CAPTURE
            self._waiting_for = row
        elif isinstance(outcome, str):
            self._resources.reuse.skips[outcome] += 1
        return outcome == "started"

    # -- purity ----------------------------------------------------------------------------------------------------

    def _pure(self, record: RequestRecord, question: Callable[[], T], now: float | None = None) -> T:
        """Ask something that must change nothing. A PlanningFault ends this request alone, and comes out.

        ``now``: the request is an active row.
        """
        try:
            return self._purity.ask(question)
        except PlanningFault as fault:
            ending = Ending.failed(fault.error)
            if now is not None:
                self._requests.end(record, ending, now)
            else:
                self._requests.complete(record, ending)
            raise

    def drop(self) -> None:
        """Forget the queue and the open transaction; Program has been cleaned up."""
        self._scheduler.waiting.clear()
        self._scheduler.protected = None
        self._waiting_for = None

"""What happens at a worker boundary: requests move through their states, at most one model unit runs.

A unit is launched, then what earlier units committed is published while it runs, then it is waited for and committed.
Single-threaded and without a lock or a thread of its own; ``core`` decides which thread calls it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeVar

from ninfer.constraints.masks import batch_masks
from ninfer.context import ResourcePlan, TransactionStatus
from ninfer.contract import PendingBatch, ProgramPort, SequenceHandle
from ninfer.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    InvariantError,
    NinferError,
    QueueTimeout,
    RequestAborted,
)
from ninfer.results import Event, GenerationResult, GenerationStart
from ninfer.runtime.metrics import Metrics
from ninfer.runtime.outbox import Outbox
from ninfer.runtime.output import check_membership, commit_row, discard_row, licence, preview_row
from ninfer.runtime.record import CANCELLED, Ending, RequestRecord, RequestState
from ninfer.runtime.resources import AdmissionVerdict, Adoption, ResourceManager
from ninfer.runtime.scheduler import AdmissionEpoch, Scheduler

log = logging.getLogger("ninfer")
T = TypeVar("T")

_MAX_PLANNING_FAULTS = 3
_COPY_POLL_SECONDS = 0.001
_LONGEST_SLEEP_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the worker is told at start. prefill_chunk: tokens of a unit. drafts: most a round may verify of a row.
    overlap: the device works beside the host, so publication waits for the next launch."""

    lanes: int
    prefill_chunk: int
    concurrent_prefill: bool = False
    drafts: int = 0
    overlap: bool = False


class Worker:
    """Owner of request records and their order of events. ``clock`` reads seconds."""

    def __init__(self, program: ProgramPort, limits: Limits, clock: Callable[[], float]) -> None:
        self.metrics = Metrics(memory=program.stats())
        self.scheduler = Scheduler(limits.concurrent_prefill)
        self.resources = ResourceManager(program, limits.lanes)
        self.active: list[RequestRecord] = []
        """Rows that hold a lane and are no longer materializing, by lane."""
        self._program = program
        self._limits = limits
        self._clock = clock
        self._outbox = Outbox(limits.overlap)
        self._records: dict[int, RequestRecord] = {}
        self._materializing: RequestRecord | None = None
        self._pending: PendingBatch | None = None
        self._planning_faults = 0

    def adopt(self, record: RequestRecord) -> None:
        """Become responsible for a request's end."""
        self._records[record.id] = record
        self.metrics.accepted += 1

    def accept(self, record: RequestRecord) -> None:
        """Queue a new request, or end it when it could not run even alone."""
        self.adopt(record)
        planned, lacking = self._planning(record, lambda: self._program.isolated_root_fits(record.request))
        if lacking is not None:
            short = ", ".join(f"{s.missing} {s.axis}" for s in lacking.shortages)
            error = InvalidRequest(f"too large for the engine even alone: it lacks {short}", field="max_tokens")
            self._complete(record, Ending.failed(error))
        elif planned:
            self.scheduler.enqueue(record.id)

    def boundary(self) -> bool:
        """One boundary. True when the next one has work right away. Any exception means the engine has failed."""
        begin = time.perf_counter_ns()
        now = self._clock()
        self._end_waiting(now)
        if self.resources.open:
            self._advance_transaction(now)
        self._settle_terminal(now)
        self._stop_active(now)
        if self.scheduler.waiting and not self.resources.open:
            self._admit(now)
        unit = self.scheduler.choose(self.active)
        if unit is None:
            self._outbox.deliver()
            return bool(self.scheduler.waiting) and not self.resources.open
        rows = [row for row in self.active if row.lane in unit.lanes]
        if unit.kind == "decode":
            self._decode(rows)
            self.metrics.decode_ns += time.perf_counter_ns() - begin
        elif unit.kind == "prefill":
            self._prefill(rows[0])
        else:
            self._control(rows[0])
        return True

    def seconds_to_next(self) -> float | None:
        """How long the worker may sleep unless it is woken; None: for ever."""
        if self.resources.open:
            return _COPY_POLL_SECONDS
        earliest = min((min(r.deadline, r.queue_deadline) for r in self._records.values()), default=math.inf)
        return min(max(0.0, earliest - self._clock()), _LONGEST_SLEEP_SECONDS) if earliest < math.inf else None

    def end_everything(self, error: Callable[[], NinferError]) -> None:
        """Abort what is open, release what is active, forget the lanes, complete every response; in this order.

        ``error`` makes the error each request ends with. Raises nothing: a step that fails is logged and passed over.
        """
        _attempt(self._abort_transaction)
        if self._pending is not None and not self._pending.spent:
            _attempt(partial(self._program.abort_pending, self._pending))
        for row in self.active:
            _attempt(partial(discard_row, row))
            _attempt(partial(self._program.discard, _sequence(row)))
        self.resources.clear()
        self.active.clear()
        self.scheduler.waiting.clear()
        self._pending = self._materializing = None
        for record in tuple(self._records.values()):
            failure = error()
            try:
                self._complete(record, Ending.failed(failure))
            except Exception as broken:
                log.error("forming a result failed", exc_info=broken)
                self._records.pop(record.id, None)
                self._outbox.complete(record.response, (), GenerationResult(finish_reason="error", error=failure))
        _attempt(self._outbox.deliver)

    def _abort_transaction(self) -> None:
        if self._program.poll() is not TransactionStatus.IDLE:
            self._program.abort_transaction()

    # -- waiting requests ------------------------------------------------------------------------------------------

    def _end_waiting(self, now: float) -> None:
        for number in tuple(self.scheduler.waiting):
            record = self._records[number]
            ending = _stop_reason(record, now)
            if ending is not None:
                self.scheduler.withdraw(number)
                self._complete(record, ending)

    # -- resource transactions -------------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        epoch = AdmissionEpoch(
            queue=self.scheduler.queue_version,
            lanes=self.resources.lane_version,
            prefill=self.scheduler.prefill_version,
            transactions=self.resources.transaction_version,
            revision=self._program.resource_revision,
        )
        head = self.scheduler.next_attempt(epoch, self.active)
        if head is None:
            return
        record = self._records[head]
        verdict = self._try_start(record)
        if verdict is None:
            self.scheduler.withdraw(head)
        elif verdict.kind == "blocked":
            if not self.active:
                raise InvariantError(f"an idle engine has no room for a request that fits it: {verdict.shortages}")
            self.scheduler.on_refused(head, epoch)
        else:
            self.scheduler.on_started(head)
            record.state = RequestState.MATERIALIZING
            self._materializing = record
            if verdict.adoption is not None:
                self._activate(verdict.adoption, now)

    def _try_start(self, record: RequestRecord) -> AdmissionVerdict | None:
        """Plan and start the head. None: planning failed and the request has ended with it."""
        lane = self.resources.free_lane()
        if lane is None:
            return AdmissionVerdict("blocked")
        verdict = AdmissionVerdict("blocked")
        for _ in range(2):  # a plan that goes stale before it starts is made again, once
            planned, plan = self._planning(record, lambda: self.resources.plan(record.request, lane))
            if not planned:
                return None
            if not isinstance(plan, ResourcePlan):
                return AdmissionVerdict("blocked", shortages=plan or ())
            verdict = self.resources.start(plan)
            if verdict.kind != "blocked":
                break
        return verdict

    def _planning(self, record: RequestRecord, plan: Callable[[], T]) -> tuple[bool, T | None]:
        """Run a pure planning call. A fault that changed nothing ends this request alone; repeated, it is fatal."""
        revision = self._program.resource_revision
        try:
            value = plan()
        except InvalidRequest as refusal:
            self._complete(record, Ending.failed(refusal))
            return False, None
        except Exception as error:
            self._planning_faults += 1
            changed = self._program.resource_revision != revision
            if changed or isinstance(error, EngineFailed) or self._planning_faults >= _MAX_PLANNING_FAULTS:
                raise
            log.error("planning a request failed", exc_info=error)
            self._complete(record, Ending.failed(RequestAborted(f"planning failed: {error!r}", cause=error)))
            return False, None
        return True, value

    def _advance_transaction(self, now: float) -> None:
        record = self._materializing
        assert record is not None
        ending = _stop_reason(record, now)
        if ending is not None:
            self.resources.abort()
            self._materializing = None
            self._complete(record, ending)
            return
        adoption = self.resources.progress()
        if adoption is not None:
            self._activate(adoption, now)

    def _activate(self, adoption: Adoption, now: float) -> None:
        record = self._records[adoption.request]
        self._materializing = None
        self._planning_faults = 0
        record.state = RequestState.PREFILL
        record.lane, record.sequence = adoption.lane, adoption.sequence
        record.cached_tokens, record.admitted = adoption.reused_tokens, now
        self.active.append(record)
        self.active.sort(key=attrgetter("lane"))
        prompt = len(record.request.identity.tokens)
        self.metrics.prompt_tokens += prompt
        self.metrics.cached_tokens += adoption.reused_tokens
        self.metrics.memory = self._program.stats()
        self._outbox.publish(record.response, (GenerationStart(prompt, adoption.reused_tokens),))

    # -- model units -----------------------------------------------------------------------------------------------

    def _prefill(self, row: RequestRecord) -> None:
        """One chunk; after the last one the row's first token, or the forced tokens that must precede it."""
        sequence = _sequence(row)
        self.metrics.prefill_units += 1
        if self._program.prefill_remaining(sequence):
            self._program.prefill(sequence, self._limits.prefill_chunk)
            self._outbox.deliver()
        done = self._program.prefill_remaining(sequence) == 0
        self.scheduler.on_prefill_unit(done)
        if done and row.session.control:
            self._go_on(row)
        elif done:
            self._finish_batch(self._program.finalize_prefill((sequence,), batch_masks((row.session.matcher,))), (row,))

    def _control(self, row: RequestRecord) -> None:
        self.metrics.control_units += 1
        self._finish_batch(self._program.control(_sequence(row), row.session.control), (row,))

    def _decode(self, rows: Sequence[RequestRecord]) -> None:
        self.metrics.decode_rounds += 1
        self.metrics.decode_rows += len(rows)
        sequences = [_sequence(row) for row in rows]
        licences = [licence(row, self._limits.drafts) for row in rows]
        masks = batch_masks([row.session.matcher for row in rows])
        self._finish_batch(self._program.decode(sequences, licences, masks), rows)

    def _finish_batch(self, batch: PendingBatch, rows: Sequence[RequestRecord]) -> None:
        """Consume the batch whole: preview every row, commit once, then make the outcome visible row by row."""
        self._pending = batch
        check_membership(batch, rows)
        self._outbox.deliver()
        self._program.wait(batch)
        control = batch.kind == "control"
        try:
            decisions = [preview_row(row, out, control=control) for row, out in zip(rows, batch.rows, strict=True)]
        except EngineFailed:
            raise
        except Exception as error:
            self._abort_batch(batch, rows, error)
            return
        self._program.commit(batch, decisions)
        self._pending = None
        now = self._clock()
        for row in rows:
            if row.ending is not None:
                self._end(row, row.ending, now)
                continue
            try:
                events = self._commit_output(row, now)
            except Exception as error:
                self._end(row, _aborted(error), now)
                continue
            self._outbox.publish(row.response, events)
            self._go_on(row)

    def _abort_batch(self, batch: PendingBatch, rows: Sequence[RequestRecord], error: Exception) -> None:
        log.error("a batch was aborted", exc_info=error)
        for row in rows:
            discard_row(row)
        self._program.abort_pending(batch)
        self._pending = None
        now = self._clock()
        for row in rows:
            self._end(row, _aborted(error), now)

    def _commit_output(self, row: RequestRecord, now: float) -> Sequence[Event]:
        self.metrics.completion_tokens += row.accepted
        return commit_row(row, now)

    def _go_on(self, row: RequestRecord) -> None:
        """Give a row with no unit in flight the state its session asks for."""
        row.state = RequestState.CONTROL_READY if row.session.control else RequestState.DECODE_READY

    # -- ends ------------------------------------------------------------------------------------------------------

    def _stop_active(self, now: float) -> None:
        for row in tuple(self.active):
            ending = _stop_reason(row, now)
            if ending is not None and row.ending is None:
                self._end(row, ending, now)

    def _end(self, row: RequestRecord, ending: Ending, now: float) -> None:
        """The row has run its last unit. It settles at once, unless a resource transaction is open.

        A row whose last output was committed has ended in Program's eyes too; any other is taken from it.
        """
        row.ending = ending
        row.state = RequestState.TERMINAL_PENDING
        self.resources.mark_terminal(row.lane, retain=row.previewed)
        if not self.resources.open:
            self._settle(row, now)

    def _settle_terminal(self, now: float) -> None:
        if not self.resources.open:
            for row in tuple(self.active):
                if row.state is RequestState.TERMINAL_PENDING:
                    self._settle(row, now)

    def _settle(self, row: RequestRecord, now: float) -> None:
        """Release the row's resources, then commit and publish the last of its output."""
        ending = row.ending
        assert ending is not None
        self.resources.settle_terminal(row.lane)
        self.active.remove(row)
        self.metrics.memory = self._program.stats()
        events: list[Event] = []
        try:
            if row.previewed:
                events += self._commit_output(row, now)
            events += row.session.finish(ending.finish)
        except Exception as error:
            ending = _aborted(error)
        self._complete(row, ending, events)

    def _complete(self, record: RequestRecord, ending: Ending, events: Sequence[Event] = ()) -> None:
        """The one place where a request reaches its terminal state."""
        record.ending = ending
        result = record.result()
        record.state = RequestState.FINISHED
        del self._records[record.id]
        self.metrics.settle(result)
        self._outbox.complete(record.response, events, result)


def _stop_reason(record: RequestRecord, now: float) -> Ending | None:
    """Why a request must stop now, if it must. One that has left the queue is past the queue timeout."""
    if record.response.cancel_requested:
        return CANCELLED
    if now >= record.deadline:
        return Ending.failed(DeadlineExceeded("the request's timeout has passed"))
    if record.state is RequestState.WAITING and now >= record.queue_deadline:
        return Ending.failed(QueueTimeout("no lane became free within queue_timeout"))
    return None


def _aborted(error: Exception) -> Ending:
    return Ending.failed(RequestAborted(f"the output could not be formed: {error!r}", cause=error))


def _attempt(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException as error:
        log.error("a cleanup step failed", exc_info=error)


def _sequence(row: RequestRecord) -> SequenceHandle:
    assert row.sequence is not None
    return row.sequence

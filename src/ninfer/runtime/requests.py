"""The requests that the worker is responsible for, and the one end each of them has."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from ninfer.contract import ProgramPort
from ninfer.errors import DeadlineExceeded, NinferError, QueueTimeout, RequestAborted
from ninfer.results import GenerationResult
from ninfer.runtime.lanes import Keep
from ninfer.runtime.metrics import Metrics
from ninfer.runtime.outbox import Outbox
from ninfer.runtime.output import commit_row
from ninfer.runtime.record import CANCELLED, Ending, RequestRecord, RequestState
from ninfer.runtime.resources import ResourceManager

log = logging.getLogger("ninfer")


class Requests:
    """Records by id. ``active``: rows that hold a lane and are no longer materializing, by lane. ``on_end`` is told of
    every active row whose lane is free again."""

    def __init__(
        self,
        program: ProgramPort,
        resources: ResourceManager,
        outbox: Outbox,
        metrics: Metrics,
        on_end: Callable[[int], None],
    ) -> None:
        self.active: list[RequestRecord] = []
        self._program = program
        self._resources = resources
        self._outbox = outbox
        self._metrics = metrics
        self._on_end = on_end
        self._records: dict[int, RequestRecord] = {}

    def __getitem__(self, request: int) -> RequestRecord:
        return self._records[request]

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(tuple(self._records.values()))

    def adopt(self, record: RequestRecord) -> None:
        """Become responsible for a request's end."""
        self._records[record.id] = record
        self._resources.enter(record.request)
        self._metrics.accepted += 1

    def activate(self, record: RequestRecord) -> None:
        """The request has its lane."""
        self.active.append(record)
        self.active.sort(key=attrgetter("lane"))

    def suspend(self, row: RequestRecord) -> None:
        """The row has lost its lane and is to get one again."""
        self.active.remove(row)
        row.state, row.lane, row.sequence, row.captures = RequestState.PAUSED, -1, None, ()
        self._on_end(row.id)
        self._metrics.observe(self._program, self._resources)

    def next_deadline(self) -> float:
        """When the first of them must have moved on, by the worker's clock; infinity when none must."""
        return min((min(r.deadline, r.queue_deadline) for r in self._records.values()), default=math.inf)

    def stop_active(self, now: float) -> None:
        """End the rows that have been cancelled or whose time is up."""
        for row in tuple(self.active):
            if row.response.cancel_requested or now >= row.deadline:
                ending = stop_reason(row, now)
                if ending is not None and row.ending is None:
                    self.end(row, ending, now)

    def end(self, row: RequestRecord, ending: Ending, now: float) -> None:
        """The row has run its last unit. It settles at once, unless a resource transaction is open.

        A row whose last output was committed has ended in Program's eyes too and leaves a place to go on from; any
        other leaves the checkpoints it made on its way.
        """
        row.ending = ending
        row.state = RequestState.TERMINAL_PENDING
        self._resources.mark_terminal(row.lane, Keep.ENDPOINT if row.previewed else Keep.CHECKPOINTS)
        if not self._resources.open:
            self._settle(row, now)

    def settle_terminal(self, now: float) -> None:
        """Settle the rows that had to wait for a resource transaction."""
        if not self._resources.open:
            for row in tuple(self.active):
                if row.state is RequestState.TERMINAL_PENDING:
                    self._settle(row, now)

    def _settle(self, row: RequestRecord, now: float) -> None:
        """Keep or release the row's resources, then commit and publish the last of its output."""
        ending = row.ending
        assert ending is not None
        self._resources.settle_terminal(row.lane)
        self.active.remove(row)
        self._on_end(row.id)
        self._metrics.observe(self._program, self._resources)
        try:
            if row.previewed:
                self.commit_output(row, now)
            row.session.finish(ending.finish)
        except Exception as error:
            ending = aborted(error)
        self.complete(row, ending)

    def commit_output(self, row: RequestRecord, now: float) -> None:
        """Commit the session's preview."""
        self._metrics.completion_tokens += row.accepted
        commit_row(row, now)

    def complete(self, record: RequestRecord, ending: Ending) -> None:
        """The one place where a request reaches its terminal state."""
        record.ending = ending
        result = record.result()
        record.state = RequestState.FINISHED
        self._forget(record)
        self._metrics.settle(result)
        self._outbox.complete(record.response, record.session.tell, result)

    def complete_all(self, error: Callable[[], NinferError]) -> None:
        """End every request with an error of its own. Raises nothing."""
        self.active.clear()
        for record in self:
            failure = error()
            try:
                self.complete(record, Ending.failed(failure))
            except Exception as broken:
                log.error("forming a result failed", exc_info=broken)
                self._records.pop(record.id, None)
                result = GenerationResult(finish_reason="error", error=failure)
                self._outbox.complete(record.response, tuple, result)

    def _forget(self, record: RequestRecord) -> None:
        del self._records[record.id]
        self._resources.leave(record.request)


def stop_reason(record: RequestRecord, now: float) -> Ending | None:
    """Why a request must stop now, if it must. One that has left the queue is past the queue timeout."""
    if record.response.cancel_requested:
        return CANCELLED
    if now >= record.deadline:
        return Ending.failed(DeadlineExceeded("the request's timeout has passed"))
    if record.state is RequestState.WAITING and now >= record.queue_deadline:
        return Ending.failed(QueueTimeout("no lane became free within queue_timeout"))
    return None


def aborted(error: Exception) -> Ending:
    """The end of a request that a fault on the host has spoiled."""
    return Ending.failed(RequestAborted(f"the output could not be formed: {error!r}", cause=error))

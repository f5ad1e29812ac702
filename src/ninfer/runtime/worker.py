"""What happens at a worker boundary: requests move through their states, at most one model unit runs.

Single-threaded and without a lock or a thread of its own; ``core`` decides which thread calls it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from ninfer.context import TransactionStatus
from ninfer.contract import Handle, ProgramPort
from ninfer.errors import NinferError
from ninfer.runtime.admission import Admission
from ninfer.runtime.costs import CostModel
from ninfer.runtime.demotion import Demotion
from ninfer.runtime.metrics import Metrics
from ninfer.runtime.outbox import Outbox
from ninfer.runtime.output import discard_row
from ninfer.runtime.pausing import Pausing
from ninfer.runtime.purity import Purity
from ninfer.runtime.record import RequestRecord
from ninfer.runtime.requests import Requests
from ninfer.runtime.resources import ResourceManager
from ninfer.runtime.scheduler import Scheduler
from ninfer.runtime.settings import CacheSettings
from ninfer.runtime.units import Limits, Units, sequence_of

log = logging.getLogger("ninfer")

_COPY_POLL_SECONDS = 0.001
_LONGEST_SLEEP_SECONDS = 3600.0


class Worker:
    """Owner of everything that moves. ``clock`` reads seconds; ``costs`` prices work for the planner. ``quiet``: nobody
    outside has anything for the next boundary."""

    def __init__(
        self,
        program: ProgramPort,
        limits: Limits,
        cache: CacheSettings,
        costs: CostModel,
        clock: Callable[[], float],
        quiet: Callable[[], bool],
    ) -> None:
        self.metrics = Metrics(memory=program.stats())
        self.scheduler = Scheduler(limits.concurrent_prefill)
        self.resources = ResourceManager(program, limits.lanes, cache, costs)
        self._program = program
        self._clock = clock
        self._quiet = quiet
        self._outbox = Outbox(limits.overlap)
        parts = (program, self.resources)
        self.requests = Requests(*parts, self._outbox, self.metrics, self.scheduler.on_ended)
        purity = Purity(program)
        self.demotion = Demotion(*parts, purity)
        self.pausing = Pausing(self.requests, self.resources, self.scheduler, limits.pressure)
        self.admission = Admission(
            *parts, self.scheduler, self.requests, self._outbox, self.metrics, purity, self.pausing.relieve
        )
        self._units = Units(
            program, limits, self.requests, self.scheduler, self._outbox, self.metrics, clock, self._capture, self._calm
        )

    @property
    def active(self) -> list[RequestRecord]:
        """Rows that hold a lane and are no longer materializing, by lane."""
        return self.requests.active

    @property
    def launched(self) -> bool:
        """Whether the next boundary only ends a round that runs already. It was launched because there was nothing else
        to do; what has come up since waits for it, as for any round."""
        return self._units.launched

    def boundary(self) -> bool:
        """One boundary. True when the next one has work right away. Any exception means the engine has failed."""
        begin = time.perf_counter_ns()
        if self.launched:
            self._units.decode()
            self.metrics.decode_ns += time.perf_counter_ns() - begin
            return True
        now = self._clock()
        self.admission.end_waiting(now)
        if self.demotion.open:
            self.demotion.advance()
        elif self.resources.open:
            self.admission.advance(now)
        self.requests.settle_terminal(now)
        self.requests.stop_active(now)
        self.pausing.end_stopped(now)
        if not self.resources.open:
            self.resources.drop_holds()
        if self.scheduler.waiting and not self.resources.open:
            self.admission.attempt(now)
        if self.demotion.waiting and not self.resources.open:
            self.demotion.attempt()
        unit = self.scheduler.choose(self.active)
        if unit is None:
            self._outbox.deliver()
            return bool(self.scheduler.waiting or self.demotion.waiting) and not self.resources.open
        rows = [row for row in self.active if row.lane in unit.lanes]
        if unit.kind == "decode":
            self._units.decode(rows)
            self.metrics.decode_ns += time.perf_counter_ns() - begin
        elif unit.kind == "prefill":
            self._units.prefill(rows[0])
        else:
            self._units.control(rows[0])
        return True

    def release_all(self) -> int:
        """Drop everything that is retained; how many entries. Requires that no resource transaction is open."""
        released = self.resources.release_all()
        self.metrics.observe(self._program, self.resources)
        return released

    def occupancy(self, owner: Handle) -> tuple[int, int]:
        """Bytes that a retained owner refers to, on the device and in host memory."""
        summary = self._program.summary(owner)
        return summary.device_bytes, summary.host_bytes

    def seconds_to_next(self) -> float | None:
        """How long the worker may sleep unless it is woken; None: for ever."""
        if self.resources.open:
            return _COPY_POLL_SECONDS
        earliest = self.requests.next_deadline()
        return min(max(0.0, earliest - self._clock()), _LONGEST_SLEEP_SECONDS) if earliest < math.inf else None

    def end_everything(self, error: Callable[[], NinferError]) -> None:
        """Abort what is open, release what is active, forget lanes and catalogue, complete every response: in that
        order.

        ``error`` makes the error each request ends with. Raises nothing: a step that fails is logged and passed over.
        """
        _attempt(self._abort_transaction)
        _attempt(self._units.drop)
        for row in self.active:
            _attempt(partial(discard_row, row))
            _attempt(partial(self._program.discard, sequence_of(row)))
        self.resources.clear()
        self.admission.drop()
        self.demotion.drop(error)
        self.requests.complete_all(error)
        _attempt(self._outbox.deliver)

    def _calm(self, rows: Sequence[RequestRecord]) -> bool:
        """Whether the next boundary would find nothing to do but another round of these rows."""
        if len(rows) != len(self.active) or self.scheduler.waiting or self.demotion.waiting or self.pausing.paused:
            return False
        if self.resources.open or self.resources.holds or not self._quiet():
            return False
        return self._clock() < min([row.deadline for row in rows])

    def _capture(self, row: RequestRecord, position: int) -> bool:
        return self.admission.capture(row, position, self._clock())

    def _abort_transaction(self) -> None:
        if self._program.poll() is not TransactionStatus.IDLE:
            self._program.abort_transaction()


def _attempt(step: Callable[[], object]) -> None:
    try:
        step()
    except BaseException as error:
        log.error("a cleanup step failed", exc_info=error)

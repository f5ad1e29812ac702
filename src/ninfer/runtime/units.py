"""Model units: a unit is launched, then what earlier ones committed is published while it runs, then it is waited for
and its output previewed, committed and made visible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ninfer.constraints.masks import batch_masks
from ninfer.contract import PendingBatch, ProgramPort, SequenceHandle
from ninfer.errors import EngineFailed
from ninfer.runtime.metrics import Metrics
from ninfer.runtime.outbox import Outbox
from ninfer.runtime.output import (
    ORDINARY,
    check_membership,
    discard_row,
    goes_on,
    licence,
    preview_row,
    thinks_on,
)
from ninfer.runtime.pacing import Pacing
from ninfer.runtime.prices import Prices
from ninfer.runtime.record import Ending, RequestRecord
from ninfer.runtime.requests import Requests, aborted
from ninfer.runtime.scheduler import Scheduler

log = logging.getLogger("ninfer")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the worker is told at start. prefill_chunk: tokens of a unit. drafts: most a round may verify of a row.
    prices: what rounds cost, where their drafts adapt. overlap: the device works beside the host, so publication waits
    for the next launch. pressure: an older request may make younger ones pause."""

    lanes: int
    prefill_chunk: int
    concurrent_prefill: bool = False
    drafts: int = 0
    overlap: bool = False
    pressure: bool = False
    prices: Prices | None = None


class Units:
    """Runs them. At most one batch is pending. ``clock`` reads seconds. ``capture`` makes the checkpoints that a row
    owes at its position, and says whether it must stand still for them. ``calm``: the next boundary has nothing to do
    but another round of these rows; where the device works beside the host, it is then launched by the commit of the
    one before it."""

    def __init__(
        self,
        program: ProgramPort,
        limits: Limits,
        requests: Requests,
        scheduler: Scheduler,
        outbox: Outbox,
        metrics: Metrics,
        clock: Callable[[], float],
        capture: Callable[[RequestRecord, int], bool],
        calm: Callable[[Sequence[RequestRecord]], bool],
    ) -> None:
        self._program = program
        self._limits = limits
        self._requests = requests
        self._scheduler = scheduler
        self._outbox = outbox
        self._metrics = metrics
        self._clock = clock
        self._capture = capture
        self._calm = calm
        self._pending: PendingBatch | None = None
        self._rows: Sequence[RequestRecord] = ()
        self._follows = limits.overlap and not limits.drafts
        self._pacing = Pacing(limits.prices) if limits.prices is not None else None

    @property
    def launched(self) -> bool:
        """Whether a round has been launched that ``decode`` is to finish before anything else is done."""
        return self._pending is not None

    def prefill(self, row: RequestRecord) -> None:
        """One chunk, as far as the row's next checkpoint; after the last one the row's first token, or the forced
        tokens that must precede it."""
        sequence, prompt = sequence_of(row), len(row.entering.identity.tokens)
        self._metrics.prefill_units += 1
        if self._pacing is not None:
            self._pacing.interrupted()
        position = prompt - self._program.prefill_remaining(sequence)
        if row.captures and row.captures[0].frontier == position and self._capture(row, position):
            return
        if position < prompt:
            chunk = self._limits.prefill_chunk
            if row.captures:
                chunk = min(chunk, row.captures[0].frontier - position)
            self._program.prefill(sequence, chunk)
            self._outbox.deliver()
            position = prompt - self._program.prefill_remaining(sequence)
        standing = bool(row.captures) and row.captures[0].frontier == position and self._capture(row, position)
        done = position == prompt and not standing
        self._scheduler.on_prefill_unit(done)
        if done and (row.session.control or row.entering.resume is not None):
            row.state = row.ready
        elif done:
            masks = batch_masks((row.session.matcher,))
            if self._pacing is None:
                batch = self._program.finalize_prefill((sequence,), masks)
            else:
                ahead = self._pacing.first(row, self._requests.active)
                batch = self._program.finalize_prefill((sequence,), masks, ahead)
            self._finish(batch, (row,))

    def control(self, row: RequestRecord) -> None:
        """The forced tokens that are due."""
        self._metrics.control_units += 1
        if self._pacing is not None:
            self._pacing.interrupted()
        self._finish(self._program.control(sequence_of(row), row.session.control), (row,))

    def decode(self, rows: Sequence[RequestRecord] = ()) -> None:
        """One round of every ready row, or the end of the one that has been ``launched``."""
        pending = self._pending
        if pending is not None:
            rows = self._rows
        self._metrics.decode_rounds += 1
        self._metrics.decode_rows += len(rows)
        if pending is not None:
            masks = batch_masks([row.session.matcher for row in rows])
            if masks is not None:
                self._program.fill(pending, masks)
            self._finish(pending, rows)
            return
        sequences = [sequence_of(row) for row in rows]
        if self._pacing is not None:
            licences = self._pacing.licences(rows)
        elif drafts := self._limits.drafts:
            licences = [licence(row, drafts) for row in rows]
        else:
            licences = [ORDINARY] * len(rows)
        masks = batch_masks([row.session.matcher for row in rows])
        self._finish(self._program.decode(sequences, licences, masks), rows)

    def drop(self) -> None:
        """Abort the pending batch, if there is one."""
        pending, self._pending, self._rows = self._pending, None, ()
        if pending is not None and not pending.spent:
            self._program.abort_pending(pending)

    def _finish(self, batch: PendingBatch, rows: Sequence[RequestRecord]) -> None:
        """Consume the batch whole: preview every row, commit once, then make the outcome visible row by row."""
        self._pending = batch
        check_membership(batch, rows)
        self._outbox.deliver()
        for row in rows:
            row.session.prepare()
        follow = self._follows and batch.kind == "decode" and all(map(thinks_on, rows))
        self._metrics.decode_drafts += sum([row.drafted for row in self._program.wait(batch)])
        control = batch.kind == "control"
        try:
            decisions = [preview_row(row, out, control=control) for row, out in zip(rows, batch.rows, strict=True)]
        except EngineFailed:
            raise
        except Exception as error:
            self._abort(batch, rows, error)
            return
        follow = follow and all(map(goes_on, decisions)) and self._calm(rows)
        self._pending = self._program.commit(batch, decisions, follow)
        self._rows = rows if self._pending is not None else ()
        now = self._clock()
        if self._pacing is not None and batch.kind == "decode":
            self._pacing.committed(rows, now)
        for row in rows:
            if row.ending is not None:
                self._requests.end(row, row.ending, now)
                continue
            try:
                self._requests.commit_output(row, now)
            except Exception as error:
                self._spoil(row, aborted(error), now)
                continue
            self._outbox.publish(row.response, row.session.tell)
            row.state, row.progressed = row.ready, True

    def _spoil(self, row: RequestRecord, ending: Ending, now: float) -> None:
        """A row cannot go on. It ends at once, or with the round that has been launched for it."""
        if self._pending is None:
            self._requests.end(row, ending, now)
            return
        row.spoiled = ending
        with suppress(Exception):
            discard_row(row)

    def _abort(self, batch: PendingBatch, rows: Sequence[RequestRecord], error: Exception) -> None:
        log.error("a batch was aborted", exc_info=error)
        for row in rows:
            discard_row(row)
        self._program.abort_pending(batch)
        self._pending = None
        now = self._clock()
        for row in rows:
            self._requests.end(row, aborted(error), now)


def sequence_of(row: RequestRecord) -> SequenceHandle:
    """The sequence of an active row."""
    assert row.sequence is not None
    return row.sequence

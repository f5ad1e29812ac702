"""Model transactions: units that advance sequences. A unit is launched as a PendingBatch, ``wait`` brings what it
produced, and only ``commit`` makes its tokens part of a sequence. At most one batch is pending, so whatever a unit left
on the device stays there until the batch is consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import numpy.typing as npt

from ninfer.contract import MaskProvider, PendingBatch, ProducedRow, RowDecision, SequenceHandle, UnitLicense
from ninfer.errors import DeviceError, InvariantError
from ninfer.program import rounds
from ninfer.program.batch import Pending, check_decisions
from ninfer.program.filling import fill_fold, fill_joined, fill_wide
from ninfer.program.frame import InputFrame
from ninfer.program.layout import PAGE, PoolKind, pages
from ninfer.program.licensing import unit_touch
from ninfer.program.memory import Shape
from ninfer.program.outcomes import settle
from ninfer.program.sequence import Phase, SequenceRecord, prefill_end
from ninfer.program.store import Store
from ninfer.program.traffic import Traffic
from ninfer.program.transactions import Transactions
from ninfer.program.units import Units


class Batches:
    """The part of Program that runs units; see :class:`ninfer.contract.ProgramPort` for its public methods.

    pending: the batch that has been launched and not consumed.
    """

    def __init__(self, shape: Shape, store: Store, units: Units, traffic: Traffic, transactions: Transactions) -> None:
        self.shape = shape
        self.store = store
        self.pending: Pending | None = None
        self._units = units
        self._traffic = traffic
        self._transactions = transactions
        self._sequences = store.sequences
        self._drafting: Pending | None = None  # the round whose drafts are still to be taken

    def prefill_remaining(self, sequence: SequenceHandle) -> int:
        record = self._sequences.get(sequence)
        return max(0, record.prompt - record.frontier)

    def prefill(self, sequence: SequenceHandle, chunk: int) -> None:
        (record,) = self._enter((sequence,))
        begin, end = record.frontier, prefill_end(record, chunk)
        if not 1 <= chunk <= self.shape.chunk or record.phase is not Phase.PREFILL or begin == end:
            raise InvariantError(f"{sequence}: no prefill unit of {chunk} tokens (1..{self.shape.chunk}) at {begin}")
        positions = record.request.identity.positions[:, begin:end]
        self._join(record, int(record.ledger[begin]))
        known = record.ledger[begin : min(end + 1, record.length)]
        frame = self._wide_frame(record, known, positions, self._units.columns(end - begin))
        with self._launching((record,)):
            self._units.prefill(frame, end - begin)
        self._advance(record, end)
        if record.frontier == record.prompt < record.length:
            record.phase = Phase.DECODE
        self._traffic.prefill_tokens += end - begin

    def finalize_prefill(
        self, sequences: Sequence[SequenceHandle], masks: MaskProvider | None, ahead: int | None = None
    ) -> PendingBatch:
        records, window = self._enter(sequences), self.shape.window
        if not 0 <= (ahead or 0) <= window:
            raise InvariantError(f"{ahead} drafts exceed a round of {window}")
        for sequence, record in zip(sequences, records):
            if record.phase is not Phase.PREFILL or record.frontier != record.prompt:
                raise InvariantError(f"{sequence} is not at the end of its prompt")
        wanted = window if ahead is None else ahead
        return self._decide("prefill", sequences, records, ((),) * len(records), wanted, masks)

    def decode(
        self, sequences: Sequence[SequenceHandle], licences: Sequence[UnitLicense], masks: MaskProvider | None
    ) -> PendingBatch:
        records, window = self._enter(sequences), self.shape.window
        if len(licences) != len(records):
            raise InvariantError("a decode round needs one licence per row")
        for sequence, record, licence in zip(sequences, records, licences):
            room = record.room
            if record.phase is not Phase.DECODE or room < 1:
                raise InvariantError(f"{sequence} has no anchor to execute or no output left to decide")
            if not 0 <= licence.drafts < room or licence.drafts > window or (licence.ahead or 0) > window:
                raise InvariantError(f"{sequence}: {licence} exceeds its output or a round of {window}")
        if PoolKind.MTP in self.store.kv:
            for record in records:
                self._join(record, int(record.ledger[record.frontier]))
        drafts = tuple([record.drafts[: licence.drafts] for record, licence in zip(records, licences)])
        ahead = max([window if licence.ahead is None else licence.ahead for licence in licences])
        return self._decide("decode", sequences, records, drafts, ahead, masks)

    def control(self, sequence: SequenceHandle, tokens: Sequence[int]) -> PendingBatch:
        """At most ``shape.control`` tokens. They may also follow a prompt directly, before anything was sampled."""
        (record,) = self._enter((sequence,))
        if record.phase is Phase.ENDED or record.frontier < record.prompt:
            raise InvariantError(f"{sequence} is not ready for forced tokens")
        if not 1 <= len(tokens) <= min(self.shape.control, record.room):
            raise InvariantError(f"{len(tokens)} forced tokens: 1..{min(self.shape.control, record.room)} have room")
        if not all(0 <= token < self.shape.vocabulary for token in tokens):
            raise InvariantError(f"forced tokens {tokens} leave the vocabulary of {self.shape.vocabulary}")
        anchor = record.ledger[record.frontier : record.length].tolist()
        columns = len(anchor) + len(tokens) - 1
        self._join(record, (*anchor, *tokens)[0])
        if columns:
            indices = record.request.identity.rope_delta + record.frontier + np.arange(columns, dtype=np.int32)
            frame = self._wide_frame(record, [*anchor, *tokens], np.broadcast_to(indices, (3, columns)), columns)
            with self._launching((record,)):
                self._units.control(frame, columns)
        self.pending = Pending((record,), columns)
        batch = PendingBatch("control", (sequence,), self.pending)
        batch.produce((ProducedRow(sequence, tuple(tokens)),))
        return batch

    def wait(self, batch: PendingBatch) -> tuple[ProducedRow, ...]:
        pending = self._belonging(batch)
        if pending.undecided is not None:
            raise InvariantError("a round is waited for whose masks have not been filled")
        if not batch.waited:
            try:
                rows = rounds.collect(self._units, pending, batch.sequences, batch.kind == "prefill")
                if batch.kind == "decode":
                    self._traffic.decode_tokens += sum([len(row.tokens) for row in rows])
                batch.produce(rows)
            except BaseException:
                self.abort_pending(batch)
                raise
        return batch.rows

    def commit(
        self, batch: PendingBatch, decisions: Sequence[RowDecision], follow: bool = False
    ) -> PendingBatch | None:
        pending = self._belonging(batch)
        check_decisions(batch.rows, decisions)
        following = self._follow(pending, batch.rows, decisions) if follow and batch.kind == "decode" else None
        batch.consume()
        self.pending = None
        self._drafting = pending if pending.ahead else None
        self._take_in(batch, pending, decisions)
        if following is None:
            return None
        self.pending = following
        return PendingBatch("decode", batch.sequences, following)

    def _take_in(self, batch: PendingBatch, pending: Pending, decisions: Sequence[RowDecision]) -> None:
        """What was accepted becomes history, on the device where it is not yet."""
        if pending.columns:
            self._fold(pending, [decision.accepted for decision in decisions])
        for record, row, decision in zip(pending.records, batch.rows, decisions):
            record.drafts, accepted = (), decision.accepted
            if accepted:
                if decision.boundaries:
                    record.boundaries += [record.length + offset for offset in decision.boundaries]
                record.append(row.tokens[:accepted])
                self._advance(record, record.length - 1)
                record.phase = Phase.DECODE
            elif batch.kind == "decode" and not pending.columns:
                record.intact = False  # the state has absorbed an anchor that the frontier does not count
            if decision.terminal:
                record.phase = Phase.ENDED

    def fill(self, batch: PendingBatch, masks: MaskProvider) -> None:
        pending = self._belonging(batch)
        ready = pending.undecided
        if ready is None or tuple(masks.constrained_rows()) != ready.constrained:
            raise InvariantError(f"masks for rows {masks.constrained_rows()} of a {batch.kind} batch")
        try:
            decided = rounds.decide(self._units, ready, masks)
        except BaseException:
            self.abort_pending(batch)
            raise
        pending.dead, pending.scored, pending.undecided = decided.dead, decided.scored, None

    def abort_pending(self, batch: PendingBatch) -> None:
        pending = self._belonging(batch)
        batch.consume()
        self.pending = None
        self._end(pending.records)

    # -- inside a unit -------------------------------------------------------------------------------------------

    def _enter(self, sequences: Sequence[SequenceHandle]) -> tuple[SequenceRecord, ...]:
        """The rows of a new unit. Refuses before anything has changed."""
        if self.pending is not None:
            raise InvariantError("a unit cannot start while a batch is pending")
        records = tuple([self._sequences.get(sequence) for sequence in sequences])
        if not records or len({r.lane for r in records}) != len(records):
            raise InvariantError(f"a unit needs distinct rows, not {sequences}")
        captured = self._transactions.captured
        if captured is not None and captured in sequences:
            raise InvariantError("a row runs no unit while it is captured")
        self._take_drafts()
        return records

    def _take_drafts(self) -> None:
        """Give its rows what the last round drafted, once it is here."""
        if (made := self._drafting) is not None:
            self._drafting = None
            for record, drafts in zip(made.records, self._units.drafts(len(made.records), made.ahead)):
                record.drafts = drafts

    def _belonging(self, batch: PendingBatch) -> Pending:
        """Program's side of the batch. Refuses one that is spent or not the pending one."""
        if batch.spent or self.pending is None or batch.state is not self.pending:
            raise InvariantError(f"this {batch.kind} batch is not pending")
        return self.pending

    def _map(self, record: SequenceRecord, width: int) -> None:
        if record.frontier + width + self.shape.window <= record.mapped:
            return
        touched = unit_touch(self.store.kv, record.frontier, width, self.shape.window, self.shape.context)
        for kind, tokens in touched.items():
            self.store.kv[kind].ensure_mapped(record.spaces[kind], tokens)
        record.mapped = PAGE * pages(min(touched.values()))

    def _join(self, record: SequenceRecord, token: int) -> None:
        """Complete the drafting module's history up to the frontier, whose last column needs the ``token`` behind it.

        It is incomplete at a checkpoint that was resumed, and at the end of a prompt that forced tokens follow.
        """
        kv = self.store.kv.get(PoolKind.MTP)
        if kv is None or kv.spaces.get(record.spaces[PoolKind.MTP]).committed == record.frontier:
            return
        self._map(record, 0)
        frame = self._units.frame()
        fill_joined(frame.rows(1), record, token)
        with self._launching((record,)):
            self._units.join(frame)
        kv.commit_frontier(record.spaces[PoolKind.MTP], record.frontier)

    def _advance(self, record: SequenceRecord, frontier: int) -> None:
        """Everything executed up to ``frontier`` becomes history. The drafting module's needs the token behind it."""
        for kind, kv in self.store.kv.items():
            known = frontier if kind is not PoolKind.MTP else min(frontier, record.length - 1)
            kv.commit_frontier(record.spaces[kind], known)
        if frontier == record.frontier:
            return
        self.store.states.advance(record.binding.write, frontier)
        record.frontier = frontier
        if record.binding.forked:
            settle(self.store, record)

    def _wide_frame(
        self,
        record: SequenceRecord,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        columns: int,
    ) -> InputFrame:
        self._map(record, positions.shape[1])
        frame = self._units.frame()
        fill_wide(frame, record, tokens, positions, columns)
        return frame

    def _decide(
        self,
        kind: Literal["prefill", "decode"],
        sequences: Sequence[SequenceHandle],
        records: tuple[SequenceRecord, ...],
        drafts: tuple[tuple[int, ...], ...],
        ahead: int,
        masks: MaskProvider | None,
    ) -> PendingBatch:
        first = kind == "prefill"
        for record, own in zip(records, drafts):
            self._map(record, 0 if first else 1 + len(own))
        ready = rounds.prepare(self._units, self.shape, records, drafts, ahead, masks, first)
        self.store.transfers.used()
        try:  # not ``_launching``, which costs as much as all the checks of a round
            rounds.launch(self._units, ready)
            pending = self.pending = rounds.decide(self._units, ready, masks)
        except BaseException:
            self._end(records)
            raise
        if not first:
            self._traffic.launched([r.frontier for r in records], pending.columns, ahead=pending.ahead)
        return PendingBatch(kind, tuple(sequences), pending)

    def _follow(
        self, pending: Pending, rows: Sequence[ProducedRow], decisions: Sequence[RowDecision]
    ) -> Pending | None:
        """Launch the round after a decode round, before its tokens are taken in. None where that takes more than a
        launch: drafts, a row that ends, pages to map, a state to settle, a transaction beside it."""
        records = pending.records
        if self.shape.window or self._transactions.open is not None or any(d.terminal for d in decisions):
            return None
        if self._units.decision.members != records:  # forked
            return None
        for record in records:
            if record.room < 2 or record.frontier + 2 > record.mapped:
                return None
        self.store.transfers.used()
        try:
            following = rounds.follow(self._units, records, [row.tokens[0] for row in rows])
        except BaseException:
            self._end(records)
            raise
        self._traffic.launched([r.frontier + 1 for r in records], 0, ahead=0)
        return following

    def _fold(self, pending: Pending, accepted: Sequence[int]) -> None:
        """Keep what was accepted of recorded rows."""
        records, columns = pending.records, rounds.executed(pending, accepted)
        if any(columns):
            frame = self._units.frame()
            fill_fold(frame.rows(len(records)), records, pending.columns, columns)
            with self._launching(records):
                self._units.fold(frame, len(records), pending.columns)

    @contextmanager
    def _launching(self, records: Sequence[SequenceRecord]) -> Iterator[None]:
        """Device work is in flight: a fault ends every row of the unit, once the device has come to rest."""
        self.store.transfers.used()
        try:
            yield
        except BaseException:
            self._end(records)
            raise

    def _end(self, records: Sequence[SequenceRecord]) -> None:
        for record in records:
            record.phase, record.intact = Phase.ENDED, False
        with suppress(DeviceError):  # the fault that led here says more
            self._units.drain()

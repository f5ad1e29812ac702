"""Program: the physical plane behind ``ProgramPort``. Sequences, their memory, and the units that advance them.

A unit is launched as a PendingBatch, ``wait`` brings what it produced, and only ``commit`` makes its tokens part of a
sequence. At most one batch is pending, so whatever a unit left on the device stays there until the batch is consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import numpy.typing as npt

from ninfer.contract import (
    AdoptionTicket,
    HandleTable,
    Infeasible,
    MaskProvider,
    PendingBatch,
    PreparedRequest,
    ProducedRow,
    ResourcePlan,
    ResourceResult,
    RowDecision,
    SequenceHandle,
    Shortage,
    StartStatus,
    TerminalResult,
    TransactionStatus,
    UnitLicense,
)
from ninfer.errors import DeviceError, InvariantError
from ninfer.program.batch import NOT_FINITE, Pending, check_decisions, produced_row
from ninfer.program.capacity import CapacityReport
from ninfer.program.filling import (
    FIRST_TOKEN,
    ORDINARY_DECODE,
    fill_decode,
    fill_fold,
    fill_recall,
    fill_sampling,
    fill_wide,
)
from ninfer.program.frame import InputFrame
from ninfer.program.licensing import unit_touch
from ninfer.program.memory import Shape
from ninfer.program.sequence import Phase, SequenceRecord, prefill_end
from ninfer.program.traffic import Traffic
from ninfer.program.transactions import Transactions
from ninfer.program.units import Units


class Program:
    """Implements :class:`ninfer.contract.ProgramPort`; made by ``open_program``.

    shape: the fixed sizes. components: device bytes by component, weights and recordings included. report: how the KV
    pool was sized.
    """

    def __init__(
        self,
        shape: Shape,
        components: Mapping[str, int],
        report: CapacityReport,
        transactions: Transactions,
        units: Units,
        traffic: Traffic,
    ) -> None:
        self.shape = shape
        self.components = components
        self.report = report
        self._transactions = transactions
        self._units = units
        self._traffic = traffic
        self._sequences: HandleTable[SequenceRecord] = HandleTable("sequence")
        self._pending: Pending | None = None
        self._closed = False

    # -- planning and resource transactions ----------------------------------------------------------------------

    @property
    def resource_revision(self) -> int:
        return self._transactions.revision

    def isolated_root_fits(self, request: PreparedRequest) -> Infeasible | None:
        return self._transactions.isolated_root_fits(request)

    def plan_root(self, request: PreparedRequest, lane: int) -> ResourcePlan | tuple[Shortage, ...]:
        if not 0 <= lane < self.shape.rows or any(r.lane == lane for _, r in self._sequences.live()):
            raise InvariantError(f"lane {lane} is not free")
        return self._transactions.plan_root(request, lane)

    def start(self, plan: ResourcePlan, ticket: AdoptionTicket) -> StartStatus:
        return self._transactions.start(plan, ticket)

    def poll(self) -> TransactionStatus:
        return TransactionStatus.IDLE if self._transactions.open is None else TransactionStatus.READY

    def commit_transaction(self) -> ResourceResult:
        plan, record = self._transactions.commit()
        self._units.clear_counts(record.lane)
        sequence = self._sequences.insert(record)
        return ResourceResult(plan.id, plan.kind, True, sequence, 0, self.resource_revision)

    def abort_transaction(self) -> ResourceResult:
        plan = self._transactions.abort()
        return ResourceResult(plan.id, plan.kind, False, None, 0, self.resource_revision)

    def finish(self, sequence: SequenceHandle) -> TerminalResult:
        if self._sequences.get(sequence).phase is not Phase.ENDED:
            raise InvariantError(f"{sequence} has not ended")
        return self.discard(sequence)

    def discard(self, sequence: SequenceHandle) -> TerminalResult:
        record = self._sequences.get(sequence)
        if self._pending is not None and any(record is r for r in self._pending.records):
            raise InvariantError(f"{sequence} is a row of a pending batch")
        self._transactions.release(record)
        self._sequences.remove(sequence)
        return TerminalResult(None, self.resource_revision)

    # -- model units ---------------------------------------------------------------------------------------------

    def prefill_remaining(self, sequence: SequenceHandle) -> int:
        record = self._sequences.get(sequence)
        return max(0, record.prompt - record.frontier)

    def prefill(self, sequence: SequenceHandle, chunk: int) -> None:
        (record,) = self._enter((sequence,))
        begin, end = record.frontier, prefill_end(record, chunk)
        if not 1 <= chunk <= self.shape.chunk or record.phase is not Phase.PREFILL or begin == end:
            raise InvariantError(f"{sequence}: no prefill unit of {chunk} tokens (1..{self.shape.chunk}) at {begin}")
        positions = record.request.identity.positions[:, begin:end]
        frame = self._wide_frame(record, record.ledger[begin:end], positions, self._units.columns(end - begin))
        with self._launching((record,)):
            self._units.prefill(frame, end - begin)
        self._advance(record, end)
        self._traffic.prefill_tokens += end - begin

    def finalize_prefill(self, sequences: Sequence[SequenceHandle], masks: MaskProvider | None) -> PendingBatch:
        records = self._enter(sequences)
        for sequence, record in zip(sequences, records):
            if record.phase is not Phase.PREFILL or record.frontier != record.prompt:
                raise InvariantError(f"{sequence} is not at the end of its prompt")
        return self._sample("prefill", sequences, records, masks)

    def decode(
        self, sequences: Sequence[SequenceHandle], licences: Sequence[UnitLicense], masks: MaskProvider | None
    ) -> PendingBatch:
        records = self._enter(sequences)
        if len(licences) != len(records) or any(licence.drafts for licence in licences):
            raise InvariantError("a decode round needs one licence per row, without drafts")
        for sequence, record in zip(sequences, records):
            if record.phase is not Phase.DECODE or record.room < 1:
                raise InvariantError(f"{sequence} has no anchor to execute or no output left to decide")
        return self._sample("decode", sequences, records, masks)

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
        columns = [*anchor, *tokens[:-1]]
        if columns:
            indices = record.request.identity.rope_delta + record.frontier + np.arange(len(columns), dtype=np.int32)
            frame = self._wide_frame(record, columns, np.broadcast_to(indices, (3, len(columns))), len(columns))
            with self._launching((record,)):
                self._units.control(frame, len(columns))
        self._pending = Pending((record,), len(columns))
        batch = PendingBatch("control", (sequence,), self._pending)
        batch.produce((ProducedRow(sequence, tuple(tokens)),))
        return batch

    def wait(self, batch: PendingBatch) -> tuple[ProducedRow, ...]:
        pending = self._belonging(batch)
        if not batch.waited:
            try:
                batch.produce(self._collect(batch, pending))
            except BaseException:
                self.abort_pending(batch)
                raise
        return batch.rows

    def commit(self, batch: PendingBatch, decisions: Sequence[RowDecision]) -> None:
        pending = self._belonging(batch)
        check_decisions(batch.rows, decisions)
        batch.consume()
        self._pending = None
        for record, row, decision in zip(pending.records, batch.rows, decisions):
            if decision.accepted:
                record.boundaries += [record.length + offset for offset in decision.boundaries]
                record.append(row.tokens[: decision.accepted])
                if pending.columns:
                    self._fold(record, pending.columns)
                self._advance(record, record.length - 1)
                record.phase = Phase.DECODE
            if decision.terminal:
                record.phase = Phase.ENDED

    def abort_pending(self, batch: PendingBatch) -> None:
        pending = self._belonging(batch)
        batch.consume()
        self._pending = None
        self._end(pending.records)

    # -- facts ---------------------------------------------------------------------------------------------------

    def audit(self) -> Mapping[str, int]:
        facts = {
            "lanes": len(self._sequences),
            "transactions": int(self._transactions.open is not None),
            "pending_rows": len(self._pending.records) if self._pending else 0,
            "state_slots": self._transactions.states.audit().used,
        }
        for kind, store in self._transactions.stores.items():
            pool, name = store.audit(), kind.name.lower()
            facts[f"rows.{name}"] = pool.rows
            facts[f"pages.{name}.allocated"] = pool.allocated
            facts[f"pages.{name}.reserved"] = pool.reserved
            facts[f"pages.{name}.available"] = pool.available
        return facts

    def stats(self) -> Mapping[str, int]:
        """Occupancy, planned bytes by component, and counters since the start (see ``Traffic`` and ``Units``)."""
        states, facts = self._transactions.states, {f"bytes.{name}": n for name, n in self.components.items()}
        facts["state_slots.total"] = states.capacity
        facts["state_slots.used"] = states.capacity - states.available
        for kind, store in self._transactions.stores.items():
            facts[f"pages.{kind.name.lower()}.total"] = store.pool.capacity
            facts[f"pages.{kind.name.lower()}.used"] = store.pool.allocated
        return facts | self._units.counters | self._traffic.counters()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._units.close()

    # -- inside a unit -------------------------------------------------------------------------------------------

    def _enter(self, sequences: Sequence[SequenceHandle]) -> tuple[SequenceRecord, ...]:
        """The rows of a new unit. Refuses before anything has changed."""
        if self._pending is not None:
            raise InvariantError("a unit cannot start while a batch is pending")
        records = tuple([self._sequences.get(sequence) for sequence in sequences])
        if not records or len({r.lane for r in records}) != len(records):
            raise InvariantError(f"a unit needs distinct rows, not {sequences}")
        return records

    def _belonging(self, batch: PendingBatch) -> Pending:
        """Program's side of the batch. Refuses one that is spent or not the pending one."""
        if batch.spent or self._pending is None or batch.state is not self._pending:
            raise InvariantError(f"this {batch.kind} batch is not pending")
        return self._pending

    def _map(self, record: SequenceRecord, width: int) -> None:
        for kind, tokens in unit_touch(record.frontier, width).items():
            self._transactions.stores[kind].ensure_mapped(record.spaces[kind], tokens)

    def _advance(self, record: SequenceRecord, frontier: int) -> None:
        """Everything executed up to ``frontier`` becomes history."""
        if frontier == record.frontier:
            return
        for kind, store in self._transactions.stores.items():
            store.commit_frontier(record.spaces[kind], frontier)
        self._transactions.states.advance(record.binding.write, frontier)
        record.frontier = frontier

    def _wide_frame(
        self,
        record: SequenceRecord,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        columns: int,
    ) -> InputFrame:
        self._map(record, len(tokens))
        frame = self._units.frame()
        fill_wide(frame, record, tokens, positions, columns)
        return frame

    def _sample(
        self,
        kind: Literal["prefill", "decode"],
        sequences: Sequence[SequenceHandle],
        records: tuple[SequenceRecord, ...],
        masks: MaskProvider | None,
    ) -> PendingBatch:
        """Launch Forward, then fill the masks beside it, then launch Finish."""
        units, B = self._units, len(records)
        constrained = masks.constrained_rows() if masks is not None else ()
        frame = units.frame()
        rows = frame.rows(B)
        if kind == "decode":
            for record in records:
                self._map(record, 1)
            fill_decode(rows, records)
        else:
            fill_recall(rows, records)
        fill_sampling(rows, records, constrained, ORDINARY_DECODE if kind == "decode" else FIRST_TOKEN)
        dead: set[int] = set()
        with self._launching(records):
            units.forward(frame, B) if kind == "decode" else units.recall(frame, B)
            if masks is not None and constrained:
                dead.update(row for row in constrained if masks.fill(row, (), units.masks[row]).dead & 1)
            scores = any(r.request.sampling.logprobs >= 0 for r in records)
            units.finish(frame, B, scores, masked=bool(constrained))
        self._pending = Pending(records, dead=frozenset(dead))
        return PendingBatch(kind, tuple(sequences), self._pending)

    def _collect(self, batch: PendingBatch, pending: Pending) -> tuple[ProducedRow, ...]:
        """Wait for a sampled batch and read its rows."""
        records = pending.records
        out = self._units.results(batch.kind == "decode")
        tokens = out.fields["token"][: len(records)].tolist()
        if NOT_FINITE in tokens:
            raise DeviceError(f"row {tokens.index(NOT_FINITE)} of a {batch.kind} batch: logits are not finite")
        if batch.kind == "decode":
            self._traffic.decoded([r.frontier for r in records])
        return tuple(
            [
                produced_row(sequence, record, out, i, token, i in pending.dead)
                for i, (sequence, record, token) in enumerate(zip(batch.sequences, records, tokens))
            ]
        )

    def _fold(self, record: SequenceRecord, columns: int) -> None:
        """Keep what was accepted of a control row: all but the last accepted token are executed."""
        accepted = record.length - 1 - record.frontier
        if accepted:
            frame = self._units.frame()
            fill_fold(frame, record, columns, accepted)
            with self._launching((record,)):
                self._units.fold(frame, columns)

    @contextmanager
    def _launching(self, records: Sequence[SequenceRecord]) -> Iterator[None]:
        """Device work is in flight: a fault ends every row of the unit, once the device has come to rest."""
        try:
            yield
        except BaseException:
            self._end(records)
            raise

    def _end(self, records: Sequence[SequenceRecord]) -> None:
        for record in records:
            record.phase = Phase.ENDED
        with suppress(DeviceError):  # the fault that led here says more
            self._units.drain()

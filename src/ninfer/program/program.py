"""Program: the physical plane behind ``ProgramPort``. Sequences, their memory, and the units that advance them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ninfer.context import (
    AdoptionTicket,
    Candidate,
    CaptureOffer,
    CaptureSkip,
    CheckpointRef,
    Infeasible,
    OwnerSummary,
    PauseResult,
    ResourcePlan,
    ResourceResult,
    StartStatus,
    TerminalResult,
    TransactionKind,
    TransactionStatus,
)
from ninfer.contract import (
    Handle,
    MaskProvider,
    PendingBatch,
    PreparedRequest,
    ProducedRow,
    RowDecision,
    SequenceHandle,
    UnitLicense,
)
from ninfer.errors import InvariantError
from ninfer.program.admission import isolated_root_fits, prove_backfill
from ninfer.program.auditing import audit, digest, occupancy
from ninfer.program.batches import Batches
from ninfer.program.capacity import CapacityReport
from ninfer.program.incoming import Incoming, capture, inspect, materialization
from ninfer.program.memory import Shape
from ninfer.program.outcomes import become_history, resumable, vanish
from ninfer.program.planning import Session
from ninfer.program.sequence import Phase, SequenceRecord
from ninfer.program.store import Store
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
        store: Store,
        units: Units,
        traffic: Traffic,
    ) -> None:
        self.shape = shape
        self.components = components
        self.report = report
        self.store = store
        self._transactions = Transactions(store, units.reset_counts)
        self._units = units
        self._traffic = traffic
        self._batches = Batches(shape, store, units, traffic, self._transactions)
        self._sequences = store.sequences
        self._closed = False

    # -- planning: pure ------------------------------------------------------------------------------------------

    @property
    def resource_revision(self) -> int:
        return self.store.revision

    @property
    def unsettled(self) -> bool:
        return self.store.unsettled

    def isolated_root_fits(self, request: PreparedRequest) -> Infeasible | None:
        return isolated_root_fits(self.store, request)

    def summary(self, owner: Handle) -> OwnerSummary:
        return self.store.summary(owner)

    def inspect(self, ref: CheckpointRef | None, request: PreparedRequest, consume: bool) -> Candidate | None:
        return inspect(self.store, ref, request, consume)

    def open_session(
        self, request: PreparedRequest, lane: int, candidates: Sequence[Candidate], victims: Sequence[Handle]
    ) -> Session:
        impossible = self.isolated_root_fits(request)
        if impossible is not None:
            raise InvariantError(f"planning a request that cannot run alone: {impossible.shortages}")
        if not 0 <= lane < self.shape.rows or any(r.lane == lane for _, r in self._sequences.live()):
            raise InvariantError(f"lane {lane} is not free")
        incoming = [materialization(self.store, request, lane, candidate) for candidate in candidates]
        return self._session(TransactionKind.MATERIALIZE, incoming, victims)

    def open_capture(
        self, sequence: SequenceHandle, offer: CaptureOffer, victims: Sequence[Handle]
    ) -> Session | CaptureSkip:
        incoming = capture(self.store, sequence, offer)
        if isinstance(incoming, CaptureSkip):
            return incoming
        return self._session(TransactionKind.CAPTURE, [incoming], victims)

    def open_demotion(self, victims: Sequence[Handle]) -> Session:
        return self._session(TransactionKind.DEMOTE, [Incoming("none")], victims)

    def prove_backfill(
        self, head: PreparedRequest, donors: Collection[SequenceHandle], extra: PreparedRequest | None
    ) -> bool:
        return prove_backfill(self.store, head, donors, extra)

    def _session(self, kind: TransactionKind, incoming: Sequence[Incoming], victims: Sequence[Handle]) -> Session:
        return Session(self.store, kind, incoming, victims, self._transactions.sealed)

    # -- resource transactions -----------------------------------------------------------------------------------

    def start(self, plan: ResourcePlan, ticket: AdoptionTicket) -> StartStatus:
        return self._transactions.start(plan, ticket)

    def poll(self) -> TransactionStatus:
        return self._transactions.poll()

    def commit_transaction(self) -> ResourceResult:
        return self._transactions.commit()

    def abort_transaction(self) -> ResourceResult:
        return self._transactions.abort()

    def finish(self, sequence: SequenceHandle, *, endpoint: bool = True) -> TerminalResult:
        record = self._ending(sequence)
        if record.phase is not Phase.ENDED and endpoint:
            raise InvariantError(f"{sequence} has not ended")
        self.store.revision += 1
        owner = become_history(self.store, record, endpoint)
        self.store.expect_pressure()
        self._sequences.remove(sequence)
        return TerminalResult(None if owner is None else self.summary(owner), self.resource_revision)

    def pause(self, sequence: SequenceHandle, *, snapshot: bool) -> PauseResult:
        record = self._ending(sequence)
        if record.phase is Phase.ENDED:
            raise InvariantError(f"{sequence} has ended")
        request, stopped = resumable(record), record.frontier
        self.store.revision += 1
        owner = become_history(self.store, record, snapshot)
        self._sequences.remove(sequence)
        retained = None if owner is None else self.summary(owner)
        point = retained is not None and any(c.key.frontier == stopped for c in retained.checkpoints)
        return PauseResult(request, retained, point, self.resource_revision)

    def discard(self, sequence: SequenceHandle) -> TerminalResult:
        record = self._ending(sequence)
        self.store.revision += 1
        vanish(self.store, record)
        self._sequences.remove(sequence)
        return TerminalResult(None, self.resource_revision)

    def release_inactive(self, owner: Handle) -> int:
        if self._transactions.open is not None:
            raise InvariantError("a history cannot be released while a resource transaction is open")
        history = self.store.histories.remove(owner)
        self.store.forget(history, list(history.checkpoints))
        self.store.revision += 1
        return self.resource_revision

    def _ending(self, sequence: SequenceHandle) -> SequenceRecord:
        record = self._sequences.get(sequence)
        if self._batches.pending is not None and any(record is r for r in self._batches.pending.records):
            raise InvariantError(f"{sequence} is a row of a pending batch")
        if self._transactions.open is not None:
            raise InvariantError("a sequence cannot end while a resource transaction is open")
        return record

    # -- model units ---------------------------------------------------------------------------------------------

    def prefill_remaining(self, sequence: SequenceHandle) -> int:
        return self._batches.prefill_remaining(sequence)

    def prefill(self, sequence: SequenceHandle, chunk: int) -> None:
        self._batches.prefill(sequence, chunk)

    def finalize_prefill(
        self, sequences: Sequence[SequenceHandle], masks: MaskProvider | None, ahead: int | None = None
    ) -> PendingBatch:
        return self._batches.finalize_prefill(sequences, masks, ahead)

    def decode(
        self, sequences: Sequence[SequenceHandle], licences: Sequence[UnitLicense], masks: MaskProvider | None
    ) -> PendingBatch:
        return self._batches.decode(sequences, licences, masks)

    def control(self, sequence: SequenceHandle, tokens: Sequence[int]) -> PendingBatch:
        return self._batches.control(sequence, tokens)

    def wait(self, batch: PendingBatch) -> tuple[ProducedRow, ...]:
        return self._batches.wait(batch)

    def commit(
        self, batch: PendingBatch, decisions: Sequence[RowDecision], follow: bool = False
    ) -> PendingBatch | None:
        return self._batches.commit(batch, decisions, follow)

    def fill(self, batch: PendingBatch, masks: MaskProvider) -> None:
        self._batches.fill(batch, masks)

    def abort_pending(self, batch: PendingBatch) -> None:
        self._batches.abort_pending(batch)

    # -- facts ---------------------------------------------------------------------------------------------------

    def audit(self) -> Mapping[str, int]:
        settled = self._transactions.open is None
        return audit(self.store, settled) | {
            "transactions": int(not settled),
            "pending_rows": len(self._batches.pending.records) if self._batches.pending else 0,
        }

    def audit_digest(self) -> int:
        return digest(self.store)

    def stats(self) -> Mapping[str, int]:
        """Occupancy, planned bytes by component, and counters since the start or ``count_anew`` (see ``Traffic`` and
        ``Units``)."""
        planned = {f"bytes.{name}": n for name, n in self.components.items()}
        return planned | occupancy(self.store) | self._units.counters | self._traffic.counters()

    def gaps(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._units.gaps)

    def count_anew(self) -> None:
        self._units.count_anew()
        self._traffic.count_anew()
        self.store.transfers.count_anew()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transactions.close()
            self.store.transfers.close()
            self._units.close()

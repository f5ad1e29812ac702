"""A ProgramPort without a model: tokens follow a script, lanes and pages are really accounted, and every rule of the
contract is checked. A broken rule raises and is kept in ``violations``, so that a test sees it even where the engine
survives the exception."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fakes.scripted_context import Kept, KeptSession, Owner, carry_out

from ninfer.context import (
    AdoptionTicket,
    Candidate,
    CaptureOffer,
    CaptureSkip,
    CheckpointKind,
    CheckpointRef,
    Infeasible,
    OwnerSummary,
    ResourcePlan,
    ResourceResult,
    Shortage,
    StartStatus,
    Target,
    TerminalResult,
    TransactionKind,
    TransactionStatus,
)  # fmt: skip
from ninfer.contract import (
    Handle,
    HandleTable,
    MaskProvider,
    PendingBatch,
    PreparedRequest,
    ProducedRow,
    RowDecision,
    RowStatus,
    SequenceHandle,
    TokenScore,
    UnitLicense,
)  # fmt: skip
from ninfer.errors import InvariantError
from ninfer.work import PrefillWork

EOS = 0
_NOTHING = Candidate(None, 0, False, PrefillWork())
CALL = 7
"""A content token that stands for a whole tool call."""


def script(request: PreparedRequest, index: int) -> int:
    """Output token ``index`` of a request: EOS at the index its first prompt token names, else 10..255 by hash. A first
    token of 200 + i asks for a tool call at index i."""
    tokens = request.identity.tokens
    if index == int(tokens[0]):
        return EOS
    if index == int(tokens[0]) - 200 < 50:
        return CALL
    digest = hashlib.blake2b(
        tokens.tobytes() + request.sampling.seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=2
    )
    return 10 + int.from_bytes(digest.digest(), "little") % 246


class Faults:
    """Exceptions to raise inside named calls, before or after the call has changed anything."""

    def __init__(self) -> None:
        self.armed: dict[tuple[str, str], tuple[BaseException, int]] = {}
        self.fired: list[str] = []
        self.after_failure: BaseException | None = None
        """Raised by every mutating call once a fault has fired, cleanup included."""

    def arm(self, call: str, error: BaseException, when: str = "before", skip: int = 0) -> None:
        """Raise ``error`` in that call, after it went well ``skip`` times."""
        self.armed[call, when] = (error, skip)

    def check(self, call: str, when: str) -> None:
        error, skip = self.armed.pop((call, when), (None, 0))
        if error is not None and skip:
            self.armed[call, when] = (error, skip - 1)
        elif error is not None:
            self.fired.append(call)
            raise error
        if self.fired and self.after_failure is not None:
            raise self.after_failure


@dataclass
class Sequence_:
    request: PreparedRequest
    lane: int
    reserved: int
    output: list[int] = field(default_factory=list)
    executed: int = 0
    phase: str = "prefill"
    points: dict[int, tuple[int, CheckpointKind]] = field(default_factory=dict)
    """Checkpoints of its own, id -> (frontier, kind)."""

    @property
    def ledger(self) -> tuple[int, ...]:
        """Executed tokens. The last output token is not."""
        return (*self.request.identity.tokens.tolist(), *self.output[:-1])[: max(self.executed, 0)]

    @property
    def left(self) -> int:
        return self.request.effective_output - len(self.output)


@dataclass
class Open:
    """A started transaction."""

    plan: ResourcePlan
    session: KeptSession
    polls: int
    failing: bool


class ScriptedProgram:
    """lanes, pages of ``page`` tokens, context tokens. ``polls``: how long a started transaction stays running.
    ``drafts``: a decode row yields up to that many tokens beyond its first, as far as its licence goes."""

    def __init__(
        self, lanes: int = 2, pages: int = 16, page: int = 8, context: int = 64, polls: int = 0, drafts: int = 0
    ) -> None:
        self.lanes, self.pages, self.page, self.context = lanes, pages, page, context
        self.polls, self.drafts = polls, drafts
        self.faults = Faults()
        self.script = script
        self.stale_starts = 0
        self.fail_rows: set[int] = set()
        """Lanes whose next decode row ends without a legal token."""
        self.violations: list[str] = []
        self.calls: list[str] = []
        self.units: list[tuple[str, tuple[int, ...]]] = []
        """(kind, lanes) of every unit, in order."""
        self.on_unit: Callable[[str], None] = lambda kind: None
        self.resource_revision = 0
        self.closed = 0
        self._sequences: HandleTable[Sequence_] = HandleTable("sequence")
        self.kept = Kept(page)
        self.fail_copies = 0
        """Started transactions whose copies will not happen."""
        self._plans: dict[int, KeptSession] = {}
        self._next_plan = 1
        self._open: Open | None = None
        self._pending: tuple[PendingBatch, tuple[Sequence_, ...]] | None = None
        self._thread: int | None = None

    # bookkeeping

    def _rule(self, holds: bool, message: str) -> None:
        if not holds:
            if not self.faults.fired:  # after a fault, cleaning up may find less than it expects
                self.violations.append(message)
            raise InvariantError(message)

    def _enter(self, call: str, *, pending: bool = False) -> None:
        self.calls.append(call)
        thread = threading.get_ident()
        self._thread = self._thread or thread
        self._rule(thread == self._thread, f"{call} on another thread")
        self._rule(not self.closed, f"{call} after close")
        busy = self._pending is not None
        self._rule(bool(self.faults.fired) or pending == busy, f"{call} while a batch is pending: {busy}")
        self.faults.check(call, "before")

    def _get(self, handle: SequenceHandle) -> Sequence_:
        sequence = self._sequences.try_get(handle)
        self._rule(sequence is not None, f"{handle} is stale")
        assert sequence is not None
        return sequence

    def _need(self, request: PreparedRequest) -> int:
        tokens = len(request.identity.tokens) + max(request.effective_output - 1, 0)
        return -(-tokens // self.page)

    @property
    def free_pages(self) -> int:
        held = sum(s.reserved for _, s in self._sequences.live())
        opened = self._open.session.need if self._open else 0
        return self.pages - held - opened - self.kept.pages()

    @property
    def unsettled(self) -> bool:
        return False

    # planning

    def isolated_root_fits(self, request: PreparedRequest) -> Infeasible | None:
        self._enter("isolated_root_fits")
        missing = self._need(request) - self.pages
        return Infeasible((Shortage("pages", missing),)) if missing > 0 else None

    def summary(self, owner: Handle) -> OwnerSummary:
        return self.kept.summary(owner, self.resource_revision)

    def inspect(self, ref: CheckpointRef | None, request: PreparedRequest, consume: bool) -> Candidate | None:
        self._enter("inspect")
        return self.kept.inspect(ref, request, consume)

    def open_session(
        self, request: PreparedRequest, lane: int, candidates: Sequence[Candidate], victims: Sequence[Handle]
    ) -> KeptSession:
        self._enter("open_session")
        self._rule(0 <= lane < self.lanes, f"lane {lane}")
        self._rule(all(s.lane != lane for _, s in self._sequences.live()), f"lane {lane} is taken")
        self._rule(candidates[-1].ref is None, "the root is the last candidate")
        session = self._session(TransactionKind.MATERIALIZE, lane, list(candidates), victims, self._need(request))
        session.request, session.plan = request, replace(session.plan, request=request.id)
        return session

    def open_capture(
        self, sequence: SequenceHandle, offer: CaptureOffer, victims: Sequence[Handle]
    ) -> KeptSession | CaptureSkip:
        self._enter("open_capture")
        s = self._get(sequence)
        self._rule(all(q in s.points for q in offer.replace), f"{offer.replace} are not the row's")
        if s.executed != offer.frontier or s.output:
            return CaptureSkip.NOT_STABLE
        pages = -(-offer.frontier // self.page) if offer.shared else 0
        session = self._session(TransactionKind.CAPTURE, None, [_NOTHING], victims, pages)
        session.sequence, session.offer = sequence, offer
        return session

    def _session(self, kind, lane, candidates, victims, need) -> KeptSession:
        self._rule(self._open is None, "planning while a transaction is open")
        self._rule(set(victims) <= set(self.kept.owners), "a victim that is not kept")
        plan = ResourcePlan(self._next_plan, self.resource_revision, kind, None, lane, Target(0, ()), {})
        self._next_plan += 1
        session = KeptSession(
            self.kept, candidates, tuple(victims), self.free_pages, need, self.resource_revision, plan, self.faults
        )
        self._plans[plan.id] = session
        return session

    def prove_backfill(
        self, head: PreparedRequest, donors: Collection[SequenceHandle], extra: PreparedRequest | None
    ) -> bool:
        self._enter("prove_backfill")
        others = sum(s.reserved for handle, s in self._sequences.live() if handle not in donors)
        return others + (self._need(extra) if extra else 0) + self._need(head) <= self.pages

    def audit_digest(self) -> int:
        return hash((tuple(sorted(self.audit().items())), self.resource_revision, len(self.kept.owners)))

    # resource transactions

    def start(self, plan: ResourcePlan, ticket: AdoptionTicket) -> StartStatus:
        self._enter("start")
        self._rule(self._open is None, "start while a transaction is open")
        self._rule(plan.id in self._plans, "a plan was started twice")
        self._rule((ticket.transaction, ticket.lane) == (plan.id, plan.lane), "a ticket for another plan")
        self._rule(ticket.claimed == plan.manifest, "a ticket with other claims")
        session = self._plans.pop(plan.id)
        if self.stale_starts:
            self.stale_starts -= 1
            return StartStatus.STALE
        self._rule(plan.revision == self.resource_revision, "the runtime started a stale plan")
        self._open = Open(plan, session, self.polls, failing=self.fail_copies > 0)
        self.fail_copies = max(0, self.fail_copies - 1)
        self.faults.check("start", "after")
        return StartStatus.STARTED

    def poll(self) -> TransactionStatus:
        self._enter("poll", pending=self._pending is not None)
        if self._open is None:
            return TransactionStatus.IDLE
        self._open.polls -= 1
        self.faults.check("poll", "after")
        if self._open.polls >= 0:
            return TransactionStatus.RUNNING
        if self._open.failing:
            return TransactionStatus.FAILED
        return TransactionStatus.READY

    def commit_transaction(self) -> ResourceResult:
        self._enter("commit_transaction")
        self._rule(self._open is not None and self._open.polls < 0, "commit before the transaction is ready")
        assert self._open is not None
        plan, session = self._open.plan, self._open.session
        self._open = None
        self.resource_revision += 1
        owners = carry_out(self.kept, plan.manifest, self.resource_revision)
        head = (plan.id, plan.kind, True, self.resource_revision)
        if plan.kind is TransactionKind.CAPTURE:
            result = self._captured(head, owners, session)
        else:
            result = self._materialized(head, owners, session, session.candidates[plan.target.candidate], plan.lane)
        self.faults.check("commit_transaction", "after")
        return result

    def _materialized(self, head, owners, session, source: Candidate, lane) -> ResourceResult:
        request, reused = session.request, source.reused_tokens
        row = Sequence_(request, lane, self._need(request), executed=reused)
        if source.ref is not None and source.consume:
            taken = self.kept.owners.pop(source.ref.owner)
            row.points = {q: point for q, point in taken.points.items() if point[0] < reused}
        how = "none" if source.ref is None else "consumed" if source.consume else "kept"
        return ResourceResult(*head, self._sequences.insert(row), reused, how, owners)  # type: ignore[arg-type]

    def _captured(self, head, owners, session) -> ResourceResult:
        offer, row = session.offer, self._get(session.sequence)
        published = number = None
        if offer.shared:
            kind = CheckpointKind.SHARED_STABLE_PREFIX
            handle = self.kept.insert("shared", Owner(row.ledger[: offer.frontier], {0: (offer.frontier, kind)}))
            published = self.summary(handle)
        if offer.private is not None:
            row.points = {q: point for q, point in row.points.items() if q not in offer.replace}
            number = max(row.points, default=-1) + 1
            row.points[number] = (offer.frontier, offer.private)
        return ResourceResult(*head, owners=owners, published=published, captured=number)

    def abort_transaction(self) -> ResourceResult:
        self._enter("abort_transaction", pending=self._pending is not None)
        self._rule(self._open is not None, "abort without a transaction")
        assert self._open is not None
        plan, self._open = self._open.plan, None
        self.resource_revision += 1
        owners = carry_out(self.kept, plan.manifest, self.resource_revision)
        self.faults.check("abort_transaction", "after")
        return ResourceResult(plan.id, plan.kind, False, self.resource_revision, owners=owners)

    def finish(self, sequence: SequenceHandle, *, endpoint: bool = True) -> TerminalResult:
        self._enter("finish")
        s = self._get(sequence)
        self._rule(not endpoint or s.phase == "ended", "finish of a sequence that has not ended")
        tokens, points = s.ledger, dict(s.points)
        if endpoint:
            points[max(points, default=-1) + 1] = (len(tokens), CheckpointKind.SESSION_ENDPOINT)
        self._release(sequence)
        summary = None
        if points:
            summary = self.summary(self.kept.insert("continuation", Owner(tokens, points)))
        self.faults.check("finish", "after")
        return TerminalResult(summary, self.resource_revision)

    def discard(self, sequence: SequenceHandle) -> TerminalResult:
        self._enter("discard")
        self._release(sequence)
        self.faults.check("discard", "after")
        return TerminalResult(None, self.resource_revision)

    def release_inactive(self, owner: Handle) -> int:
        self._enter("release_inactive")
        self._rule(self._open is None, "release while a transaction is open")
        del self.kept.owners[owner]
        self.resource_revision += 1
        return self.resource_revision

    def _release(self, handle: SequenceHandle) -> None:
        self._rule(self._open is None, "release while a transaction is open")
        self._get(handle)
        self._sequences.remove(handle)
        self.resource_revision += 1

    # model units

    def prefill_remaining(self, sequence: SequenceHandle) -> int:
        self.calls.append("prefill_remaining")
        s = self._get(sequence)
        return max(0, len(s.request.identity.tokens) - s.executed)

    def prefill(self, sequence: SequenceHandle, chunk: int) -> None:
        self._enter("prefill")
        s = self._get(sequence)
        self._rule(s.phase == "prefill" and chunk > 0, f"prefill of a {s.phase} sequence")
        left = len(s.request.identity.tokens) - s.executed
        self._rule(left > 0, "prefill without prompt left")
        self._rule(self._open is None or self._open.session.sequence != sequence, "prefill of a row under capture")
        s.executed += min(left, chunk)
        self.units.append(("prefill", (s.lane,)))
        self.on_unit("prefill")
        self.faults.check("prefill", "after")

    def finalize_prefill(
        self, sequences: Sequence[SequenceHandle], masks: MaskProvider | None, ahead: int | None = None
    ) -> PendingBatch:
        self._enter("finalize_prefill")
        self._rule(0 <= (ahead or 0) <= self.drafts, f"{ahead} drafts ahead")
        rows = tuple(self._get(h) for h in sequences)
        for s in rows:
            done = s.executed == len(s.request.identity.tokens)
            self._rule(s.phase == "prefill" and done, "finalize before the prompt is executed")
        return self._produce("finalize_prefill", "prefill", sequences, rows, [1] * len(rows))

    def decode(
        self, sequences: Sequence[SequenceHandle], licences: Sequence[UnitLicense], masks: MaskProvider | None
    ) -> PendingBatch:
        self._enter("decode")
        rows = tuple(self._get(h) for h in sequences)
        self._rule(bool(rows) and len({s.lane for s in rows}) == len(rows), "a round needs distinct rows")
        self._rule(len(licences) == len(rows), "one licence a row")
        widths = []
        for s, licence in zip(rows, licences):
            self._rule(s.phase == "decode", f"decode of a {s.phase} sequence")
            self._rule(0 <= licence.drafts <= self.drafts, f"licence of {licence.drafts} drafts")
            self._rule(1 + licence.drafts <= s.left, "a licence beyond the output budget")
            widths.append(1 + (len(s.output) * 7 + s.lane) % (licence.drafts + 1))
        return self._produce("decode", "decode", sequences, rows, widths)

    def _produce(
        self,
        call: str,
        kind: str,
        handles: Sequence[SequenceHandle],
        rows: tuple[Sequence_, ...],
        widths: Sequence[int],
    ) -> PendingBatch:
        produced = []
        for handle, s, width in zip(handles, rows, widths):
            if kind == "decode" and s.lane in self.fail_rows:
                self.fail_rows.discard(s.lane)
                produced.append(ProducedRow(handle, (), RowStatus.CONSTRAINT_FAILED))
                continue
            begin = len(s.output)
            tokens = tuple(self.script(s.request, begin + i) for i in range(width))
            wanted = s.request.sampling.logprobs
            top = tuple((t, -1.0 - t) for t in range(max(wanted, 0)))
            scores = tuple(TokenScore(-float(t), top) for t in tokens) if wanted >= 0 else None
            produced.append(ProducedRow(handle, tokens, RowStatus.OK, scores, width - 1))
        self.units.append((kind, tuple(s.lane for s in rows)))
        self.on_unit(kind)
        self.faults.check(call, "after")
        batch = PendingBatch(kind, tuple(handles), tuple(produced))  # type: ignore[arg-type]
        self._pending = (batch, rows)
        return batch

    def control(self, sequence: SequenceHandle, tokens: Sequence[int]) -> PendingBatch:
        self._enter("control")
        s = self._get(sequence)
        ready = s.phase == "decode" or (s.phase == "prefill" and s.executed == len(s.request.identity.tokens))
        self._rule(ready and 1 <= len(tokens) <= s.left, f"{len(tokens)} forced tokens, {s.left} left")
        self.units.append(("control", (s.lane,)))
        self.on_unit("control")
        self.faults.check("control", "after")
        batch = PendingBatch("control", (sequence,), (ProducedRow(sequence, tuple(tokens)),))
        self._pending = (batch, (s,))
        return batch

    def wait(self, batch: PendingBatch) -> tuple[ProducedRow, ...]:
        self._enter("wait", pending=True)
        self._rule(self._pending is not None and self._pending[0] is batch, "not the pending batch")
        self._rule(not batch.waited, "waited for twice")
        self.faults.check("wait", "after")
        batch.produce(batch.state)  # type: ignore[arg-type]
        return batch.rows

    def commit(
        self, batch: PendingBatch, decisions: Sequence[RowDecision], follow: bool = False
    ) -> PendingBatch | None:
        """Follows except where a row enters another page."""
        self._enter("commit", pending=True)
        rows = self._consume(batch)
        self._rule(len(decisions) == len(rows), "one decision a row")
        for s, row, d in zip(rows, batch.rows, decisions):
            produced = len(row.tokens)
            if d.cancelled or row.status is RowStatus.CONSTRAINT_FAILED:
                self._rule(d.accepted == 0 and d.terminal, f"a cancelled or failed row: {d}")
            else:
                self._rule(1 <= d.accepted <= produced, f"accepted {d.accepted} of {produced}")
                self._rule(d.terminal or d.accepted == produced, f"a row that goes on must accept all: {d}")
                self._rule(all(0 < b <= d.accepted for b in d.boundaries), f"boundaries {d.boundaries}")
                s.output += row.tokens[: d.accepted]
                s.executed = len(s.request.identity.tokens) + len(s.output) - 1
                s.phase = "decode"
            if d.terminal:
                s.phase = "ended"
            else:
                self._rule(s.left > 0, "a row goes on without output left")
        self.faults.check("commit", "after")
        if not follow:
            return None
        alone = all((d.accepted, d.terminal, d.boundaries) == (1, False, ()) for d in decisions)
        self._rule(batch.kind == "decode" and alone, "a round to follow whose rows do not just go on")
        self._rule(len(rows) == len(self.sequences()), "a round to follow that leaves rows out")
        self._rule(self._open is None and not self.drafts, "a round to follow where there is more to do")
        if any(s.executed % self.page == 0 for s in rows):
            return None
        self.faults.check("decode", "before")
        return self._produce("decode", "decode", batch.sequences, rows, [1] * len(rows))

    def abort_pending(self, batch: PendingBatch) -> None:
        self._enter("abort_pending", pending=True)
        for s in self._consume(batch):
            s.phase = "aborted"
        self.faults.check("abort_pending", "after")

    def _consume(self, batch: PendingBatch) -> tuple[Sequence_, ...]:
        self._rule(self._pending is not None and self._pending[0] is batch, "not the pending batch")
        batch.consume()
        assert self._pending is not None
        rows = self._pending[1]
        self._pending = None
        return rows

    # facts

    def audit(self) -> Mapping[str, int]:
        live = [s for _, s in self._sequences.live()]
        return {
            "lanes": len(live),
            "pages": self.pages - sum(s.reserved for s in live),
            "kept": len(self.kept.owners),
            "open": int(self._open is not None),
            "pending": int(self._pending is not None),
        }

    def sequences(self) -> dict[int, Sequence_]:
        """Live sequences by request id."""
        return {s.request.id: s for _, s in self._sequences.live()}

    def stats(self) -> Mapping[str, int]:
        return {"pages.used": self.pages - self.free_pages}

    def gaps(self) -> tuple[tuple[int, int], ...]:
        return ()

    def count_anew(self) -> None:
        self._enter("count_anew")

    def close(self) -> None:
        self.closed += 1

"""Program under a random control plane: admissions, units, partial decisions, cancellations and faults in any order.

Every produced token is compared with the oracle of its request, and the audit with a model of who holds what.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fakes.program_driver import GREEDY, Masks, make_request, mask_words, plan_start, ticket
from fakes.symbolic import Oracle, SymbolicDevice, SymbolicModel
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer.context import ResourcePlan, StartStatus, TransactionStatus
from ninfer.contract import Handle, PendingBatch, RowDecision, RowStatus, UnitLicense
from ninfer.errors import DeviceError
from ninfer.program import ExplicitKV, KVCodec, Shape, open_program
from ninfer.program.layout import pages

VOCABULARY = 37
SHAPE = Shape(rows=3, context=192, chunk=48, control=4, codec=KVCodec.FP32, vocabulary=VOCABULARY)
PAGES = 6


@dataclass
class Row:
    oracle: Oracle
    lane: int
    sequence: Handle
    prefilled: int = 0
    started: bool = False
    ended: bool = False

    @property
    def room(self) -> int:
        return self.oracle.request.effective_output - (len(self.oracle.ledger) - self.oracle.prompt)


class ProgramMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.device = SymbolicDevice(delayed=True)
        self.program = open_program(self.device, SymbolicModel(VOCABULARY), SHAPE, ExplicitKV(PAGES * 64))
        self.start = self.program.audit()
        self.rows: list[Row] = []
        self.opened: tuple[ResourcePlan, Oracle, int] | None = None
        self.pending: tuple[PendingBatch, list[Row]] | None = None
        self.stale: list[Handle] = []
        self.revision = 0
        self.ids = 0

    # -- resource transactions -------------------------------------------------------------------------------------

    @precondition(lambda self: self.opened is None and len(self.rows) < 3)
    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=100),
        output=st.integers(1, 70),
        penalty=st.sampled_from([0.0, 1.5]),
        hot=st.booleans(),
        split=st.integers(1, 99),
    )
    def admit(self, tokens, output, penalty, hot, split) -> None:
        self.ids += 1
        sampling = dataclasses.replace(
            GREEDY, temperature=float(hot), presence_penalty=penalty, frequency_penalty=penalty / 4, seed=self.ids << 31
        )
        request = make_request(tokens, output, sampling, self.ids, (split,), self.ids)
        lane = min({0, 1, 2} - {row.lane for row in self.rows})
        needed = pages(len(tokens) + output - 1)
        free = self.program.audit()["pages.main.available"]
        assert self.program.isolated_root_fits(request) is None
        plan = plan_start(self.program, request, lane)
        assert isinstance(plan, ResourcePlan) == (needed <= free)
        if isinstance(plan, ResourcePlan):
            assert self.program.start(plan, ticket(plan)) is StartStatus.STARTED
            assert self.program.poll() is TransactionStatus.READY
            self.opened = (plan, Oracle(request), needed)

    @precondition(lambda self: self.opened is not None)
    @rule(commit=st.booleans())
    def close_transaction(self, commit: bool) -> None:
        plan, oracle, _ = self.opened
        self.opened = None
        if commit:
            self.revision += 1
            sequence = self.program.commit_transaction().sequence
            assert sequence not in self.stale
            self.rows.append(Row(oracle, plan.lane, sequence))
        else:
            self.program.abort_transaction()

    @precondition(lambda self: self.opened is None and self.pending is None and self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.program.discard(row.sequence)
        self.rows.remove(row)
        self.stale.append(row.sequence)
        self.revision += 1

    # -- units -----------------------------------------------------------------------------------------------------

    def ready(self, kind: str) -> list[Row]:
        if self.pending is not None:
            return []
        live = [row for row in self.rows if not row.ended]
        if kind == "prefill":
            return [row for row in live if row.prefilled < row.oracle.prompt]
        done = [row for row in live if row.prefilled == row.oracle.prompt and row.room > 0]
        if kind == "control":
            return done
        return [row for row in done if row.started == (kind == "decode")]

    @precondition(lambda self: self.ready("prefill"))
    @rule(data=st.data(), chunk=st.integers(1, 48))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        row = data.draw(st.sampled_from(self.ready("prefill")))
        self.program.prefill(row.sequence, chunk)
        split = row.oracle.request.identity.execution_frontiers[0]
        end = min(row.prefilled + chunk, row.oracle.prompt)
        row.prefilled = split if row.prefilled < split < end else end
        assert self.program.prefill_remaining(row.sequence) == row.oracle.prompt - row.prefilled

    @precondition(lambda self: self.ready("finalize") or self.ready("decode"))
    @rule(
        data=st.data(),
        fault=st.sampled_from([None, None, None, "launch", "sample", "download", "mask"]),
        at_once=st.booleans(),
    )
    def sample(self, data: st.DataObject, fault: str | None, at_once: bool) -> None:
        kind = data.draw(st.sampled_from([k for k in ("finalize", "decode") if self.ready(k)]))
        rows = data.draw(st.lists(st.sampled_from(self.ready(kind)), min_size=1, unique_by=id))
        legal = data.draw(
            st.dictionaries(st.integers(0, len(rows) - 1), st.sets(st.integers(0, VOCABULARY - 1), max_size=3))
        )
        masks = Masks(legal, ZeroDivisionError() if fault == "mask" else None)
        expected = [row.oracle.draw(mask_words(legal[i], 2) if i in legal else None) for i, row in enumerate(rows)]
        if fault == "launch":
            self.device.faults[fault] = 0
        elif fault in ("sample", "download"):
            self.device.late_faults[fault] = 0
        sequences = [row.sequence for row in rows]
        try:
            if kind == "finalize":
                batch = self.program.finalize_prefill(sequences, masks)
            else:
                batch = self.program.decode(sequences, [UnitLicense()] * len(rows), masks)
            if at_once or fault is not None:
                self.program.wait(batch)
        except (DeviceError, ZeroDivisionError):
            assert fault is not None
            assert self.device.finished == self.device.submitted
            for row in rows:
                row.ended = True
            return
        finally:
            self.device.faults.clear()
            self.device.late_faults.clear()
        assert fault is None or (fault == "mask" and not legal)
        self.pending, self.expected = (batch, rows), [() if t == -1 else (t,) for t in expected]
        self.legal = legal

    @precondition(lambda self: self.ready("control"))
    @rule(data=st.data())
    def control(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.ready("control")))
        forced = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=min(4, row.room)))
        self.pending, self.expected = (self.program.control(row.sequence, forced), [row]), [tuple(forced)]

    @precondition(lambda self: self.pending is not None)
    @rule(data=st.data(), abort=st.sampled_from([False, False, False, True]), follow=st.booleans())
    def settle(self, data: st.DataObject, abort: bool, follow: bool) -> None:
        batch, rows = self.pending
        self.pending = None
        if abort:
            self.program.abort_pending(batch)
            for row in rows:
                row.ended = True
            return
        decisions = []
        self.program.wait(batch)
        assert [row.tokens for row in batch.rows] == self.expected
        assert [row.status is RowStatus.CONSTRAINT_FAILED for row in batch.rows] == [not t for t in self.expected]
        for row, produced in zip(rows, batch.rows):
            n = len(produced.tokens)
            if n == 0 or data.draw(st.sampled_from([False] * 5 + [True])):
                decision = RowDecision(0, terminal=True, cancelled=n > 0)
            else:
                last = data.draw(st.sampled_from([False] * 3 + [True]))
                decision = RowDecision(data.draw(st.integers(1, n)) if last else n, terminal=last)
            decisions.append(decision)
            row.oracle.accept(produced.tokens[: decision.accepted])
            row.started = True
            row.ended = decision.terminal
        following = self.program.commit(batch, decisions, follow)
        if following is not None:
            assert follow
            assert batch.kind == "decode"
            assert not any(d.terminal for d in decisions)
            self.legal = {i: data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=3)) for i in self.legal}
            words = [mask_words(self.legal[i], 2) if i in self.legal else None for i in range(len(rows))]
            expected = [row.oracle.draw(mask) for row, mask in zip(rows, words)]
            if self.legal:
                self.program.fill(following, Masks(self.legal))
            self.pending, self.expected = (following, rows), [() if t == -1 else (t,) for t in expected]

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def the_audit_is_what_the_rows_hold(self) -> None:
        audit = self.program.audit()
        opened = [] if self.opened is None else [self.opened[2]]
        held = opened + [pages(row.oracle.prompt + row.oracle.request.effective_output - 1) for row in self.rows]
        assert audit["pages.main.allocated"] + audit["pages.main.reserved"] == sum(held)
        assert audit["pages.main.available"] == PAGES - sum(held)
        assert audit["state_slots"] == audit["rows.main"] == len(held)
        assert (audit["lanes"], audit["transactions"]) == (len(self.rows), len(opened))
        assert self.program.resource_revision == self.revision

    def teardown(self) -> None:
        if self.opened is not None:
            self.program.abort_transaction()
        if self.pending is not None:
            self.program.abort_pending(self.pending[0])
        for row in self.rows:
            self.program.discard(row.sequence)
        assert self.program.audit() == self.start
        self.program.close()
        assert self.device.held == 0


TestProgram = ProgramMachine.TestCase

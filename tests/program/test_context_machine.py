"""Program under a random control plane that keeps, shares, continues, demotes and evicts histories, with faults in
every copy and every unit. Each sampled token is compared with what the request's ledger alone says, the stores with a
walk over their objects, and what a plan does with what its session said it would do."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from fakes.program_driver import GREEDY, make_request, ticket
from fakes.symbolic import Oracle, SymbolicDevice, SymbolicModel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer.context import (
    CaptureOffer,
    CaptureSkip,
    CheckpointKind,
    CheckpointRef,
    ResourcePlan,
    StartStatus,
    Target,
    TransactionStatus,
)
from ninfer.contract import Handle, PreparedRequest, RowDecision, UnitLicense
from ninfer.errors import DeviceError
from ninfer.program import ExplicitKV, KVCodec, Retention, Shape, open_program
from ninfer.program.layout import PoolKind
from ninfer.program.planning import Session

VOCABULARY = 37
DEEP = os.environ.get("NINFER_HYPOTHESIS_PROFILE") == "full"
EXAMPLES, WITH_DRAFTS = (2000, 2000) if DEEP else (60, 20)
PAGE_BYTES = 512
ENDS = ["go on", "end", "cancel"]
KINDS = [CheckpointKind.TURN_CLOSURE, CheckpointKind.RESPONSE_REPLAY, CheckpointKind.LONG_ANCHOR]


@dataclass
class Row:
    oracle: Oracle
    lane: int
    sequence: Handle
    executed: int
    target: int
    """Tokens to execute before it decodes: the prompt, or all it had executed when it was paused."""
    started: bool = False
    ended: bool = False
    captures: int = 0

    @property
    def prompt(self) -> int:
        return self.oracle.prompt

    @property
    def room(self) -> int:
        return self.oracle.request.effective_output - (len(self.oracle.ledger) - self.prompt)


@dataclass
class Opened:
    plan: ResourcePlan
    before: dict[str, int]
    pages: dict[PoolKind, int]
    states: int
    request: PreparedRequest | None = None
    row: Row | None = None
    """The row that is captured, or that goes on."""


class ContextMachine(RuleBasedStateMachine):
    window = 0
    """Drafts of a round; with any, every history has a second pool."""
    drafting: bool | str = False

    @initialize(
        rows=st.integers(1, 3),
        spare=st.integers(0, 3),
        extra=st.integers(0, 6),
        host_states=st.integers(0, 3),
        host_pages=st.integers(0, 8),
        superblock=st.integers(1, 3),
    )
    def start(self, rows, spare, extra, host_states, host_pages, superblock) -> None:
        shape = Shape(rows, 256, 48, 4, KVCodec.FP32, VOCABULARY, spare, self.window)
        size = superblock * PAGE_BYTES
        retention = Retention(extra * 64, host_states, host_pages * size, size)
        self.device = SymbolicDevice(delayed=True)
        kv = ExplicitKV((max(4, rows) + min(extra, 4 * rows + extra - max(4, rows))) * 64)
        self.model = SymbolicModel(VOCABULARY, drafting=self.drafting)
        self.program = open_program(self.device, self.model, shape, kv, retention)
        self.store = self.program.store
        self.first = self.program.audit()
        self.lanes = rows
        self.rows: list[Row] = []
        self.paused: list[tuple[Row, PreparedRequest]] = []
        self.opened: Opened | None = None
        self.revision = 0
        self.ids = 0

    def teardown(self) -> None:
        if not hasattr(self, "program"):
            return
        if self.opened is not None:
            self.device.copy_queue.hold = False
            self.program.abort_transaction()
        for row in self.rows:
            self.program.discard(row.sequence)
        for owner, _ in list(self.store.histories.live()):
            self.program.release_inactive(owner)
        assert self.program.audit() == self.first
        self.program.close()
        assert self.device.held == 0

    # -- planning

    def draw_levels(self, data: st.DataObject, session: Session) -> Target:
        ladders = [session.ladder(0, i) for i in range(len(session.victims(0)))]
        for ladder in ladders:
            assert 2 <= len(ladder) <= 8
            for a, b in pairwise(ladder):
                assert b.kept <= a.kept
                assert b.device_states <= a.device_states
                assert all(x >= y for x, y in zip(a.device_pages, b.device_pages))
        return Target(0, tuple(data.draw(st.integers(0, len(ladder) - 1)) for ladder in ladders))

    def open(self, data: st.DataObject, session: Session, request=None, row=None) -> bool:
        """Seal and start a target, if it is feasible; degrade everybody, if nothing less will do."""
        before, digest = self.program.audit(), self.program.audit_digest()
        target = self.draw_levels(data, session)
        worst = Target(0, tuple(len(session.ladder(0, i)) - 1 for i in range(len(target.levels))))
        if not session.assess(target).feasible:
            target = worst
        assessment = session.assess(target)
        assert (self.program.audit(), self.program.audit_digest()) == (before, digest)
        if not assessment.feasible:
            return False
        assert self.recoveries_never_fall(session, target)
        incoming, (pages, images) = session._incoming[0], session._moves(target)
        _, snapshot = session._shortages(incoming, pages, images)
        left = {}
        for kind, kv in self.store.kv.items():
            freed = len(pages[kind].device) + len(pages[kind].demoted)
            left[kind] = kv.pool.available + freed - incoming.units.get(kind, 0)
        slots = self.store.states.available + len(images.device) + len(images.demoted) + incoming.freed
        slots -= 0 if snapshot else max(0, incoming.states)
        plan = session.seal(target)
        for owner, gone in plan.manifest.items():
            assert gone <= set(self.store.histories.get(owner).checkpoints)
        self.opened = Opened(plan, before, left, slots, request, row)
        assert self.program.start(plan, ticket(plan)) is StartStatus.STARTED
        if data.draw(st.integers(0, 3)):  # most transitions go through at once
            assert self.program.poll() is TransactionStatus.READY
            self.check_projection()
            self.commit()
        return True

    def recoveries_never_fall(self, session: Session, target: Target) -> bool:
        """Degrading an owner by one more level never makes a way back cheaper."""

        def least(t: Target) -> dict[CheckpointRef, int]:
            found = session.assess(t).recovery
            return {
                ref: min(r.prefill.tokens * 10**6 + sum(b.bytes for b in r.restore) for r in ways)
                for ref, ways in found.items()
            }

        base = least(target)
        for i, level in enumerate(target.levels):
            if level and level + 1 < len(session.ladder(0, i)):
                more = least(Target(0, (*target.levels[:i], level + 1, *target.levels[i + 1 :])))
                for ref, cost in base.items():
                    assert more[ref] >= cost
        return True

    @precondition(lambda self: self.opened is None and len(self.rows) < self.lanes)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        self.start_request(data)

    @precondition(lambda self: self.opened is None and len(self.rows) < self.lanes)
    @rule(data=st.data(), rounds=st.integers(0, 8), at=st.integers(0, 2), rest=st.integers(0, 12))
    def turn(self, data: st.DataObject, rounds: int, at: int, rest: int) -> None:
        """A request from its start to what it leaves, with a capture on the way, and a rest after some rounds."""
        if not self.start_request(data) or self.opened is not None:
            return
        row = self.rows[-1]
        for i in range(8):
            if i == at and self.opened is None:
                self.take_checkpoint(data, row)
            if row.executed < row.target and row in self.running():
                self.run_prefill(row, 40)
        if row.executed < row.target or row not in self.running():
            return
        for i in range(rounds):
            if i == rest and self.opened is None and not row.ended:
                self.run_pause(row, snapshot=at == 1)
                if not self.run_resume(data) or self.opened is not None:
                    return
                row = self.rows[-1]
                for _ in range(8):
                    if row.executed < row.target:
                        self.run_prefill(row, 40)
            self.run_round([row], None, "end" if i == rounds - 1 else "go on")
        if self.opened is None:
            self.run_end(row, "finish" if row.ended else "captures")

    def start_request(self, data: st.DataObject) -> bool:
        """A new prompt, or one that continues a history from somewhere."""
        self.ids += 1
        tokens = np.random.default_rng(self.ids).integers(0, 3, data.draw(st.integers(1, 90))).tolist()
        histories = list(self.store.histories.live())
        if histories and data.draw(st.integers(0, 3)):
            old = data.draw(st.sampled_from(histories))[1].identity.tokens.tolist()
            keep = data.draw(st.sampled_from([len(old), len(old), 1 + len(old) // 2]))
            tokens = old[:keep] + data.draw(st.sampled_from([tokens, tokens, []]))
        tokens = tokens[:200]
        output = data.draw(st.integers(1, 50))
        warm = float(self.ids % 2)
        sampling = dataclasses.replace(GREEDY, temperature=warm, presence_penalty=0.5, seed=self.ids << 31)
        request = make_request(tokens, output, sampling, id=self.ids)
        positions = np.broadcast_to(np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
        request = dataclasses.replace(request, identity=dataclasses.replace(request.identity, positions=positions))
        return self.plan_request(data, request)

    def plan_request(self, data: st.DataObject, request: PreparedRequest, row: Row | None = None) -> bool:
        """From a checkpoint that matches, or from nothing."""
        tokens = request.identity.tokens.tolist()
        assert self.program.isolated_root_fits(request) is None
        consume = data.draw(st.integers(0, 2)) > 0
        matching = []
        for owner, history in self.store.histories.live():
            for number, checkpoint in history.checkpoints.items():
                candidate = self.program.inspect(CheckpointRef(owner, number), request, consume)
                known = history.identity.tokens[: checkpoint.frontier].tolist()
                assert (candidate is not None) == (known == tokens[: checkpoint.frontier])
                matching += [candidate] if candidate is not None else []
        root = self.program.inspect(None, request, False)
        candidate = data.draw(st.sampled_from([*matching, *matching, root] if matching else [root]))
        lane = min(set(range(self.lanes)) - {row.lane for row in self.rows})
        owners = data.draw(st.permutations([owner for owner, _ in self.store.histories.live()]))
        session = self.program.open_session(request, lane, [candidate], owners)
        assert candidate.ref is None or candidate.ref.owner not in session.victims(0)
        started = self.open(data, session, request=request, row=row)
        if not started and candidate is root and not self.program.unsettled:
            # Only active rows can stand in the way: with every history gone the root still does not fit.
            assert not self.program.prove_backfill(request, [], None)
        return started

    @precondition(lambda self: self.opened is None and self.capturable())
    @rule(data=st.data(), snapshot=st.booleans())
    def pause(self, data: st.DataObject, snapshot: bool) -> None:
        self.run_pause(data.draw(st.sampled_from(self.capturable())), snapshot)

    def run_pause(self, row: Row, snapshot: bool) -> None:
        result = self.program.pause(row.sequence, snapshot=snapshot)
        self.revision += 1
        assert result.revision_after == self.revision
        self.rows.remove(row)
        self.paused.append((row, result.request))

    @precondition(lambda self: self.opened is None and self.paused and len(self.rows) < self.lanes)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.run_resume(data)

    def run_resume(self, data: st.DataObject) -> bool:
        """It goes on with the token it would have had."""
        row, request = data.draw(st.sampled_from(self.paused[-2:]))
        started = self.plan_request(data, request, row)
        if started:
            self.paused = [(other, asked) for other, asked in self.paused if other is not row]
        return started

    @precondition(lambda self: self.opened is None and self.capturable())
    @rule(data=st.data())
    def capture(self, data: st.DataObject) -> None:
        self.take_checkpoint(data, data.draw(st.sampled_from(self.capturable())))

    def take_checkpoint(self, data: st.DataObject, row: Row) -> None:
        private, shared = data.draw(st.sampled_from([None, *KINDS])), data.draw(st.booleans())
        record = self.store.sequences.get(row.sequence)
        ids = frozenset(record.checkpoints) if data.draw(st.booleans()) else frozenset()
        offer = CaptureOffer(record.frontier, private, shared, ids)
        session = self.program.open_capture(row.sequence, offer, [o for o, _ in self.store.histories.live()])
        if not isinstance(session, CaptureSkip):
            self.open(data, session, row=row)

    def capturable(self) -> list[Row]:
        return [row for row in self.rows if not row.ended]

    @precondition(lambda self: self.opened is None and len(list(self.store.histories.live())) > 0)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        session = self.program.open_demotion([o for o, _ in self.store.histories.live()])
        self.open(data, session)

    # -- the open transition

    @precondition(lambda self: self.opened is not None)
    @rule(
        fault=st.sampled_from([None, None, None, None, "up", "down", "copy", "host", "zero"]),
        late=st.booleans(), hold=st.booleans(),
    )  # fmt: skip
    def advance(self, fault: str | None, late: bool, hold: bool) -> None:
        self.device.copy_queue.hold = hold
        if fault is not None:
            (self.device.late_faults if late and fault in ("up", "down") else self.device.faults)[fault] = 0
        status = self.program.poll()
        fired = fault is not None and fault not in self.device.faults and fault not in self.device.late_faults
        self.device.faults.clear()
        self.device.late_faults.clear()
        self.device.copy_queue.hold = False
        if fired and status is not TransactionStatus.FAILED:
            raise AssertionError(f"a fault at {fault} left the transition {status}")
        if status is TransactionStatus.FAILED:
            self.abort()
        elif status is TransactionStatus.READY:
            self.check_projection()

    def check_projection(self) -> None:
        """Everything has been taken that the session projected, and nothing else."""
        assert {kind: kv.pool.available for kind, kv in self.store.kv.items()} == self.opened.pages
        assert self.store.states.available == self.opened.states

    @precondition(lambda self: self.opened is not None)
    @rule()
    def commit(self) -> None:
        if self.program.poll() is not TransactionStatus.READY:
            return
        opened, self.opened = self.opened, None
        result = self.program.commit_transaction()
        self.revision += 1
        assert result.committed
        for outcome in result.owners:
            history = self.store.histories.try_get(outcome.owner)
            assert outcome.evicted == (history is None)
            assert outcome.surviving == (frozenset(history.checkpoints) if history else frozenset())
        if opened.request is not None:
            executed, target = result.reused_tokens, len(opened.request.identity.tokens)
            oracle = opened.row.oracle if opened.row is not None else Oracle(opened.request)
            started = opened.row is not None and opened.row.started
            row = Row(oracle, opened.plan.lane, result.sequence, executed, target, started)
            assert self.program.prefill_remaining(row.sequence) == target - executed
            self.rows.append(row)
        elif opened.row is not None:
            assert (result.captured is not None) or (result.published is not None)

    @precondition(lambda self: self.opened is not None)
    @rule()
    def abort(self) -> None:
        opened, self.opened = self.opened, None
        before = {o: frozenset(h.checkpoints) for o, h in self.store.histories.live()}
        result = self.program.abort_transaction()
        self.revision += bool(opened.plan.manifest)
        if opened.request is not None and opened.row is not None:
            self.paused.append((opened.row, opened.request))
        assert not result.committed
        assert result.sequence is None
        assert {o: frozenset(h.checkpoints) for o, h in self.store.histories.live()} == before
        after = self.program.audit()
        assert after["lanes"] == opened.before["lanes"]
        assert after["rows.main"] == opened.before["rows.main"]
        if not opened.plan.manifest:
            assert after["pages.main.available"] == opened.before["pages.main.available"]
            assert after["state_slots"] == opened.before["state_slots"]

    # -- units

    def running(self) -> list[Row]:
        captured = self.opened.row if self.opened is not None and self.opened.request is None else None
        return [row for row in self.rows if not row.ended and row is not captured]

    @precondition(lambda self: any(row.executed < row.target for row in self.running()))
    @rule(data=st.data(), chunk=st.sampled_from([1, 7, 48, 48]))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        self.run_prefill(data.draw(st.sampled_from([r for r in self.running() if r.executed < r.target])), chunk)

    def run_prefill(self, row: Row, chunk: int) -> None:
        self.settles([row])
        self.program.prefill(row.sequence, chunk)
        row.executed = min(row.executed + chunk, row.target)

    @precondition(lambda self: any(row.executed >= row.target and row.room > 0 for row in self.running()))
    @rule(data=st.data(), fault=st.sampled_from([None] * 6 + ["launch"]), last=st.sampled_from(ENDS))
    def sample(self, data: st.DataObject, fault: str | None, last: str) -> None:
        ready = [r for r in self.running() if r.executed >= r.target and r.room > 0]
        started = data.draw(st.sampled_from(ready)).started
        self.run_round([r for r in ready if r.started == started], fault, last)

    def run_round(self, rows: list[Row], fault: str | None, last: str) -> None:
        rows = [r for r in rows if r.room > 0 and not r.ended]
        if not rows:
            return
        started = rows[0].started
        self.device.run_until(self.device.submitted)  # what the round before drafts
        if fault:
            self.device.faults[fault] = 0
        sequences = [row.sequence for row in rows]
        licences = [UnitLicense(min(self.window, row.room - 1)) for row in rows]
        self.model.seen.clear()
        try:
            if started:
                batch = self.program.decode(sequences, licences, None)
            else:
                batch = self.program.finalize_prefill(sequences, None)
            self.program.wait(batch)
        except DeviceError:
            assert fault
            for row in rows:
                row.ended = True
            return
        self.device.run_until(self.device.submitted)
        decisions = []
        for i, (row, produced) in enumerate(zip(rows, batch.rows)):
            if last == "cancel" and i == 0:
                decisions.append(RowDecision(0, terminal=True, cancelled=True))
                row.ended = True
                continue
            if started:
                self.settles([row])
            for token in produced.tokens:
                assert token == row.oracle.draw()
                row.oracle.accept([token])
            row.started, row.ended = True, row.room == 0 or (last == "end" and i == 0)
            decisions.append(RowDecision(len(produced.tokens), terminal=row.ended))
            if self.drafting == "block":
                assert self.model.seen[2 * i : 2 * i + 2] == row.oracle.context()
        self.program.commit(batch, decisions)

    @precondition(lambda self: any(row.executed >= row.target and row.room > 0 for row in self.running()))
    @rule(data=st.data(), accepted=st.integers(0, 4))
    def control(self, data: st.DataObject, accepted: int) -> None:
        row = data.draw(st.sampled_from([r for r in self.running() if r.executed >= r.target and r.room > 0]))
        forced = data.draw(st.lists(st.integers(0, 36), min_size=1, max_size=min(4, row.room)))
        batch = self.program.control(row.sequence, forced)
        accepted = min(accepted, len(forced))
        record = self.store.sequences.get(row.sequence)
        if accepted and record.length + accepted - 1 > record.frontier:
            self.settles([row])
        terminal = accepted < len(forced) or row.room == accepted
        self.program.commit(batch, [RowDecision(accepted, terminal=terminal, cancelled=not accepted)])
        row.oracle.accept(forced[:accepted])
        row.started, row.ended = row.started or accepted > 0, terminal

    def settles(self, rows: list[Row]) -> None:
        self.revision += sum(self.store.sequences.get(row.sequence).binding.forked for row in rows)

    # -- ends

    @precondition(lambda self: self.opened is None and self.rows)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "captures", "discard"]))
    def end(self, data: st.DataObject, how: str) -> None:
        self.run_end(data.draw(st.sampled_from(self.rows)), how)

    def run_end(self, row: Row, how: str) -> None:
        record = self.store.sequences.get(row.sequence)
        captures = len(record.checkpoints)
        endpoint = record.intact and not record.binding.forked and record.frontier > 0
        self.rows.remove(row)
        self.revision += 1
        if how == "discard" or (how == "finish" and not row.ended):
            assert self.program.discard(row.sequence).retained is None
            return
        kept = self.program.finish(row.sequence, endpoint=how == "finish").retained
        expected = captures + (how == "finish" and endpoint)
        assert (0 if kept is None else len(kept.checkpoints)) == expected
        if kept is not None:
            tokens = self.store.histories.get(kept.owner).identity.tokens.tolist()
            assert tokens == row.oracle.ledger[: max(c.key.frontier for c in kept.checkpoints)]

    @precondition(lambda self: self.opened is None and len(list(self.store.histories.live())) > 0)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([o for o, _ in self.store.histories.live()]))
        self.revision += 1
        assert self.program.release_inactive(owner) == self.revision

    # -- what always holds

    @invariant()
    def the_stores_agree_with_themselves(self) -> None:
        if not hasattr(self, "program"):
            return
        audit = self.program.audit()
        assert audit["lanes"] == len(self.rows)
        assert audit["pages.main.available"] >= 0
        assert self.program.resource_revision == self.revision
        for owner, _ in self.store.histories.live():
            self.program.summary(owner)
        if self.opened is None:
            images = self.store.states.images
            held = {c.image for _, r in self.store.sequences.live() for c in r.checkpoints.values()}
            assert sum(images.get(i).device is not None for i in held) <= self.store.spare


class DraftingMachine(ContextMachine):
    window = 3
    drafting = True


class CompanionMachine(ContextMachine):
    """The companion's own state, paged and in the image, comes along wherever a history goes."""

    window = 3
    drafting = "block"


TestContext = ContextMachine.TestCase
TestContext.settings = settings(max_examples=EXAMPLES, stateful_step_count=50)
TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = settings(max_examples=WITH_DRAFTS, stateful_step_count=50)
TestCompanion = CompanionMachine.TestCase
TestCompanion.settings = settings(max_examples=WITH_DRAFTS, stateful_step_count=50)

"""Program over the symbolic model: the tokens depend on the ledger alone, whatever happens around it."""

from __future__ import annotations

import dataclasses
import random
import re

import numpy as np
import pytest
from fakes.program_driver import (
    GREEDY,
    Masks,
    accept_all,
    admit,
    first,
    make_request,
    mask_words,
    plan_start,
    prefill,
    step,
    ticket,
)
from fakes.symbolic import Oracle, SymbolicDevice, SymbolicModel
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.context import ResourcePlan, Shortage, StartStatus, TransactionStatus
from ninfer.contract import Handle, RowDecision, RowStatus, SamplingSpec, UnitLicense
from ninfer.errors import DeviceError, InvariantError, OutOfDeviceMemory, StaleHandle
from ninfer.program import AutomaticKV, ExplicitKV, KVCodec, Program, Shape, open_program
from ninfer.program.batches import Batches
from ninfer.program.memory import measure
from ninfer.program.widths import recording_bytes

SHAPE = Shape(rows=3, context=256, chunk=64, control=6, codec=KVCodec.FP32, vocabulary=37)
WARM = SamplingSpec(0.8, 1.0, 0, 0.0, 0.5, 0.25, (7 << 32) | 5)
rng = np.random.default_rng(5)
PROMPTS = [rng.integers(0, 37, n).tolist() for n in (1, 63, 64, 65, 130, 7)]


def program(delayed: bool = True, tokens: int = 768) -> Program:
    return open_program(SymbolicDevice(delayed), SymbolicModel(), SHAPE, ExplicitKV(tokens))


def device_of(p: Program) -> SymbolicDevice:
    return p._units.device


@pytest.mark.parametrize("delayed", [False, True])
def test_a_request_from_prompt_to_last_token(delayed: bool) -> None:
    p = program(delayed)
    start = p.audit()
    request = make_request(PROMPTS[3], 70, WARM, rope_delta=-9)
    s = admit(p, request, 0)
    prefill(p, s, 64)
    tokens = first(p, [s])
    while len(tokens) < 70:
        tokens += step(p, [s])
    assert [t for (t,) in tokens] == Oracle(request).generate(70)
    with pytest.raises(InvariantError):
        p.decode([s], [UnitLicense()], None)
    p.discard(s)
    assert p.audit() == start
    p.close()


@given(st.integers(0, 2**32))
def test_tokens_do_not_depend_on_batch_lane_or_chunk(seed: int) -> None:
    dice = random.Random(seed)
    p = program()
    start = p.audit()
    requests = [
        make_request(dice.choice(PROMPTS), 6, dataclasses.replace(WARM, seed=i), rope_delta=i) for i in range(5)
    ]
    waiting, running, produced = list(range(5)), {}, {i: [] for i in range(5)}
    while waiting or running:
        if waiting and len(running) < 3 and dice.random() < 0.5:
            i = waiting.pop(0)
            lane = dice.choice(sorted({0, 1, 2} - {lane for _, lane in running.values()}))
            running[i] = (admit(p, requests[i], lane), lane)
        ready = []
        for i, (s, _) in running.items():
            if p.prefill_remaining(s):
                p.prefill(s, dice.choice([1, 7, 32, 64]))
            elif not produced[i]:
                produced[i] += [t for (t,) in first(p, [s])]
            else:
                ready.append(i)
        dice.shuffle(ready)
        if ready:
            for i, (t,) in zip(ready, step(p, [running[i][0] for i in ready])):
                produced[i].append(t)
        for i in [i for i in running if len(produced[i]) == 6]:
            p.discard(running.pop(i)[0])
    assert produced == {i: Oracle(r).generate(6) for i, r in enumerate(requests)}
    assert p.audit() == start


@pytest.mark.parametrize("delayed", [False, True])
def test_a_prefill_unit_runs_in_the_narrowest_recording(delayed: bool) -> None:
    """Only a device that works beside the host has any; what a chunk lacks is padding that changes nothing."""
    p = program(delayed)
    s = admit(p, make_request(PROMPTS[4], 9), 0)
    launches = []
    for chunk in (1, 17, 33, 64, 64):
        before = p.stats()["launches"]
        p.prefill(s, chunk)
        launches.append(p.stats()["launches"] - before)
    assert launches == [delayed] * 5
    assert [p._units.columns(n) for n in (1, 17, 33)] == ([16, 32, 64] if delayed else [1, 17, 33])
    assert first(p, [s]) == [(Oracle(make_request(PROMPTS[4], 9)).draw(),)]


def test_a_prefill_unit_stops_at_execution_frontiers() -> None:
    p = program()
    s = admit(p, make_request(PROMPTS[4], 2, frontiers=(10, 70)), 0)
    left = []
    while p.prefill_remaining(s):
        p.prefill(s, 64)
        left.append(130 - p.prefill_remaining(s))
    assert left == [10, 70, 130]


def test_masks_bind_their_rows_only_and_cost_nothing_without_rows() -> None:
    p = program()
    requests = [make_request(PROMPTS[5], 4, id=i) for i in range(2)]
    s = [admit(p, r, i) for i, r in enumerate(requests)]
    for sequence in s:
        prefill(p, sequence, 64)
    oracles = [Oracle(r) for r in requests]
    for masks, uploads in ((Masks({}), 1), (Masks({1: {4, 9}}), 2), (Masks({0: {36}, 1: set(range(37))}), 2)):
        before = p.stats()["uploads"]
        tokens = (first if not oracles[0].ledger[7:] else step)(p, s, masks)
        assert p.stats()["uploads"] == before + uploads
        for i, (token,) in enumerate(tokens):
            legal = masks.legal.get(i)
            assert token == oracles[i].draw(None if legal is None else mask_words(legal, 2))
            oracles[i].accept([token])
        assert masks.fills == len(masks.legal)


def test_a_dead_end_fails_its_row_and_no_other() -> None:
    p = program()
    requests = [make_request(PROMPTS[i], 4, id=i) for i in range(3)]
    s = [admit(p, r, i) for i, r in enumerate(requests)]
    for sequence in s:
        prefill(p, sequence, 64)
    first(p, s)
    batch = p.decode(s, [UnitLicense()] * 3, Masks({1: set()}))
    p.wait(batch)
    assert [row.status for row in batch.rows] == [RowStatus.OK, RowStatus.CONSTRAINT_FAILED, RowStatus.OK]
    assert batch.rows[1].tokens == ()
    with pytest.raises(InvariantError):
        p.commit(batch, [RowDecision(1), RowDecision(0), RowDecision(1)])
    p.commit(batch, [RowDecision(1), RowDecision(0, terminal=True), RowDecision(1)])
    p.discard(s[1])
    assert [t for (t,) in step(p, [s[0], s[2]])] == [Oracle(requests[i]).generate(3)[2] for i in (0, 2)]


def test_a_fault_in_the_provider_ends_the_batch_and_publishes_nothing() -> None:
    p = program()
    start = p.audit()
    s = admit(p, make_request(PROMPTS[0], 4), 0)
    prefill(p, s, 64)
    first(p, [s])
    with pytest.raises(ZeroDivisionError):
        p.decode([s], [UnitLicense()], Masks({0: {1}}, ZeroDivisionError()))
    assert device_of(p).finished == device_of(p).submitted
    with pytest.raises(InvariantError):
        p.decode([s], [UnitLicense()], None)
    p.discard(s)
    assert p.audit() == start


def test_a_fault_before_the_launch_touches_no_row() -> None:
    class Broken(Masks):
        def constrained_rows(self):
            raise ZeroDivisionError

    p = program()
    request = make_request(PROMPTS[0], 4)
    s = admit(p, request, 0)
    prefill(p, s, 64)
    with pytest.raises(ZeroDivisionError):
        p.finalize_prefill([s], Broken({}))
    tokens = first(p, [s])
    with pytest.raises(ZeroDivisionError):
        p.decode([s], [UnitLicense()], Broken({}))
    assert [t for (t,) in tokens + step(p, [s])] == Oracle(request).generate(2)


@pytest.mark.parametrize(
    ("fault", "late"), [("launch", False), ("download", False), *((n, True) for n in ("upload", "launch", "download"))]
)
def test_device_faults_end_the_batch(fault: str, late: bool) -> None:
    p = program()
    start = p.audit()
    s = [admit(p, make_request(PROMPTS[0], 4, id=i), i) for i in range(2)]
    for sequence in s:
        prefill(p, sequence, 64)
    first(p, s)
    device = device_of(p)
    if late:
        device.late_faults["forward" if fault == "launch" else fault] = 0
    else:
        device.faults[fault] = 0
    with pytest.raises(DeviceError):
        p.wait(p.decode(s, [UnitLicense()] * 2, None))
    assert p.audit()["pending_rows"] == 0
    for sequence in s:
        with pytest.raises(InvariantError):
            p.decode([sequence], [UnitLicense()], None)
        p.discard(sequence)
    assert p.audit() == start
    p.close()


def test_a_round_is_launched_without_waiting_and_read_only_after_it() -> None:
    p = program(delayed=True)
    s = admit(p, make_request(PROMPTS[0], 4), 0)
    prefill(p, s, 64)
    tokens = first(p, [s])
    device = device_of(p)
    device.run_until(device.submitted)
    finished, batch = device.finished, p.decode([s], [UnitLicense()], None)
    assert device.finished == finished < device.submitted
    for early in (lambda: batch.rows, lambda: p.commit(batch, [RowDecision(1)]), lambda: p.control(s, [1])):
        with pytest.raises(InvariantError):
            early()
    assert p.wait(batch) is p.wait(batch) is batch.rows
    tokens += accept_all(p, batch)
    with pytest.raises(InvariantError):
        p.wait(batch)
    assert [t for (t,) in tokens] == Oracle(make_request(PROMPTS[0], 4)).generate(2)
    p.close()


def started(p: Program, output: int = 9) -> list[Handle]:
    """Two rows of short prompts, whose first round has run; what follows has pages and a settled state."""
    rows = [admit(p, make_request(PROMPTS[i], output, WARM, id=i), i) for i in (0, 1)]
    for row in rows:
        prefill(p, row, 64)
    first(p, rows)
    step(p, rows)
    return rows


def test_rounds_that_follow_give_the_tokens_of_rounds_that_are_asked_for() -> None:
    """They are launched by the commit before them, except where a row needs a page or has no output left."""
    p = program(delayed=True)
    start = p.audit()
    requests = [make_request(PROMPTS[i], 100, WARM, id=i) for i in (0, 4)]
    rows = [admit(p, request, i) for i, request in enumerate(requests)]
    for row in rows:
        prefill(p, row, 64)
    produced = [first(p, rows)]
    batch, asked = None, 0
    while len(produced) < 100:
        if batch is None:
            batch, asked = p.decode(rows, [UnitLicense()] * 2, None), asked + 1
        produced.append([row.tokens for row in p.wait(batch)])
        batch = p.commit(batch, [RowDecision(1)] * 2, follow=True)
    assert batch is None
    assert asked == 3, "once at the start, and where each row enters a page"
    for row, request in enumerate(requests):
        assert [tokens[row][0] for tokens in produced] == Oracle(request).generate(100)
    assert p.stats()["decode_tokens"] == 198
    for row in rows:
        p.discard(row)
    assert p.audit() == start


def test_a_round_that_follows_is_on_the_device_before_the_one_before_it_is_taken_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = program(delayed=True)
    (row, other), device = started(p), device_of(p)
    batch = p.decode([row], [UnitLicense()], None)
    p.wait(batch)
    submitted, seen = device.submitted, []
    take = Batches._take_in
    monkeypatch.setattr(Batches, "_take_in", lambda *a: (seen.append(device.submitted - submitted), take(*a))[1])
    following = p.commit(batch, [RowDecision(1)], follow=True)
    assert seen[0] > 0
    assert device.submitted - submitted == seen[0]
    assert (following.waited, p.audit()["pending_rows"]) == (False, 1)
    with pytest.raises(InvariantError, match="pending"):
        p.decode([other], [UnitLicense()], None)
    assert accept_all(p, following)


def test_rounds_follow_only_what_just_goes_on() -> None:
    p = program(delayed=True)
    rows = started(p)
    alone = [RowDecision(1)] * 2

    def outcome(batch, decisions):
        p.wait(batch)
        return p.commit(batch, decisions, follow=True)

    step(p, rows[:1])
    assert outcome(p.control(rows[0], [5]), [RowDecision(1)]) is None, "forced tokens"
    assert outcome(p.control(rows[1], [5]), [RowDecision(1)]) is None
    plan = plan_start(p, make_request(PROMPTS[0], 4, id=7), 2)
    p.start(plan, ticket(plan))
    assert outcome(p.decode(rows, [UnitLicense()] * 2, None), alone) is None, "a transaction"
    p.abort_transaction()
    assert outcome(p.decode(rows, [UnitLicense()] * 2, None), [RowDecision(1), RowDecision(1, terminal=True)]) is None
    following = outcome(p.decode(rows[:1], [UnitLicense()], None), [RowDecision(1)])
    assert following is not None
    p.abort_pending(following)
    with pytest.raises(InvariantError):
        p.decode(rows[:1], [UnitLicense()], None)


def test_masks_of_a_round_that_follows_are_filled_while_it_runs() -> None:
    p = program(delayed=True)
    start = p.audit()
    requests = [make_request(PROMPTS[i], 60, WARM, id=i) for i in (0, 1, 5)]
    rows, oracles = [admit(p, request, i) for i, request in enumerate(requests)], [Oracle(r) for r in requests]
    for row in rows:
        prefill(p, row, 64)
    legal = [{0: {1, 5, 9}, 2: {3 + i % 30, 30}} for i in range(40)]
    produced = first(p, rows, Masks(legal[0]))
    batch, followed = None, 0
    for masks in legal:
        for oracle, tokens in zip(oracles, produced):
            oracle.accept(tokens)
        if batch is None:
            batch = p.decode(rows, [UnitLicense()] * 3, Masks(masks))
        else:
            followed += 1
            for early in (lambda: p.wait(batch), lambda: p.fill(batch, Masks({0: {1}}))):  # noqa: B023
                with pytest.raises(InvariantError):
                    early()
            p.fill(batch, Masks(masks))
            with pytest.raises(InvariantError):
                p.fill(batch, Masks(masks))
        produced = [row.tokens for row in p.wait(batch)]
        want = [o.draw(mask_words(masks[i], 2) if i in masks else None) for i, o in enumerate(oracles)]
        assert [token for (token,) in produced] == want
        batch = p.commit(batch, [RowDecision(1)] * 3, follow=True)
    assert followed > 35
    p.abort_pending(batch)
    for row in rows:
        p.discard(row)
    assert p.audit() == start


@pytest.mark.parametrize("masks", [Masks({0: {1}}, ZeroDivisionError()), Masks({0: set()})], ids=["fault", "dead end"])
def test_masks_of_a_round_that_follows_may_fail(masks: Masks) -> None:
    p = program(delayed=True)
    start = p.audit()
    rows, device = started(p), device_of(p)
    batch = p.decode(rows, [UnitLicense()] * 2, Masks({0: {3}}))
    p.wait(batch)
    batch = p.commit(batch, [RowDecision(1)] * 2, follow=True)
    if masks.fault is None:
        p.fill(batch, masks)
        assert [row.status for row in p.wait(batch)] == [RowStatus.CONSTRAINT_FAILED, RowStatus.OK]
        assert p.commit(batch, [RowDecision(0, terminal=True), RowDecision(1)], follow=True) is None
    else:
        with pytest.raises(ZeroDivisionError):
            p.fill(batch, masks)
        assert device.finished == device.submitted
        with pytest.raises(InvariantError):
            p.decode(rows, [UnitLicense()] * 2, None)
    for row in rows:
        p.discard(row)
    assert p.audit() == start


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_in_a_round_that_follows_ends_its_rows(late: bool) -> None:
    p = program(delayed=True)
    start = p.audit()
    rows, device = started(p), device_of(p)
    batch = p.decode(rows, [UnitLicense()] * 2, None)
    p.wait(batch)
    if late:
        device.late_faults["forward"] = 0
        following = p.commit(batch, [RowDecision(1)] * 2, follow=True)
        with pytest.raises(DeviceError):
            p.wait(following)
    else:
        device.faults["launch"] = 0
        with pytest.raises(DeviceError):
            p.commit(batch, [RowDecision(1)] * 2, follow=True)
        p.abort_pending(batch)
    assert p.audit()["pending_rows"] == 0
    for row in rows:
        with pytest.raises(InvariantError):
            p.decode([row], [UnitLicense()], None)
        p.discard(row)
    assert p.audit() == start


def test_logits_that_are_not_finite_are_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fakes.symbolic.hashed_logits", lambda h, v: np.full(v, np.nan, np.float32))
    p = program()
    s = admit(p, make_request(PROMPTS[0], 4), 0)
    prefill(p, s, 64)
    batch = p.finalize_prefill([s], None)
    with pytest.raises(DeviceError, match="not finite"):
        p.wait(batch)
    assert batch.spent
    p.discard(s)


@settings(max_examples=25)
@given(st.data())
def test_control_equals_deciding_the_same_tokens(data: st.DataObject) -> None:
    p = program()
    request = make_request(data.draw(st.sampled_from(PROMPTS)), 24, dataclasses.replace(WARM, seed=3), rope_delta=5)
    oracle, s = Oracle(request), admit(p, request, 1)
    prefill(p, s, 64)
    while len(oracle.ledger) - oracle.prompt < 18:
        if data.draw(st.booleans()):
            forced = data.draw(st.lists(st.integers(0, 36), min_size=1, max_size=6))
            batch = p.control(s, forced)
            assert batch.rows[0].tokens == tuple(forced)
            accept_all(p, batch)
            oracle.accept(forced)
        else:
            expected = oracle.draw()
            if oracle.ledger[oracle.prompt :]:
                assert step(p, [s]) == [(expected,)]
            else:
                assert first(p, [s]) == [(expected,)]
            oracle.accept([expected])


def image_of(p: Program, sequence) -> tuple[int, int]:
    """What the device holds of a sequence: its recurrent state and its continuation hidden."""
    device_of(p).close()
    memory, slot = p._units.memory, p._sequences.get(sequence).slot
    return int(memory.model.state.array[slot]), int(memory.stored.array[slot, 0])


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_the_state_image_is_complete_at_every_frontier(accepted: int) -> None:
    p = program()
    request = make_request(PROMPTS[1], 12)
    oracle, other, s = Oracle(request), admit(p, make_request(PROMPTS[5]), 2), admit(p, request, 0)
    p.prefill(s, 20)
    assert image_of(p, s) == oracle.image(20)
    prefill(p, s, 64)
    assert image_of(p, s) == oracle.image(63)
    oracle.accept(first(p, [s])[0])
    assert image_of(p, s) == oracle.image(63)
    oracle.accept(step(p, [s])[0])
    assert image_of(p, s) == oracle.image(64)
    batch = p.control(s, [1, 2, 3, 4])
    assert image_of(p, s) == oracle.image(64)
    p.commit(batch, [RowDecision(accepted, terminal=True, boundaries=(1, accepted) if accepted > 1 else ())])
    oracle.accept([1, 2, 3, 4][:accepted])
    assert image_of(p, s) == oracle.image(64 + accepted)
    record = p._sequences.get(s)
    assert record.ledger[: record.length].tolist() == oracle.ledger
    assert (record.frontier, record.length) == (64 + accepted, 65 + accepted)
    assert record.boundaries == ([66, 65 + accepted] if accepted > 1 else [])
    assert p.finish(s).retained is not None
    p.discard(other)


def test_forced_tokens_that_do_not_fit_are_refused() -> None:
    p = program()
    s = admit(p, make_request(PROMPTS[5], 5), 0)
    with pytest.raises(InvariantError):
        p.control(s, [1])
    prefill(p, s, 64)
    for tokens in ([], [1] * 6, [37], [-1]):
        with pytest.raises(InvariantError):
            p.control(s, tokens)
    accept_all(p, p.control(s, [1] * 5))
    with pytest.raises(InvariantError):
        p.control(s, [1])


DECISIONS = [
    (RowDecision(0), False),
    (RowDecision(0, terminal=True), False),
    (RowDecision(2), False),
    (RowDecision(1, terminal=True), True),
    (RowDecision(3, terminal=True), True),
    (RowDecision(3), True),
    (RowDecision(4, terminal=True), False),
    (RowDecision(1, terminal=True, cancelled=True), False),
    (RowDecision(0, cancelled=True), False),
    (RowDecision(0, terminal=True, cancelled=True), True),
    (RowDecision(3, boundaries=(0,)), False),
    (RowDecision(3, boundaries=(1, 3)), True),
    (RowDecision(3, boundaries=(2, 1)), False),
    (RowDecision(2, terminal=True, boundaries=(3,)), False),
]


@pytest.mark.parametrize(("decision", "legal"), DECISIONS)
def test_decisions_are_checked_before_anything_changes(decision: RowDecision, legal: bool) -> None:
    p = program()
    s = admit(p, make_request(PROMPTS[5], 9), 0)
    prefill(p, s, 64)
    first(p, [s])
    batch = p.control(s, [1, 2, 3])
    if legal:
        p.commit(batch, [decision])
        with pytest.raises(InvariantError):
            p.commit(batch, [decision])
        with pytest.raises(InvariantError):
            p.abort_pending(batch)
    else:
        with pytest.raises(InvariantError):
            p.commit(batch, [decision])
        with pytest.raises(InvariantError):
            p.commit(batch, [decision, decision])
        p.commit(batch, [RowDecision(3)])


def test_one_batch_is_pending_at_a_time_and_an_aborted_row_can_only_be_released() -> None:
    p = program()
    start = p.audit()
    a, b = (admit(p, make_request(PROMPTS[i], 5, id=i), i) for i in range(2))
    prefill(p, a, 64)
    prefill(p, b, 32)
    batch = p.finalize_prefill([a, b], None)
    for unit in (
        lambda: p.finalize_prefill([a], None),
        lambda: p.decode([a], [UnitLicense()], None),
        lambda: p.control(a, [1]),
        lambda: p.prefill(b, 1),
        lambda: p.discard(a),
    ):
        with pytest.raises(InvariantError):
            unit()
    p.abort_pending(batch)
    for sequence in (a, b):
        with pytest.raises(InvariantError):
            p.control(sequence, [1])
        p.discard(sequence)
    assert p.audit() == start


def test_units_refuse_rows_they_cannot_run() -> None:
    p = program()
    a, b = (admit(p, make_request(PROMPTS[5], 5, id=i), i) for i in range(2))
    licence = UnitLicense()
    for unit in (
        lambda: p.decode([a], [licence], None),
        lambda: p.finalize_prefill([a], None),
        lambda: p.prefill(a, 65),
        lambda: p.prefill(a, 0),
        lambda: p.decode([], [], None),
        lambda: p.finish(a),
    ):
        with pytest.raises(InvariantError):
            unit()
    prefill(p, a, 64)
    prefill(p, b, 64)
    with pytest.raises(InvariantError):
        p.prefill(a, 1)
    with pytest.raises(InvariantError):
        p.finalize_prefill([a, a], None)
    first(p, [a, b])
    for rows, licences in (([a, b], [licence]), ([a], [UnitLicense(1)]), ([a, a], [licence] * 2)):
        with pytest.raises(InvariantError):
            p.decode(rows, licences, None)
    p.discard(a)
    for call in (p.discard, p.finish, p.prefill_remaining):
        with pytest.raises(StaleHandle):
            call(a)
    c = admit(p, make_request(PROMPTS[0], 5), 0)
    assert (c.index, c.generation) == (a.index, a.generation + 1)


def test_transactions_move_the_revision_once_and_leave_nothing_behind() -> None:
    p = program()
    start, request = p.audit(), make_request(PROMPTS[4], 100)
    assert p.poll() is TransactionStatus.IDLE
    plan = plan_start(p, request, 0)
    assert isinstance(plan, ResourcePlan)
    assert (plan.revision, plan.lane, plan.manifest) == (0, 0, {})
    with pytest.raises(InvariantError):
        p.start(plan, dataclasses.replace(ticket(plan), lane=1))
    assert p.audit() == start
    assert p.start(plan, ticket(plan)) is StartStatus.STARTED
    assert p.poll() is TransactionStatus.READY
    other = plan_start(p, make_request(PROMPTS[0], 1), 1)
    assert p.start(other, ticket(other)) is StartStatus.STALE
    assert p.audit()["pages.main.reserved"] == 4
    assert p.abort_transaction().revision_after == 0
    assert p.audit() == start
    for broken in (p.abort_transaction, p.commit_transaction, lambda: p.start(plan, ticket(plan))):
        with pytest.raises(InvariantError):
            broken()
    plan = plan_start(p, request, 0)
    p.start(plan, ticket(plan))
    p.poll()
    result = p.commit_transaction()
    assert (result.committed, result.reused_tokens, result.revision_after, p.resource_revision) == (True, 0, 1, 1)
    assert p.start(other, ticket(other)) is StartStatus.STALE
    with pytest.raises(InvariantError):
        plan_start(p, request, 0)
    prefill(p, result.sequence, 64)
    first(p, [result.sequence])
    step(p, [result.sequence])
    assert p.resource_revision == 1
    plan = plan_start(p, make_request(PROMPTS[0], 1), 1)
    p.start(plan, ticket(plan))
    with pytest.raises(InvariantError):
        p.discard(result.sequence)
    step(p, [result.sequence])
    p.abort_transaction()
    assert p.discard(result.sequence).revision_after == 2
    assert p.audit() == start


def test_what_is_missing_is_named() -> None:
    p = program(tokens=256)
    big = make_request(PROMPTS[4], 127)
    assert p.isolated_root_fits(big) is None
    for request, shortage in (
        (make_request(PROMPTS[4], 128), Shortage("context", 1)),
        (make_request([], 1), Shortage("prompt", 1)),
        (make_request([1], 0), Shortage("output", 1)),
    ):
        verdict = p.isolated_root_fits(request)
        assert verdict is not None
        assert shortage in verdict.shortages
        with pytest.raises(InvariantError):
            plan_start(p, request, 0)
    s = admit(p, make_request(PROMPTS[4], 30), 0)
    assert plan_start(p, big, 1) == (Shortage("pages.main", 3),)
    p.discard(s)
    assert not isinstance(plan_start(p, big, 1), tuple)


def test_scores_are_reported_to_the_rows_that_ask() -> None:
    p = program()
    specs = [GREEDY, dataclasses.replace(GREEDY, logprobs=0), dataclasses.replace(GREEDY, logprobs=3)]
    s = [admit(p, make_request(PROMPTS[5], 4, spec, id=i), i) for i, spec in enumerate(specs)]
    for sequence in s:
        prefill(p, sequence, 64)
    plain, bare, three = p.wait(p.finalize_prefill(s, None))
    assert plain.scores is None
    assert bare.scores is not None
    assert bare.scores[0].top == ()
    assert three.scores is not None
    (score,) = three.scores
    assert score.top[0] == (three.tokens[0], score.logprob)
    assert len(score.top) == 3
    assert score.top[0][1] > score.top[1][1] > score.top[2][1]


def test_stats_count_what_moves() -> None:
    p = program()
    s = [admit(p, make_request(PROMPTS[5], 5, id=i), i) for i in range(2)]
    for sequence in s:
        prefill(p, sequence, 64)
    first(p, s)
    before = p.stats()
    for _ in range(3):
        step(p, s)
    after = p.stats()
    moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert moved.pop("upload_bytes") < 3 * 8192
    assert moved.pop("download_bytes") == 3 * 512
    assert moved.pop("decode_device_ns") > 0
    assert [rows for rows, _ in p.gaps()] == [2, 2]
    assert moved.pop("decode_gap_ns") == sum(ns for _, ns in p.gaps()) > 0
    assert moved == {
        "launches": 6, "uploads": 3, "downloads": 3, "decode_rounds": 3, "decode_tokens": 6, "decode_gaps": 2,
        "decode_bytes": 3 * (1000 + 2 * 2 * 8) + 2 * (8 + 9 + 10) * 8,
    }  # fmt: skip
    assert after["prefill_tokens"] == 14
    assert (after["pages.main.total"], after["pages.main.used"], after["state_slots.used"]) == (12, 2, 2)
    p.count_anew()
    assert p.gaps() == ()


def test_the_plan_is_what_is_used_and_what_does_not_fit_is_refused_with_numbers() -> None:
    p = program(tokens=512)
    plan = measure(device_of(p), SymbolicModel(), SHAPE, 8)
    graphs = 100 * (SHAPE.rows + 3)
    assert p.components == {"weights": 1000} | plan | {"graphs": graphs}
    assert sum(plan.values()) == p.report.planned_bytes - graphs == device_of(p).held
    assert {"kv", "state", "workspace", "logits", "masks", "sampling", "frames"} <= set(plan)
    assert plan["operations"] == 512, "what Ops work in, once"
    smallest = measure(device_of(p), SymbolicModel(), SHAPE, 4)
    smallest |= {"graphs": 100 * SHAPE.rows}  # a device that does not work beside the host records no prefill
    free = sum(smallest.values()) - 1
    with pytest.raises(OutOfDeviceMemory) as caught:
        open_program(SymbolicDevice(memory=free), SymbolicModel(), SHAPE, AutomaticKV(0))
    assert caught.value.plan == {"weights": 1000} | smallest
    assert caught.value.free == free
    assert "what would fit: max_context" in str(caught.value)
    fits = open_program(SymbolicDevice(memory=free + 1), SymbolicModel(), SHAPE, AutomaticKV(0))
    assert fits.stats()["pages.main.total"] == 4


@pytest.mark.parametrize("window", [0, 3])
def test_a_plan_that_does_not_fit_says_which_option_would(window: int) -> None:
    """What is named fits when it is tried, and the next larger value does not."""
    shape = dataclasses.replace(SHAPE, window=window, spare=3)
    model = SymbolicModel(drafting=window > 0)
    whole = sum(measure(SymbolicDevice(), model, shape, 4).values()) + recording_bytes(SymbolicDevice(), shape)
    tried = 0
    for free in (whole - 1, whole * 7 // 8, whole * 3 // 4, whole // 2):
        with pytest.raises(OutOfDeviceMemory) as caught:
            open_program(SymbolicDevice(memory=free), model, shape, AutomaticKV(0))
        assert ('spec "none"' in str(caught.value)) == (window > 0)
        named = re.findall(r"(max_context|max_concurrency|device_state_slots|prefill_chunk) (\d+)", str(caught.value))
        fields = {
            "max_context": "context",
            "max_concurrency": "rows",
            "device_state_slots": "spare",
            "prefill_chunk": "chunk",
        }
        for name, value in named:
            step = 64 if fields[name] in ("context", "chunk") else 1
            fitting = dataclasses.replace(shape, **{fields[name]: int(value)})
            open_program(SymbolicDevice(memory=free), model, fitting, AutomaticKV(0)).close()
            larger = dataclasses.replace(shape, **{fields[name]: int(value) + step})
            with pytest.raises(OutOfDeviceMemory):
                open_program(SymbolicDevice(memory=free), model, larger, AutomaticKV(0))
            tried += 1
    assert tried > 1


@pytest.mark.parametrize("fails", [False, True])
def test_closing_frees_graphs_before_memory_and_only_once(fails: bool) -> None:
    p = program()
    device = device_of(p)
    s = admit(p, make_request(PROMPTS[5], 5), 0)
    p.prefill(s, 3)
    if fails:
        device.late_faults["record"] = 0
    p.close()
    p.close()
    assert device.held == 0
    assert device.events == ["graph closed"] * len(device.graphs) + ["arena closed"]
    assert fails or device.finished == device.submitted


def test_two_programs_never_share_what_operations_work_in() -> None:
    p = program(delayed=False)
    device = device_of(p)
    shared, held = device.ops.shared, device.held
    with pytest.raises(InvariantError, match="a second area"):
        open_program(device, SymbolicModel(), SHAPE, ExplicitKV(512))
    assert device.held == held
    assert device.ops.shared is shared, "the one that works keeps its own"
    p.close()
    assert device.ops.shared is None
    open_program(device, SymbolicModel(), SHAPE, ExplicitKV(512)).close()
    assert device.held == 0


@pytest.mark.parametrize("place", ["arena", "capture"])
def test_a_failed_start_returns_its_memory(place: str) -> None:
    class Broken(SymbolicModel):
        def place(self, scope, device, p):
            if place == "arena" and device.held:
                raise ZeroDivisionError
            return super().place(scope, device, p)

    class Device(SymbolicDevice):
        def capture(self, work):
            if place == "capture" and len(self.graphs) == 4:
                raise ZeroDivisionError
            return super().capture(work)

    device = Device(delayed=True)
    with pytest.raises(ZeroDivisionError):
        open_program(device, Broken(), SHAPE, AutomaticKV(0))
    assert device.held == 0
    assert device.events == ["graph closed"] * len(device.graphs) + ["arena closed"]

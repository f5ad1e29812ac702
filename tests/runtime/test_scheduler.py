"""Order and membership as pure decisions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ninfer.runtime.record import RequestState
from ninfer.runtime.scheduler import AdmissionEpoch, Attempt, Scheduler, Unit

PREFILL, CAPTURE, DECODE, CONTROL, ENDING = (
    RequestState.PREFILL,
    RequestState.CAPTURE,
    RequestState.DECODE_READY,
    RequestState.CONTROL_READY,
    RequestState.TERMINAL_PENDING,
)
EPOCH = AdmissionEpoch(queue=0, lanes=0, prefill=0, transactions=0, revision=0)


@dataclass
class Row:
    state: RequestState
    lane: int


def rows(*states):
    return [Row(state, lane) for lane, state in enumerate(states)]


def test_nothing_runs_without_rows():
    assert Scheduler().choose([]) is None
    assert Scheduler().choose(rows(ENDING, CAPTURE)) is None


def test_prefill_and_decode_alternate():
    scheduler, both = Scheduler(concurrent_prefill=True), rows(PREFILL, DECODE)
    assert [scheduler.choose(both).kind for _ in range(4)] == ["prefill", "decode", "prefill", "decode"]


def test_prefill_runs_on_while_nothing_is_ready():
    scheduler = Scheduler()
    assert [scheduler.choose(rows(PREFILL)).kind for _ in range(3)] == ["prefill"] * 3


def test_control_goes_first():
    assert Scheduler().choose(rows(PREFILL, DECODE, CONTROL)) == Unit("control", (2,))


@given(st.lists(st.sampled_from([PREFILL, DECODE, ENDING]), max_size=8), st.integers(0, 5))
def test_a_decode_round_is_exactly_the_ready_rows(states, warm):
    scheduler = Scheduler(concurrent_prefill=True)
    for _ in range(warm):
        scheduler.choose(rows(PREFILL, DECODE))
    units = [scheduler.choose(rows(*states)) for _ in range(2)]
    ready = tuple(lane for lane, state in enumerate(states) if state is DECODE)
    assert all(unit.lanes == ready for unit in units if unit is not None and unit.kind == "decode")
    assert bool(ready) == any(unit is not None and unit.kind == "decode" for unit in units)


@given(st.sets(st.integers(0, 7), min_size=1))
def test_staged_prefills_take_turns(lanes):
    scheduler = Scheduler(concurrent_prefill=True)
    staged = [Row(PREFILL, lane) for lane in sorted(lanes)]
    order = [scheduler.choose(staged).lanes[0] for _ in range(2 * len(staged))]
    assert sorted(order[: len(staged)]) == sorted(lanes)
    assert order[: len(staged)] == order[len(staged) :]


def test_the_head_alone_may_try():
    scheduler = Scheduler()
    assert scheduler.next_attempt(EPOCH, []) is None
    scheduler.enqueue(1)
    scheduler.enqueue(2)
    assert scheduler.next_attempt(EPOCH, []) == Attempt(1)
    scheduler.withdraw(1)
    assert scheduler.next_attempt(EPOCH, []) == Attempt(2)


def test_a_refused_head_waits_for_any_part_of_the_epoch_to_move():
    scheduler = Scheduler()
    scheduler.enqueue(1)
    assert scheduler.next_attempt(EPOCH, []) == Attempt(1)
    scheduler.on_refused(1)
    assert scheduler.next_attempt(EPOCH, []) is None
    for name in ("queue", "lanes", "prefill", "transactions", "revision"):
        moved = AdmissionEpoch(**{f: int(f == name) for f in AdmissionEpoch.__slots__})
        assert scheduler.next_attempt(moved, []) == Attempt(1)
        scheduler.on_refused(1)


def test_past_a_protected_head_the_others_try_in_order_and_the_head_again_first():
    scheduler = Scheduler()
    for request in (1, 2, 3):
        scheduler.enqueue(request)
    assert scheduler.next_attempt(EPOCH, []) == Attempt(1)
    scheduler.on_refused(1)
    assert scheduler.next_attempt(EPOCH, []) is None, "without protection nobody passes the head"
    scheduler.protect(1, [7, 8])
    assert scheduler.next_attempt(EPOCH, []) == Attempt(2, scheduler.protected)
    scheduler.on_refused(2)
    assert scheduler.next_attempt(EPOCH, []) == Attempt(3, scheduler.protected)
    scheduler.on_refused(3)
    assert scheduler.next_attempt(EPOCH, []) is None
    moved = dataclasses.replace(EPOCH, revision=1)
    assert scheduler.next_attempt(moved, []) == Attempt(1)
    scheduler.on_refused(1)
    assert scheduler.next_attempt(moved, []) == Attempt(2, scheduler.protected)


def test_donors_only_shrink_and_protection_ends_with_them_or_with_the_head():
    scheduler = Scheduler()
    scheduler.enqueue(1)
    scheduler.enqueue(2)
    scheduler.protect(1, [7, 8])
    scheduler.on_ended(7)
    scheduler.on_ended(99)
    assert scheduler.protected.donors == {8}
    scheduler.withdraw(2)
    assert scheduler.protected is not None
    scheduler.on_ended(8)
    assert scheduler.protected is None
    scheduler.protect(1, [9])
    scheduler.withdraw(1)
    assert scheduler.protected is None, "a head's protection is not inherited"


def test_every_change_of_the_queue_moves_the_epoch():
    scheduler = Scheduler()
    versions = [scheduler.queue_version]
    for change in (lambda: scheduler.enqueue(1), lambda: scheduler.enqueue(2), lambda: scheduler.withdraw(2)):
        change()
        versions.append(scheduler.queue_version)
    scheduler.on_started(1)
    assert len({*versions, scheduler.queue_version}) == 5


def test_the_gate():
    for concurrent in (False, True):
        scheduler = Scheduler(concurrent_prefill=concurrent)
        scheduler.enqueue(1)
        scheduler.enqueue(2)
        assert scheduler.next_attempt(EPOCH, rows(CAPTURE)) == (Attempt(1) if concurrent else None)
        assert scheduler.next_attempt(EPOCH, rows(PREFILL)) == (Attempt(1) if concurrent else None)
        scheduler.on_started(1)
        assert scheduler.next_attempt(EPOCH, rows(DECODE)) is None, "a decode round must come first"
        scheduler.choose(rows(DECODE))
        assert scheduler.next_attempt(EPOCH, rows(DECODE)) == Attempt(2)


def test_prefill_units_are_checkpoints_only_when_concurrent():
    for concurrent in (False, True):
        scheduler = Scheduler(concurrent_prefill=concurrent)
        scheduler.on_prefill_unit(left_stage=False)
        assert scheduler.prefill_version == int(concurrent)
        scheduler.on_prefill_unit(left_stage=True)
        assert scheduler.prefill_version == 1 + int(concurrent)

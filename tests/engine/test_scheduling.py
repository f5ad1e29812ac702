"""Order, fairness, deadlines and cancellation, one worker boundary at a time."""

from __future__ import annotations

import pytest
from fakes.prompts import endless, ends_at, thinking

import ninfer


def kinds(w):
    return [kind for kind, _ in w.program.units]


def test_requests_are_admitted_in_the_order_they_came(world):
    w = world(threaded=False, program={"pages": 8, "page": 8})
    admitted = []
    start = w.program.start
    w.program.start = lambda plan, ticket: admitted.append(plan.request) or start(plan, ticket)
    # the third needs most of the pool: the smaller ones behind it wait for it
    handles = [w.submit(ends_at(4, n), max_tokens=8) for n in (10, 10, 50, 5, 5)]
    w.drain()
    assert admitted == [1, 2, 3, 4, 5]
    assert all(h.result(timeout=0).finish_reason == "stop" for h in handles)
    w.check_at_rest()


def test_a_refused_head_tries_again_only_when_something_changed(world):
    w = world(threaded=False, program={"pages": 8, "page": 8})
    w.submit(endless(30), max_tokens=20)
    second = w.submit(endless(30), max_tokens=20)
    w.step(12)
    plans = w.program.calls.count("open_session")
    w.step(6)
    assert w.program.calls.count("open_session") == plans == 2, "one success, one refusal"
    w.drain()
    assert second.result(timeout=0).finish_reason == "length"


def test_at_most_one_prefill_chunk_runs_between_two_decode_rounds(world):
    w = world(threaded=False, max_concurrency=4, concurrent_prefill=True, program={"pages": 64})
    w.submit(endless(4), max_tokens=40)
    w.step(3)
    for n in (40, 33, 20):
        w.submit(endless(n), max_tokens=30)
    chunks = most = 0
    done = len(w.program.units)
    while w.step():
        for kind in kinds(w)[done:]:
            first = kind == "prefill" and w.program.calls[-1] != "commit"  # the last chunk goes with its first token
            chunks = 0 if kind == "decode" else chunks + first
            most = max(most, chunks)
        done = len(w.program.units)
    assert most == 1
    assert kinds(w).count("prefill") > 12


def test_a_decode_round_has_every_ready_row_and_no_other(world):
    w = world(threaded=False, max_concurrency=3, concurrent_prefill=True, program={"pages": 64})
    for n, limit in ((4, 30), (30, 30), (6, 12)):
        w.submit(endless(n), max_tokens=limit)
    for _ in range(60):
        ready = tuple(r.lane for r in w.worker.active if r.state.value == "decode_ready")
        done = len(w.program.units)
        w.step()
        for kind, lanes in w.program.units[done:]:
            if kind == "decode":
                assert lanes == ready
    w.drain()


def test_prefills_take_turns(world):
    w = world(threaded=False, max_concurrency=3, concurrent_prefill=True, program={"pages": 64})
    for _ in range(3):
        w.submit(endless(32), max_tokens=2)
    w.drain()
    lanes = [lanes[0] for kind, lanes in w.program.units if kind == "prefill"]
    assert lanes[:9] == [0, 1, 2] * 3


def test_without_concurrent_prefill_one_request_prefills_at_a_time(world):
    w = world(threaded=False, max_concurrency=3, program={"pages": 64})
    for _ in range(3):
        w.submit(endless(32), max_tokens=2)
    while w.step():
        assert sum(r.state.value == "prefill" for r in w.worker.active) <= 1


def test_admission_waits_for_a_decode_round(world):
    w = world(threaded=False, max_concurrency=3, concurrent_prefill=True, program={"pages": 64})
    w.submit(endless(4), max_tokens=30)
    w.step(2)
    for _ in range(2):
        w.submit(endless(40), max_tokens=5)
    before = w.program.calls.count("decode")
    w.step()
    assert len(w.worker.active) == 2
    while len(w.worker.active) < 3:
        w.step()
    assert w.program.calls.count("decode") > before
    w.drain()


def test_forced_tokens_go_first(world):
    w = world(threaded=False, program={"pages": 64})
    w.submit(endless(4), max_tokens=30)
    w.step(3)
    handle = w.submit(thinking(), max_tokens=9, thinking_budget=0)
    w.drain()
    units = kinds(w)
    assert units[units.index("control") - 1] == "prefill"
    assert handle.result(timeout=0).token_ids[:2] == (1, 2)


@pytest.mark.parametrize("polls", [0, 3])
def test_a_transaction_may_take_a_while(world, polls):
    w = world(threaded=False, program={"polls": polls})
    handle = w.submit(ends_at(2), max_tokens=9)
    w.drain()
    assert handle.result(timeout=0).finish_reason == "stop"
    w.check_at_rest()


def test_rows_go_on_while_a_transaction_is_open_and_settle_after_it(world):
    w = world(threaded=False, program={"polls": 6})
    first = w.submit(ends_at(3), max_tokens=9)
    while not w.worker.active:
        w.step()
    w.submit(ends_at(1), max_tokens=9)
    while not w.worker.resources.open:
        w.step()
    while not any(r.state.value == "terminal_pending" for r in w.worker.active):
        w.step()
    assert w.worker.resources.open
    assert not first.done, "its resources are not settled"
    assert len(first.text.split()) == 3
    w.drain()
    assert first.result(timeout=0).token_ids[-1] == 0
    w.check_at_rest()


def test_a_stale_plan_is_made_again(world):
    w = world(threaded=False)
    w.program.stale_starts = 1
    handle = w.submit(ends_at(2), max_tokens=9)
    w.step()
    assert w.worker.active
    w.drain()
    assert handle.result(timeout=0).finish_reason == "stop"


# -- time --------------------------------------------------------------------------------------------------------------


def test_queue_timeout_applies_to_waiting_alone(world):
    w = world(threaded=False, max_concurrency=1, queue_timeout=10.0)
    running = w.submit(endless(), max_tokens=30)
    waiting = w.submit(endless(), max_tokens=30)
    w.step(3)
    w.clock.now += 9.9
    w.step()
    assert not waiting.done
    w.clock.now += 0.2
    w.step()
    with pytest.raises(ninfer.QueueTimeout) as caught:
        waiting.result(timeout=0)
    assert caught.value.partial.usage.prompt_tokens == 5
    assert list(waiting)[-1].error is caught.value, "no start event: it was never admitted"
    w.drain()
    assert running.result(timeout=0).finish_reason == "length"


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_deadline_ends_a_request_wherever_it_is(world, steps):
    w = world(threaded=False, max_concurrency=1)
    handle = w.submit(endless(20), max_tokens=40, timeout=5.0)
    w.step(steps)
    w.clock.now += 5.1
    w.step()
    with pytest.raises(ninfer.DeadlineExceeded) as caught:
        handle.result(timeout=0)
    assert len(caught.value.partial.token_ids) == max(0, steps - 2)
    w.check_at_rest()


def test_the_worker_sleeps_until_the_next_deadline(world):
    w = world(threaded=False, max_concurrency=1, queue_timeout=10.0)
    assert w.worker.seconds_to_next() is None
    w.submit(endless(), max_tokens=30, timeout=4.0)
    w.step()
    w.clock.now += 1.0
    assert w.worker.seconds_to_next() == 3.0


def test_timings_come_from_the_engines_clock(world):
    w = world(threaded=False)
    handle = w.submit(endless(5), max_tokens=3)
    w.clock.now += 2.0
    w.program.on_unit = lambda kind: setattr(w.clock, "now", w.clock.now + {"prefill": 3.0, "decode": 0.5}[kind])
    w.drain()
    t = handle.result(timeout=0).timings
    assert (t.queue, t.prefill, t.decode, t.ttft) == (2.0, 6.0, 1.0, 8.0)


# -- cancellation ------------------------------------------------------------------------------------------------------


def test_cancelled_while_waiting_it_never_reaches_program(world):
    w = world(threaded=False, max_concurrency=1)
    w.submit(endless(), max_tokens=5)
    waiting = w.submit(endless(), max_tokens=5)
    w.step(2)
    waiting.cancel()
    w.drain()
    assert waiting.result(timeout=0).finish_reason == "cancelled"
    assert w.program.calls.count("start") == 1


def test_cancelled_while_materializing_its_transaction_is_aborted(world):
    w = world(threaded=False, program={"polls": 3})
    handle = w.submit(endless(), max_tokens=5)
    w.step()
    assert w.worker.resources.open
    handle.cancel()
    w.step()
    assert handle.result(timeout=0).finish_reason == "cancelled"
    assert w.program.calls[-1] == "abort_transaction"
    w.check_at_rest()


def test_cancelled_during_prefill_it_stops_at_the_next_chunk(world):
    w = world(threaded=False)
    handle = w.submit(endless(40), max_tokens=5)
    w.step(2)
    handle.cancel()
    w.step()
    assert kinds(w) == ["prefill", "prefill"]
    assert handle.result(timeout=0).finish_reason == "cancelled"
    w.check_at_rest()


def test_cancelled_in_flight_its_row_accepts_nothing(world):
    w = world(threaded=False)
    first = w.submit(endless(), max_tokens=20)
    second = w.submit(endless(), max_tokens=20)
    while len(w.worker.active) < 2:
        w.step()
    w.step(2)
    before = len(first.text.split())
    w.program.on_unit = lambda kind: first.cancel()
    w.step()
    result = first.result(timeout=0)
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) == before, "nothing committed after the cancellation was seen"
    w.drain()
    assert second.result(timeout=0).finish_reason == "length"
    w.check_at_rest()


def test_cancelled_when_terminal_only_the_response_notices(world):
    w = world(threaded=False, program={"polls": 6})
    first = w.submit(ends_at(3), max_tokens=9)
    while not w.worker.active:
        w.step()
    w.submit(ends_at(1), max_tokens=9)
    while not any(r.state.value == "terminal_pending" for r in w.worker.active):
        w.step()
    first.cancel()
    w.drain()
    assert first.result(timeout=0).finish_reason == "stop"
    w.check_at_rest()


def test_a_row_without_a_legal_token_fails_alone(world):
    w = world(threaded=False)
    first = w.submit(endless(), max_tokens=20)
    second = w.submit(endless(), max_tokens=20)
    while len(w.worker.active) < 2:
        w.step()
    w.step(3)
    w.program.fail_rows = {0}
    w.drain()
    with pytest.raises(ninfer.ConstraintDeadEnd) as caught:
        first.result(timeout=0)
    assert caught.value.position == len(caught.value.partial.token_ids) > 0
    assert second.result(timeout=0).finish_reason == "length"
    assert w.engine.available
    w.check_at_rest()

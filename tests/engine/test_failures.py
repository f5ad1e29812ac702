"""Faults inside every call: what survives, what ends, and in which order things are cleaned up."""

from __future__ import annotations

import logging

import pytest
from fakes.prompts import endless, ends_at, thinking

import ninfer

CALLS = [
    "start", "poll", "commit_transaction", "prefill", "finalize_prefill", "decode", "control", "wait", "commit",
    "finish", "discard",
]  # fmt: skip


class Broken(Exception):
    pass


def run_into(w, call, when):
    """Arm a fault where three requests will meet it; return their handles."""
    w.program.faults.arm(call, Broken("secret prompt"), when)
    handles = [
        w.submit(thinking(), max_tokens=9, thinking_budget=2),
        w.submit(ends_at(2), max_tokens=9),
        w.submit(endless(), max_tokens=9),
    ]
    for _ in range(60):
        w.step()
    assert w.program.faults.fired
    return handles


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_in_program_fails_the_engine_and_ends_every_request(world, call, when):
    cache = ninfer.CacheOptions(enabled=call == "finish")
    w = world(threaded=False, program={"polls": 1, "pages": 64}, cache=cache)
    handles = run_into(w, call, when)
    assert not w.engine.available
    for handle in handles:
        error = handle._final().error
        if error is None:
            assert handle.result(timeout=0).finish_reason in ("stop", "length", "cancelled")
            continue
        assert isinstance(error, ninfer.EngineFailed)
        assert isinstance(error.cause, Broken)
        assert error.partial is handle._final()
        assert list(handle)[-1] is error.partial
    assert any(h._final().error for h in handles)
    assert len({id(h._final().error) for h in handles if h._final().error}) == sum(
        h._final().error is not None for h in handles
    )
    with pytest.raises(ninfer.EngineFailed):
        w.engine.submit(endless())
    assert w.program.audit()["open"] == w.program.audit()["pending"] == 0
    w.engine.close()
    assert w.program.closed == 1


def test_who_asks_the_worker_something_hears_of_a_fault(world):
    w = world(threaded=False)

    def question(worker):
        raise Broken

    answer = w.engine._core.ask(question)
    w.step()
    assert isinstance(answer.exception(timeout=0).cause, Broken)
    assert not w.engine.available
    w.engine.close()


@pytest.mark.parametrize("call", CALLS)
def test_when_cleaning_up_fails_too_every_request_still_ends(world, call):
    w = world(threaded=False, program={"pages": 64}, cache=ninfer.CacheOptions(enabled=call == "finish"))
    w.program.faults.after_failure = Broken("everything is broken now")
    handles = run_into(w, call, "after")
    assert all(h.done for h in handles)
    with pytest.raises(ninfer.EngineFailed):
        w.engine.submit(endless())


def test_clean_up_goes_from_the_transaction_to_the_rows(world):
    w = world(threaded=False, max_concurrency=3, concurrent_prefill=True, program={"polls": 5})
    w.submit(endless(), max_tokens=30)
    while not w.worker.active:
        w.step()
    w.submit(endless(), max_tokens=30)
    while not w.worker.resources.open:
        w.step()
    w.program.faults.arm("commit", Broken())
    before = len(w.program.calls)
    w.step()
    cleanup = [c for c in w.program.calls[before:] if c in ("abort_transaction", "abort_pending", "discard")]
    assert cleanup == ["abort_transaction", "abort_pending", "discard"]
    assert all(state.value == "free" for state in w.worker.resources.lane_states())
    assert dict(w.program.audit()) == w.baseline


@pytest.mark.parametrize("call", ["isolated_root_fits", "open_session"])
def test_a_planning_fault_ends_one_request(world, call):
    w = world(threaded=False)
    first = w.submit(endless(), max_tokens=9)
    w.step(2)
    audit = dict(w.program.audit())
    w.program.faults.arm(call, Broken())
    second, third = w.submit(endless(), max_tokens=9), w.submit(ends_at(2), max_tokens=9)
    for _ in range(3):
        w.step()
        if second.done:
            break
    assert second._final().error.__class__ is ninfer.RequestAborted
    assert isinstance(second._final().error.cause, Broken)
    assert w.program.audit()["lanes"] >= audit["lanes"]
    w.program.faults.fired.clear()
    w.drain()
    assert [h.result(timeout=0).finish_reason for h in (first, third)] == ["length", "stop"]
    w.check_at_rest()


def test_a_third_planning_fault_in_a_row_fails_the_engine(world):
    w = world(threaded=False)
    handles = []
    for _ in range(3):
        w.program.faults.arm("open_session", Broken())
        handles.append(w.submit(endless(), max_tokens=9))
        w.step()
    kinds = [type(h._final().error) for h in handles]
    assert kinds == [ninfer.RequestAborted, ninfer.RequestAborted, ninfer.EngineFailed]
    assert not w.engine.available


def test_a_refusal_while_planning_is_the_requests_own(world):
    w = world(threaded=False)
    for _ in range(5):
        w.program.faults.arm("open_session", ninfer.InvalidRequest("cannot be represented", field="prompt"))
        handle = w.submit(endless(), max_tokens=9)
        w.step()
        with pytest.raises(ninfer.InvalidRequest, match="represented"):
            handle.result(timeout=0)
    w.program.faults.fired.clear()
    assert w.engine.available
    w.check_at_rest()


@pytest.mark.parametrize("call", ["preview", "preview_control", "session.commit", "session.finish"])
def test_a_fault_in_a_session_spares_the_engine(world, call):
    w = world(threaded=False)
    first = w.submit(thinking(), max_tokens=9, thinking_budget=1)
    second = w.submit(endless(), max_tokens=12)
    w.step()
    w.program.faults.arm(call, Broken())
    w.drain()
    outcomes = {type(h._final().error) for h in (first, second)}
    assert ninfer.RequestAborted in outcomes
    assert outcomes <= {ninfer.RequestAborted, type(None)}
    assert w.engine.available
    w.program.faults.fired.clear()
    third = w.submit(ends_at(1), max_tokens=9)
    w.drain()
    assert third.result(timeout=0).finish_reason == "stop"
    w.check_at_rest()


def test_planning_faults_are_counted_from_the_last_admission(world):
    w = world(threaded=False)
    for _ in range(4):
        w.program.faults.arm("open_session", Broken())
        w.submit(endless(), max_tokens=2)
        w.step()
        w.program.faults.fired.clear()
        handle = w.submit(endless(), max_tokens=2)
        w.drain()
        assert handle.result(timeout=0).finish_reason == "length"
    assert w.engine.available


def test_the_requests_behind_a_planning_fault_need_no_wake(world):
    w = world(threaded=False)
    w.program.faults.arm("open_session", Broken())
    first, second = w.submit(endless(), max_tokens=2), w.submit(endless(), max_tokens=2)
    assert w.step(), "there is more to do"
    assert first.done
    w.program.faults.fired.clear()
    w.drain()
    assert second.result(timeout=0).finish_reason == "length"


@pytest.mark.parametrize("skip", [0, 1])
def test_an_aborted_batch_ends_all_its_rows_and_publishes_none_of_it(world, skip):
    w = world(threaded=False)
    handles = [w.submit(endless(), max_tokens=12) for _ in range(2)]
    while len(w.worker.active) < 2 or any(r.state.value == "prefill" for r in w.worker.active):
        w.step()
    texts = [h.text for h in handles]
    w.program.faults.arm("preview", Broken(), skip=skip)
    w.step()
    assert [type(h._final().error) for h in handles] == [ninfer.RequestAborted] * 2
    assert [h.text for h in handles] == texts
    assert [h._final().text for h in handles] == texts
    assert "abort_pending" in w.program.calls
    w.program.faults.fired.clear()
    w.check_at_rest()


def test_a_batch_with_other_rows_is_a_bug_that_fails_the_engine(world):
    w = world(threaded=False)
    handle = w.submit(endless(), max_tokens=12)
    w.step(2)
    decode = w.program.decode

    def strange(sequences, licences, masks):
        batch = decode(sequences, licences, masks)
        batch.sequences = (*batch.sequences, batch.sequences[0])
        return batch

    w.program.decode = strange
    w.step()
    assert isinstance(handle._final().error, ninfer.EngineFailed)
    assert not w.engine.available


def test_an_idle_engine_without_room_says_so_instead_of_waiting(world):
    w = world(threaded=False)
    w.program.isolated_root_fits = lambda request: None
    handle = w.submit(endless(), max_tokens=12)
    w.program.pages = 1
    w.step()
    with pytest.raises(ninfer.EngineFailed, match="no room"):
        handle.result(timeout=0)


def test_logs_carry_no_prompt_and_no_output(world, caplog):
    caplog.set_level(logging.DEBUG, logger="ninfer")
    w = world()
    w.engine.generate([ends_at(3)], max_tokens=9)
    w.engine.generate("\x03topsecret", max_tokens=9)
    assert "topsecret" not in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]

"""Over a device that works beside the host, a round is launched by the commit of the one before it where that is all
there is to do, and what a unit committed is published while the next one runs."""

from __future__ import annotations

import pytest
from fakes.prompts import endless, ends_at, thinking

import ninfer
from ninfer.results import Delta, GenerationStart


def watch(w, handle, log):
    """Log the units of Program, its commits, and the tokens that the handle's response lets out."""
    publish, commit, wait = handle._response.publish, w.program.commit, w.program.wait

    def published(events):
        log.extend(("publish", event.token_ids) for event in events if isinstance(event, Delta))
        log.extend(("publish", ()) for event in events if isinstance(event, GenerationStart))
        publish(events)

    def committed(batch, decisions, follow):
        following = commit(batch, decisions, follow)
        log.append(("commit", batch.rows[0].tokens[: decisions[0].accepted]))
        return following

    w.program.on_unit = lambda kind: log.append(("launch", kind))
    w.program.wait = lambda batch: (log.append(("wait", batch.kind)), wait(batch))[1]
    w.program.commit = committed
    handle._response.publish = published


def test_a_rounds_tokens_are_published_between_the_next_launch_and_its_wait(world):
    w = world(threaded=False, overlap=True)
    log = []
    handle = w.submit(endless(), max_tokens=4)
    watch(w, handle, log)
    w.drain()
    first, second, third, fourth = (event.token_ids for event in handle if isinstance(event, Delta))
    assert log == [
        ("launch", "prefill"), ("publish", ()), ("launch", "prefill"), ("wait", "prefill"), ("commit", first),
        ("launch", "decode"), ("publish", first), ("wait", "decode"),
        ("launch", "decode"), ("commit", second), ("publish", second), ("wait", "decode"),
        ("launch", "decode"), ("commit", third), ("publish", third), ("wait", "decode"), ("commit", fourth),
        ("publish", fourth),
    ]  # fmt: skip
    assert not w.worker._units._rows, "rows of a round that has ended are kept"
    w.check_at_rest()


def test_over_a_device_that_blocks_nothing_is_held_back(world):
    w = world(threaded=False)
    log = []
    watch(w, w.submit(endless(), max_tokens=4), log)
    w.drain()
    assert all(log[i + 1] == ("publish", entry[1]) for i, entry in enumerate(log) if entry[0] == "commit")


def running(world, **options):
    """An engine whose one request has had a round that launched the next."""
    w = world(threaded=False, overlap=True, **options)
    handle = w.submit(endless(), max_tokens=40)
    while not w.worker.launched:
        assert w.step()
    return w, handle


def test_a_request_that_arrives_is_admitted_after_the_round_that_runs(world):
    w, handle = running(world, program={"pages": 64})
    rounds = len(w.program.units)
    w.submit(ends_at(2), max_tokens=9)
    w.step()
    assert not w.worker.launched, "another round was launched before it"
    w.step()
    assert {kind for kind, _ in w.program.units[rounds:]} == {"prefill"}
    handle.cancel()
    w.drain()
    w.check_at_rest()


@pytest.mark.parametrize("how", ["cancel", "deadline", "question"])
def test_what_comes_up_during_a_round_is_seen_to_after_it(world, how):
    w = world(threaded=False, overlap=True)
    handle = w.submit(endless(), max_tokens=40, timeout=30)
    while not w.worker.launched:
        assert w.step()
    rounds, answer = len(w.program.units), None
    if how == "cancel":
        handle.cancel()
    elif how == "deadline":
        w.clock.now += 31
    else:
        answer = w.engine._core.ask(lambda worker: worker.release_all())
    w.step()
    assert not w.worker.launched
    w.step()
    assert len(w.program.units) - rounds == (how == "question"), "no other round"
    if how in ("cancel", "deadline"):
        assert handle.done
    else:
        assert answer.done()
    handle.cancel()
    w.drain()
    w.check_at_rest()


def test_rounds_that_others_wait_for_do_not_follow(world):
    w = world(threaded=False, overlap=True, max_concurrency=1)
    first, second = (w.submit(endless(), max_tokens=5) for _ in range(2))
    while not first.done:
        assert w.step()
        assert not w.worker.launched
    while not second.done:
        w.step()
    assert len(second.result(timeout=0).token_ids) == 5
    w.check_at_rest()


def test_a_prompt_that_is_read_beside_decoding_takes_its_turns(world):
    w = world(threaded=False, overlap=True, concurrent_prefill=True, program={"pages": 64})
    handle = w.submit(endless(), max_tokens=40)
    while not w.worker.launched:
        assert w.step()
    w.submit(endless(length=30), max_tokens=1)
    begin = len(w.program.units)
    while w.program.units[-1][0] != "prefill" or w.worker.scheduler.waiting or len(w.worker.active) > 1:
        assert w.step()
    kinds = [kind for kind, _ in w.program.units[begin:]]
    assert kinds[:7] == ["prefill", "decode"] * 3 + ["prefill"]
    handle.cancel()
    w.drain()
    w.check_at_rest()


def test_the_close_of_thinking_is_not_passed(world):
    w = world(threaded=False, overlap=True)
    handle = w.submit(thinking(), max_tokens=30, thinking_budget=6)
    w.drain()
    kinds = [kind for kind, _ in w.program.units]
    assert kinds[:8] == ["prefill"] * 2 + ["decode"] * 5 + ["control"]
    assert len(handle.result(timeout=0).token_ids) == 30
    w.check_at_rest()


def test_a_row_whose_output_cannot_be_committed_ends_with_the_round_that_runs(world):
    w = world(threaded=False, overlap=True, concurrent_prefill=True, program={"pages": 64})
    handles = [w.submit(endless(), max_tokens=30) for _ in range(2)]
    rows = w.program.sequences
    while not (
        w.worker.launched and len(rows()) == 2 and all((row.executed + 1) % w.program.page for row in rows().values())
    ):
        assert w.step()
    w.program.faults.arm("session.commit", ValueError("spoiled"))
    w.step()
    assert w.program.faults.fired == ["session.commit"]
    w.program.faults.fired.clear()
    assert w.worker.launched, "the round was launched before the fault"
    w.drain()
    failed = [handle for handle in handles if handle._response.result.error is not None]
    assert len(failed) == 1
    assert isinstance(failed[0]._response.result.error, ninfer.RequestAborted)
    (other,) = set(handles) - set(failed)
    assert len(other.result(timeout=0).token_ids) == 30
    w.check_at_rest()


def test_an_engine_closes_while_a_round_runs_that_followed(world):
    w, handle = running(world)
    w.engine.close()
    with pytest.raises(ninfer.EngineClosed):
        handle.result(timeout=0)
    assert w.violations() == []
    assert w.program.audit()["pending"] == 0


@pytest.mark.parametrize("call", ["decode", "wait", "commit"])
def test_what_was_committed_before_a_fault_is_still_published(world, call):
    w = world(threaded=False, overlap=True)
    handle = w.submit(endless(), max_tokens=9)
    w.step(4)
    w.program.faults.arm(call, OSError("gone"))
    w.step()
    events = list(handle)
    assert isinstance(events[-1].error, ninfer.EngineFailed)
    assert [e.token_ids[0] for e in events if isinstance(e, Delta)] == list(events[-1].token_ids)
    assert len(events[-1].token_ids) == 4


def test_a_row_that_ends_lets_go_while_the_others_go_on(world):
    w = world(threaded=False, overlap=True, concurrent_prefill=True, program={"pages": 64})
    other, short = w.submit(endless(), max_tokens=40), w.submit(ends_at(2), max_tokens=40)
    while not short.done:
        assert w.step()
    assert not other.done
    assert w.program.calls[-1] in ("wait", "commit", "finish", "discard"), "a decode round followed"
    assert short.result(timeout=0).finish_reason == "stop"
    w.drain()
    w.check_at_rest()

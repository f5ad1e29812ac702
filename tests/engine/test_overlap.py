"""Over a device that works beside the host, what a unit committed is published while the next one runs."""

from __future__ import annotations

import pytest
from fakes.prompts import endless, ends_at

import ninfer
from ninfer.results import Delta, GenerationStart


def watch(w, handle, log):
    """Log the units of Program, its commits, and the tokens that the handle's response lets out."""
    publish, commit, wait = handle._response.publish, w.program.commit, w.program.wait

    def published(events):
        log.extend(("publish", event.token_ids) for event in events if isinstance(event, Delta))
        log.extend(("publish", ()) for event in events if isinstance(event, GenerationStart))
        publish(events)

    def committed(batch, decisions):
        commit(batch, decisions)
        log.append(("commit", batch.rows[0].tokens[: decisions[0].accepted]))

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
        ("launch", "decode"), ("publish", first), ("wait", "decode"), ("commit", second),
        ("launch", "decode"), ("publish", second), ("wait", "decode"), ("commit", third),
        ("launch", "decode"), ("publish", third), ("wait", "decode"), ("commit", fourth),
        ("publish", fourth),
    ]  # fmt: skip
    w.check_at_rest()


def test_over_a_device_that_blocks_nothing_is_held_back(world):
    w = world(threaded=False)
    log = []
    watch(w, w.submit(endless(), max_tokens=4), log)
    w.drain()
    assert all(log[i + 1] == ("publish", entry[1]) for i, entry in enumerate(log) if entry[0] == "commit")


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

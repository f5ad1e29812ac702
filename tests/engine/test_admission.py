"""How waiting requests get in: past a blocked head, from what is kept, and never by scanning while others decode."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.prompts import endless, ends_at

import ninfer
from ninfer import CacheOptions, TokenPrompt

CATALOGUE_CALLS = ("inspect", "open_session", "open_capture", "prove_backfill", "isolated_root_fits", "assess")


def chat(length: int, first: int = 255) -> ninfer.Chat:
    return ninfer.Chat([{"role": "user", "content": "".join(map(chr, [first] + [9] * (length - 1)))}])


def test_ordinary_decode_rounds_ask_no_planner(world):
    w = world(threaded=False, cache=CacheOptions(), concurrent_prefill=True, program={"pages": 99, "context": 200})
    handles = [w.submit(endless(), max_tokens=60) for _ in range(2)]
    waiting = w.submit(endless(), max_tokens=60)
    while len(w.worker.active) < 2 or any(r.state.value != "decode_ready" for r in w.worker.active):
        w.step()
    w.step()
    rounds, calls = w.engine.stats().decode_rounds, len(w.program.calls)
    w.step(20)
    assert w.engine.stats().decode_rounds == rounds + 20
    assert not [c for c in w.program.calls[calls:] if c in CATALOGUE_CALLS]
    assert not waiting.done
    w.drain()
    assert all(h.result(timeout=0).finish_reason == "length" for h in handles)
    w.check_at_rest()


def test_a_small_request_passes_a_blocked_head_without_holding_it_up(world):
    w = world(threaded=False, max_concurrency=3, concurrent_prefill=True, program={"pages": 12, "page": 4})
    first = w.submit(endless(4), max_tokens=20)  # 6 pages
    w.step(3)
    head = w.submit(endless(4), max_tokens=33)  # 9 pages: waits for the first
    small = w.submit(endless(4), max_tokens=9)  # 3 pages: fits beside both
    large = w.submit(endless(4), max_tokens=21)  # 6 pages: fits now, but then the head would not when the first ends
    for _ in range(6):
        w.step()
    assert [h.text != "" for h in (head, small, large)] == [False, True, False]
    order = []
    for _ in range(300):
        w.step()
        order += [n for n, h in (("first", first), ("head", head)) if h.text and n not in order]
    w.drain()
    assert order == ["first", "head"]
    assert all(h.result(timeout=0).finish_reason == "length" for h in (first, head, small, large))
    w.check_at_rest()


def test_protection_ends_with_the_head(world):
    w = world(threaded=False, max_concurrency=3, concurrent_prefill=True, program={"pages": 12, "page": 4})
    w.submit(endless(4), max_tokens=20)
    w.step(3)
    head = w.submit(endless(4), max_tokens=33)
    w.step(3)
    assert w.worker.scheduler.protected is not None
    head.cancel()
    w.step(2)
    assert w.worker.scheduler.protected is None
    w.drain()


@pytest.mark.parametrize("polls", [0, 3])
def test_a_row_stands_still_while_its_checkpoint_is_made(world, polls):
    w = world(threaded=False, cache=CacheOptions(), program={"polls": polls, "pages": 99})
    other = w.submit(ends_at(30, 4), max_tokens=40)
    w.step(3 * polls + 4)
    row = w.submit(chat(12), max_tokens=3)
    states = set()
    for _ in range(60):
        w.step()
        states |= {r.state.value for r in w.worker.active if r.id == 2}
    assert ("capture" in states) == bool(polls)
    w.drain()
    assert row.result(timeout=0).token_ids
    assert other.result(timeout=0).finish_reason == "stop"
    assert w.engine.stats().context.captures["turn_closure"] == 1
    w.check_at_rest()


def test_cancelling_while_a_checkpoint_is_made(world):
    w = world(threaded=False, cache=CacheOptions(), program={"polls": 4, "pages": 99})
    handle = w.submit(chat(12), max_tokens=3)
    while not any(r.state.value == "capture" for r in w.worker.active):
        w.step()
    handle.cancel()
    w.step(2)
    assert any(r.state.value == "terminal_pending" for r in w.worker.active), "the transaction is settled first"
    w.drain()
    assert handle.result(timeout=0).finish_reason == "cancelled"
    again = w.submit(chat(12), max_tokens=3)
    w.drain()
    assert again.result(timeout=0).usage.cached_tokens > 0, "what had been read is not read again"
    w.check_at_rest()


@pytest.mark.parametrize("call", ["inspect", "assess", "open_session", "open_capture"])
def test_a_fault_in_planning_changes_nothing_and_ends_one_request(world, call):
    w = world(threaded=False, cache=CacheOptions(), program={"pages": 99})
    for n in (12, 12):
        w.submit(chat(n), max_tokens=3)
        w.drain()
    before = (w.program.audit_digest(), len(w.worker.resources.catalogue))
    w.program.faults.arm(call, ValueError(call))
    failed = w.submit(chat(14, first=77), max_tokens=3)
    w.drain()
    assert isinstance(failed._final().error, ninfer.RequestAborted)
    if call != "open_capture":  # by then the request was active
        assert (w.program.audit_digest(), len(w.worker.resources.catalogue)) == before
    w.program.faults.fired.clear()
    assert w.engine.available
    good = w.submit(chat(12), max_tokens=3)
    w.drain()
    assert good.result(timeout=0).usage.cached_tokens > 0
    w.check_at_rest()


def test_a_failed_copy_ends_the_request_that_needed_it(world):
    w = world(threaded=False, cache=CacheOptions(), program={"polls": 2, "pages": 99})
    w.program.fail_copies = 1
    failed = w.submit(chat(12), max_tokens=3)
    w.drain()
    assert isinstance(failed._final().error, ninfer.RequestAborted)
    good = w.submit(chat(12), max_tokens=3)
    w.drain()
    assert good.result(timeout=0).finish_reason == "length"
    w.check_at_rest()


def test_a_checkpoint_whose_copies_fail_is_passed_over(world):
    w = world(threaded=False, cache=CacheOptions(), program={"polls": 2, "pages": 99})
    handle = w.submit(chat(12), max_tokens=3)
    while not w.worker.active:
        w.step()
    w.program.fail_copies = 1
    w.drain()
    assert handle.result(timeout=0).finish_reason == "length"
    w.check_at_rest()


@pytest.mark.full
def test_a_long_while(world):
    """Two thousand requests, one in five cancelled, of conversations that come back, under pressure."""
    rng = np.random.default_rng(11)
    w = world(
        threaded=False, max_concurrency=4, concurrent_prefill=True, max_outstanding=16,
        cache=CacheOptions(max_continuations=12, max_shared_prefixes=3, aging_window=4),
        program={"pages": 90, "page": 4, "context": 64, "polls": 1},
    )  # fmt: skip
    histories: dict[int, list[int]] = {}
    running: list[tuple[int, list[int], ninfer.GenerationHandle]] = []
    reused = 0
    for _ in range(2000):
        who = int(rng.integers(0, 12))
        prompt = [*histories.get(who, [255, who, who]), int(rng.integers(10, 99))]
        if len(prompt) > 40:
            prompt = [255, who, who, 9]
        handle = w.submit(TokenPrompt(prompt), max_tokens=int(rng.integers(1, 12)), session=f"s{who}")
        running.append((who, prompt, handle))
        if rng.random() < 0.2:
            handle.cancel()
        while len(running) >= 12 or (running and rng.random() < 0.5):
            w.step()
            for item in [item for item in running if item[2].done]:
                running.remove(item)
                result = item[2].result(timeout=0)
                reused += result.usage.cached_tokens
                histories[item[0]] = [*item[1], *result.token_ids]
                item[2].close()
                w.kept.remove(item[2])
    w.drain()
    for item in running:
        assert item[2].result(timeout=0).error is None
    assert reused > 5000
    w.check_at_rest()


def test_a_question_put_during_a_transaction_is_answered_after_it(world):
    w = world(threaded=False, cache=CacheOptions(), program={"polls": 5})
    handle = w.submit(endless(), max_tokens=5)
    while not w.worker.resources.open:
        w.step()
    answer = w.engine._core.ask(lambda worker: worker.release_all())
    w.step()
    assert not answer.done()
    handle.cancel()
    while w.step() or w.worker.resources.open:
        pass
    assert answer.result(timeout=0) == 0, "the worker does not go to sleep over it"
    w.check_at_rest()

"""Lists of inputs: order, throttling, errors of single items, progress."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from fakes.prompts import endless, ends_at

import ninfer
from ninfer import TokenPrompt


def test_results_keep_the_order_of_the_inputs(world):
    w = world()
    prompts = [ends_at(1 + (7 * i) % 11) for i in range(20)]
    results = w.engine.generate(prompts, max_tokens=30)
    assert [r.index for r in results] == list(range(20))
    assert [len(r.token_ids) for r in results] == [2 + (7 * i) % 11 for i in range(20)]
    assert w.engine.generate([], max_tokens=3) == []
    w.check_at_rest()


def test_no_more_are_outstanding_than_allowed(world):
    w = world(max_outstanding=3)
    peak = 0

    def watch(kind: str) -> None:
        nonlocal peak
        peak = max(peak, w.engine.stats().outstanding)

    w.program.on_unit = watch
    results = w.engine.generate([ends_at(2) for _ in range(15)], max_tokens=9)
    assert len(results) == 15
    assert 1 <= peak <= 3
    w.check_at_rest()


def test_it_waits_for_slots_that_others_hold(world):
    w = world(max_outstanding=1)
    other = w.engine.submit(ends_at(20), max_tokens=30)
    reader = threading.Thread(target=other.result)
    reader.start()
    assert [r.finish_reason for r in w.engine.generate([ends_at(1), ends_at(2)], max_tokens=9)] == ["stop", "stop"]
    reader.join()
    w.check_at_rest()


def test_one_bad_item_never_stops_the_others(world):
    w = world(program={"context": 20})
    prompts = [ends_at(1), TokenPrompt([300]), endless(25), None, ends_at(2)]
    results = w.engine.generate(prompts, max_tokens=9)
    assert [type(r.error) for r in results] == [
        type(None), ninfer.InvalidRequest, ninfer.ContextOverflow, ninfer.InvalidRequest, type(None),
    ]  # fmt: skip
    assert [r.finish_reason for r in results] == ["stop", "error", "error", "error", "stop"]
    assert [r.index for r in results] == [0, 1, 2, 3, 4]
    w.check_at_rest()


def test_items_that_fail_while_running_carry_their_error(world):
    w = world(max_concurrency=1)
    w.program.fail_rows = {0}
    results = w.engine.generate([endless(), ends_at(1)], max_tokens=9)
    assert isinstance(results[0].error, ninfer.ConstraintDeadEnd)
    assert results[0].usage.completion_tokens == 1
    assert results[1].finish_reason == "stop"
    w.check_at_rest()


def test_a_failed_engine_fails_the_remaining_items(world):
    w = world(max_outstanding=2)
    w.program.faults.arm("decode", RuntimeError("broken"))
    results = w.engine.generate([endless() for _ in range(5)], max_tokens=9)
    assert all(isinstance(r.error, ninfer.EngineFailed) for r in results)
    assert not w.engine.available


def test_results_come_as_they_complete(world):
    w = world(max_concurrency=2)
    w.program.on_unit = lambda kind: time.sleep(0.005)
    order = [r.index for r in w.engine.generate_iter([ends_at(40), ends_at(1), ends_at(2)], max_tokens=60)]
    assert order == [1, 2, 0]


def test_inputs_are_taken_no_earlier_than_needed(world):
    w = world(max_outstanding=2)
    taken = []

    def prompts():
        for i in range(100):
            taken.append(i)
            yield ends_at(1)

    results = w.engine.generate_iter(prompts(), max_tokens=9)
    next(results)
    assert len(taken) <= 4
    del results
    gc.collect()
    w.wait()
    w.check_at_rest()


def test_dropping_the_iterator_cancels_what_runs(world):
    w = world(threaded=True)
    results = w.engine.generate_iter([ends_at(1), endless(), endless()], max_tokens=50)
    assert next(results).index == 0
    results.close()
    w.wait()
    assert w.engine.stats().finished.get("cancelled", 0) <= 2
    w.check_at_rest()


def test_wrong_options_are_refused_before_anything_runs(world):
    w = world()
    with pytest.raises(ninfer.InvalidRequest, match="max_tokens"):
        w.engine.generate_iter([endless()], max_tokens=-1)
    for prompts in ("text", endless(), 5, {"role": "user"}):
        with pytest.raises(ninfer.InvalidRequest, match="prompts"):
            w.engine.generate_iter(prompts)
    assert w.engine.stats().accepted == 0


def test_progress_is_reported_to_a_callback(world, monkeypatch, capsys):
    w = world()
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(w.engine, "options", ninfer.EngineOptions(progress=lambda *args: seen.append(args)))
    w.engine.generate([ends_at(1), ends_at(2)], max_tokens=9)
    assert seen == [("generate", 1, 2), ("generate", 2, 2)]
    monkeypatch.setattr(w.engine, "options", ninfer.EngineOptions(progress=True))
    w.engine.generate([ends_at(1), ends_at(2)], max_tokens=9)
    assert "tok/s" in capsys.readouterr().err
    monkeypatch.setattr(w.engine, "options", ninfer.EngineOptions())
    w.engine.generate([ends_at(1)], max_tokens=9)
    assert capsys.readouterr().err == "", "no bar where there is no terminal"

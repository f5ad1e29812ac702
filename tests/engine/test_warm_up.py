"""Warming up happens, and is counted nowhere."""

from __future__ import annotations

import threading
from pathlib import Path

import attrs
import pytest
from fakes.prompts import ends_at

import ninfer

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
ADAPTIVE = {"spec": ninfer.SpecOptions("mtp", adaptive=True)}
COUNTERS = ("launches", "uploads", "upload_bytes", "downloads", "download_bytes", "decode_device_ns", "decode_gaps",
            "decode_gap_ns", "prefill_tokens", "decode_rounds", "decode_tokens", "decode_bytes", "copied.d2h_bytes",
            "copied.h2d_bytes", "copied.d2d_bytes")  # fmt: skip


@pytest.mark.parametrize("options", [{}, ADAPTIVE, {"cache": ninfer.CacheOptions(enabled=False)}], ids=str)
def test_every_statistic_is_as_at_the_start(options):
    with ninfer.Engine(TINY, max_context=256, progress=False, **options) as engine:
        start = engine.stats()
        assert {name: start.memory[name] for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
        engine.warm_up()
        for a in attrs.fields(type(start)):
            assert getattr(engine.stats(), a.name) == getattr(start, a.name), a.name
        assert engine.cache.clear() == 0
        engine.generate("Hello", max_tokens=3, ignore_eos=True)
        after = engine.stats()
        assert (after.accepted, after.memory["launches"] > 0) == (1, True)
        assert after.memory["prefill_tokens"] == after.prompt_tokens > 0


def test_it_answers(world):
    w = world()
    w.engine.warm_up()
    assert {"prefill", "decode", "count_anew"} <= set(w.program.calls)
    w.check_at_rest()


def test_an_engine_in_use_is_warm(world):
    w = world()
    w.engine.generate(ends_at(1), max_tokens=3)
    before = w.engine.stats()
    w.engine.warm_up()
    assert w.engine.stats() == before


def test_requests_wait_for_it(world):
    w = world()
    begun, go = threading.Event(), threading.Event()

    def hold(kind):
        begun.set()
        assert go.wait(20)

    w.program.on_unit = hold
    warming = threading.Thread(target=w.engine.warm_up)
    warming.start()
    assert begun.wait(20)
    handle = w.submit(ends_at(2), max_tokens=9)
    stats = w.engine.stats()
    assert (stats.waiting, stats.active, stats.accepted) == (1, 0, 0)
    go.set()
    assert len(handle.result().token_ids) == 3
    warming.join()
    assert (w.engine.stats().accepted, w.engine.stats().prefill_units) == (1, 1)
    w.check_at_rest()


def test_a_fault_in_it_is_told(world):
    w = world()
    w.program.faults.arm("decode", RuntimeError("broken"))
    with pytest.raises(ninfer.NinferError):
        w.engine.warm_up()


def test_it_needs_an_engine_that_takes_requests(world):
    w = world()
    w.engine.close()
    with pytest.raises(ninfer.EngineClosed):
        w.engine.warm_up()


def test_a_prompt_that_does_not_fit_is_told():
    with ninfer.Engine(TINY, max_context=4, progress=False) as engine:
        with pytest.raises(ninfer.ContextOverflow):
            engine.warm_up()
        assert engine.generate(ninfer.TokenPrompt([5, 6]), max_tokens=1).finish_reason == "length"

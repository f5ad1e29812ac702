"""Opening, closing, dropping, forking."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time

import pytest
from fakes.prompts import endless, ends_at

import ninfer
import ninfer.engine
from ninfer.runtime.costs import GENERIC
from ninfer.runtime.settings import resolve


def test_closing_ends_running_and_waiting_requests(world):
    w = world(max_concurrency=1)
    w.program.on_unit = lambda kind: time.sleep(0.002)
    handles = [w.submit(endless(), max_tokens=50) for _ in range(3)]
    next(iter(handles[0]))
    w.engine.close()
    for handle in handles:
        with pytest.raises(ninfer.EngineClosed) as caught:
            handle.result(timeout=0)
        assert caught.value.partial is handle._final()
    assert dict(w.program.audit()) == w.baseline
    assert w.program.closed == 1
    w.engine.close()
    assert w.program.closed == 1
    assert not w.engine.available
    for call in (w.engine.submit, w.engine.prepare, w.engine.generate, w.engine.count_tokens):
        with pytest.raises(ninfer.EngineClosed):
            call(endless())
    assert w.engine.stats().outstanding == 0


def test_closing_ends_requests_the_worker_has_not_taken_yet(world):
    w = world(threaded=False)
    handle = w.engine.submit(endless(), max_tokens=50)
    w.engine.close()
    with pytest.raises(ninfer.EngineClosed):
        handle.result(timeout=0)


def test_blocks_close_the_engine(world):
    w = world()
    with w.engine as engine:
        assert engine.generate(ends_at(1), max_tokens=3).finish_reason == "stop"
    assert w.program.closed == 1
    w = world()

    async def main():
        async with w.engine as engine:
            return await engine.submit(ends_at(1), max_tokens=3)

    assert asyncio.run(main()).finish_reason == "stop"
    assert w.program.closed == 1


def test_a_caller_that_waits_for_a_slot_hears_of_the_end(world):
    w = world(threaded=False, max_outstanding=1)
    w.submit(endless(), max_tokens=5)
    heard: list[type] = []

    def wait() -> None:
        try:
            w.engine.submit(endless(), block=True)
        except ninfer.NinferError as error:
            heard.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    w.engine.close()
    for thread in threads:
        thread.join(10)
    assert heard == [ninfer.EngineClosed] * 3


def test_a_dropped_engine_closes_itself(world):
    w = world()
    w.engine.generate(ends_at(1), max_tokens=3)
    core = w.engine._core
    w.engine = None
    gc.collect()
    core._thread.join(10)
    assert w.program.closed == 1
    w.engine = core  # the fixture closes it once more, which changes nothing


def test_a_handle_keeps_its_engine(world):
    w = world()
    handle = w.engine.submit(ends_at(20), max_tokens=30)
    core, w.engine = w.engine._core, None
    gc.collect()
    assert handle.result().finish_reason == "stop"
    w.engine = core


def test_an_idle_worker_does_not_poll(world):
    w = world()
    w.engine.generate(ends_at(1), max_tokens=3)
    time.sleep(0.05)
    boundaries = []
    step = w.engine._core.step
    w.engine._core.step = lambda: boundaries.append(1) or step()
    time.sleep(0.2)
    assert len(boundaries) <= 1


def test_an_idle_worker_wakes_for_a_deadline(world):
    w = world(max_concurrency=1, program={"polls": 10**9})
    with pytest.raises(ninfer.DeadlineExceeded):
        w.engine.submit(endless(), max_tokens=3, timeout=0.05).result(timeout=10)


def test_many_threads_share_an_engine(world):
    w = world(max_concurrency=4, max_outstanding=4, program={"pages": 64})
    results: dict[int, int] = {}

    def use(k: int) -> None:
        for i in range(8):
            handle = w.engine.submit(ends_at(1 + (k + i) % 5), block=True, max_tokens=9)
            results[k, i] = len(handle.result().token_ids) - (2 + (k + i) % 5)

    threads = [threading.Thread(target=use, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results.values()) == {0}
    assert len(results) == 48
    w.check_at_rest()


def test_several_engines_in_one_process(world):
    engines = [world(), world()]
    results = [w.engine.submit(ends_at(3), max_tokens=9) for w in engines for _ in range(3)]
    assert {h.result().finish_reason for h in results} == {"stop"}


def test_after_a_failed_construction_everything_is_closed(world, monkeypatch):
    w = world()
    closed = []
    monkeypatch.setattr(
        ninfer.engine,
        "open_instance",
        lambda artifact, options: ninfer.runtime.instance.Instance(
            w.frontend,
            w.program,
            "m",
            "d",
            64,
            8,
            False,
            resolve(ninfer.CacheOptions(), 1, "cpu"),
            GENERIC,
            lambda: closed.append(1),
            lambda: 1e9,
        ),
    )

    class Core(ninfer.runtime.core.EngineCore):
        def start(self) -> None:
            raise RuntimeError("no more threads")

    monkeypatch.setattr(ninfer.engine, "EngineCore", Core)
    with pytest.raises(RuntimeError, match="no more threads"):
        ninfer.Engine("artifact")
    assert closed == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_so(world):
    w = world()
    handle = w.engine.submit(endless(), max_tokens=5)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        heard = []
        for call in (lambda: w.engine.submit(endless()), lambda: handle.result(timeout=1), lambda: next(handle)):
            try:
                call()
            except ninfer.EngineClosed:
                heard.append("closed")
            except BaseException as error:
                heard.append(repr(error))
        heard.append(str(w.engine.available))
        w.engine.close()
        os.write(writer, ",".join(heard).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "closed,closed,closed,False"
    os.waitpid(child, 0)
    assert handle.result(timeout=10).finish_reason == "length"

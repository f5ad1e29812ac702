"""Callers that leave before their request is in the engine: at once, everything released, nobody else disturbed."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest

import ninfer
from ninfer.cancellation import CancelScope, checkpoint
from ninfer.constraints.limits import STRETCH, Work

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
LONG = ninfer.OutputConstraint.regex("a{3}")
"""Takes as long to compile as the test wants."""
SOON = 20.0


@pytest.fixture
def engine():
    with ninfer.Engine(TINY, max_context=256, max_concurrency=2, max_outstanding=4, progress=False) as engine:
        engine.warm_up()
        yield engine


@pytest.fixture
def compiling(monkeypatch):
    """``begun`` is set once LONG compiles; that ends when ``go`` is set."""
    import ninfer.frontend.constrain as room

    language = room.language

    class Compiling:
        begun, go = threading.Event(), threading.Event()

    def slow(constraint, *args):
        while constraint == LONG and not Compiling.go.is_set():
            Compiling.begun.set()
            Work().spend(STRETCH + 1)
        return language(constraint, *args)

    monkeypatch.setattr(room, "language", slow)
    yield Compiling
    Compiling.go.set()


def until(condition):
    end = time.monotonic() + SOON
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def at_rest(engine):
    return until(lambda: engine.stats().outstanding == 0)


def counts(engine):
    stats = engine.stats().constraints
    return stats["builds"], stats["abandoned"]


def works(engine):
    return engine.generate("Hello", max_tokens=2).finish_reason == "length"


async def cancelled(task, *, when):
    while not when():
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, SOON)


# -- scopes ------------------------------------------------------------------------------------------------------------


def test_a_scope_ends_its_own_thread_only():
    checkpoint()
    outer, inner, seen = CancelScope(), CancelScope(), []
    with outer, inner:
        inner.cancel()
        with pytest.raises(ninfer.Cancelled):
            checkpoint()
        other = threading.Thread(target=lambda: seen.append(checkpoint()))
        other.start()
        other.join()
    assert seen == [None]
    with outer:
        checkpoint()
        with CancelScope():
            checkpoint()
            outer.cancel()
            with pytest.raises(ninfer.Cancelled):
                checkpoint()
    checkpoint()


def test_a_scope_ends_by_its_clock_and_with_what_it_depends_on():
    now, broken = [5.0], []

    def alive():
        if broken:
            raise ninfer.EngineClosed("closed")

    scope = CancelScope(2.0, clock=lambda: now[0], alive=alive)
    now[0] = 6.9
    scope.check()
    broken.append(1)
    with pytest.raises(ninfer.EngineClosed):
        scope.check()
    broken.clear()
    now[0] = 7.0
    with pytest.raises(ninfer.DeadlineExceeded):
        scope.check()


# -- while a constraint compiles ---------------------------------------------------------------------------------------


def test_a_cancelled_task_ends_the_compilation(engine, compiling):
    async def main():
        task = asyncio.ensure_future(engine.submit_async("Hello", constraint=LONG))
        await cancelled(task, when=compiling.begun.is_set)

    asyncio.run(main())
    assert until(lambda: counts(engine) == (0, 1))
    assert at_rest(engine)
    assert engine.stats().accepted == 0
    compiling.go.set()
    assert engine.generate("Hello", constraint=LONG).text == "aaa"
    assert counts(engine) == (1, 1)


def test_the_timeout_ends_the_compilation(engine, compiling):
    for call in (engine.submit, engine.generate):
        with pytest.raises(ninfer.DeadlineExceeded):
            call("Hello", constraint=LONG, timeout=0.05)
        assert engine.stats().outstanding == 0
    assert until(lambda: counts(engine) == (0, 2))
    (result,) = engine.generate(["Hello"], constraint=LONG, timeout=0.05)
    assert isinstance(result.error, ninfer.DeadlineExceeded)
    assert works(engine)


def test_an_interrupt_ends_the_compilation(engine, compiling, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            engine.submit("Hello", constraint=LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert engine.stats().outstanding == 0
    assert until(lambda: counts(engine) == (0, 1))
    assert works(engine)


def test_closing_ends_the_compilation(engine, compiling):
    raised, others = [], set(threading.enumerate())

    def submit():
        with pytest.raises(ninfer.EngineClosed) as caught:
            engine.submit("Hello", constraint=LONG)
        raised.append(caught)

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert compiling.begun.wait(SOON)
    engine.close()
    for thread in threads:
        thread.join(SOON)
    assert len(raised) == 2
    assert engine.stats().outstanding == 0
    assert until(lambda: set(threading.enumerate()) <= others)


def test_a_schema_is_checked_beside_required_calls(engine, monkeypatch):
    """The one compilation that happens on the caller's own thread."""

    def endless(*_):
        while True:
            Work().spend(STRETCH + 1)

    monkeypatch.setattr("ninfer.constraints.output.schema_grammar", endless)
    chat = ninfer.Chat([{"role": "user", "content": "Hello"}], [ninfer.Tool(name="f", parameters={})])
    form = ninfer.OutputConstraint.json_schema({"const": "never compiled before"})
    with pytest.raises(ninfer.DeadlineExceeded):
        engine.submit(chat, constraint=form, tool_choice="required", timeout=0.05)
    assert engine.stats().outstanding == 0


# -- a compilation that others wait for --------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["first", "second"])
def test_who_leaves_spoils_no_compilation_others_wait_for(engine, compiling, leaves):
    def joined():
        return engine.stats().constraints["waits"] == 1

    async def main():
        first = asyncio.ensure_future(engine.submit_async("Hello", constraint=LONG))
        while not compiling.begun.is_set():
            await asyncio.sleep(0.002)
        second = asyncio.ensure_future(engine.submit_async("Hello", constraint=LONG))
        gone, stays = (first, second) if leaves == "first" else (second, first)
        await cancelled(gone, when=joined)
        assert at_rest_but(engine, 1)
        compiling.go.set()
        return await (await stays)

    result = asyncio.run(main())
    assert (result.text, result.constraint.cache) == ("aaa", "waited" if leaves == "first" else "built")
    assert counts(engine) == (1, 0)
    assert at_rest(engine)


def at_rest_but(engine, outstanding):
    return until(lambda: engine.stats().outstanding == outstanding)


def test_when_all_have_left_the_next_one_starts_anew(engine, compiling):
    async def main():
        tasks = [asyncio.ensure_future(engine.submit_async("Hello", constraint=LONG)) for _ in range(3)]
        while engine.stats().constraints["waits"] < 2:
            await asyncio.sleep(0.002)
        for task in tasks:
            await cancelled(task, when=compiling.begun.is_set)
        assert until(lambda: counts(engine) == (0, 1))
        compiling.go.set()
        return await (await engine.submit_async("Hello", constraint=LONG))

    assert asyncio.run(main()).text == "aaa"
    assert counts(engine) == (1, 1)
    assert at_rest(engine)


# -- before and after --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["prepare_async", "submit_async"])
def test_leaving_while_the_prompt_is_prepared(engine, monkeypatch, verb):
    begun, go, reached = threading.Event(), threading.Event(), []
    encode = engine._frontend._tokenizer.encode

    def slow(text):
        begun.set()
        assert go.wait(SOON)
        return encode(text)

    monkeypatch.setattr(engine._frontend._tokenizer, "encode", slow)
    monkeypatch.setattr(engine._frontend, "output_session", lambda *_, **__: reached.append(1))

    async def main():
        await cancelled(asyncio.ensure_future(getattr(engine, verb)("Hello")), when=begun.is_set)
        assert engine.stats().outstanding == 0

    asyncio.run(main())
    go.set()
    monkeypatch.undo()
    assert works(engine)
    assert reached == []


@pytest.mark.parametrize("how", ["task", "timeout", "close"])
def test_leaving_while_waiting_for_a_slot(engine, how):
    held = [engine.submit("Hello", max_tokens=100, ignore_eos=True) for _ in range(4)]
    assert until(lambda: engine.stats().accepted == 4)

    async def main():
        timeout = 0.05 if how == "timeout" else None
        task = asyncio.ensure_future(engine.submit_async("Hello", block=True, timeout=timeout))
        await asyncio.sleep(0.03)
        if how == "timeout":
            with pytest.raises(ninfer.DeadlineExceeded):
                await task
        elif how == "close":
            await asyncio.to_thread(engine.close)
            with pytest.raises(ninfer.EngineClosed):
                await task
        else:
            await cancelled(task, when=lambda: True)

    asyncio.run(main())
    for handle in held:
        handle.close()
    assert at_rest(engine)
    assert engine.stats().accepted == 4
    assert how == "close" or works(engine)


def test_a_task_cancelled_at_any_moment_leaves_nothing(engine):
    """From before the thread begins until the handle is there."""

    async def main():
        for step in range(40):
            task = asyncio.ensure_future(engine.submit_async("Hello", max_tokens=200, ignore_eos=True))
            await asyncio.sleep(step * 1e-4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task

    asyncio.run(main())
    assert at_rest(engine)
    assert works(engine)

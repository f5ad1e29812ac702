"""Handles: who may read, what cancels, when capacity comes back."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from fakes.prompts import endless, ends_at, thinking

import ninfer


def test_a_timeout_changes_nothing(world):
    w = world(threaded=False)
    handle = w.engine.submit(ends_at(2), max_tokens=9)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    assert not handle.done
    w.drain()
    assert handle.result(timeout=0).finish_reason == "stop"


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_a_timeout_longer_than_clocks_count(world, seconds):
    w = world()
    handle = w.engine.submit(ends_at(2), max_tokens=9, timeout=1e300)
    assert handle.result(timeout=seconds).finish_reason == "stop"


def test_text_so_far_never_blocks(world):
    w = world(threaded=False)
    handle = w.engine.submit(endless(), max_tokens=9)
    assert handle.text == ""
    w.step()
    first = handle.text
    w.step()
    assert handle.text.startswith(first)
    assert len(handle.text.split()) == 2
    assert "running" in repr(handle)


def test_result_leaves_unread_events_readable(world):
    w = world()
    handle = w.engine.submit(ends_at(3), max_tokens=9)
    result = handle.result()
    assert list(handle)[-1] is result
    assert list(handle) == [], "an exhausted handle has nothing more"


def test_a_second_iterator_is_refused_while_the_first_lives(world):
    w = world()
    handle = w.engine.submit(ends_at(4), max_tokens=9)
    first = iter(handle)
    next(first)
    for second in (lambda: iter(handle), lambda: next(handle), handle.text_deltas, handle.__aiter__):
        with pytest.raises(ninfer.InvalidRequest):
            second()
    rest = list(first)
    assert isinstance(rest[-1], ninfer.GenerationResult)


def test_a_loop_can_be_left_and_taken_up_again(world):
    w = world()
    handle = w.engine.submit(ends_at(4), max_tokens=9)
    for event in handle:
        assert isinstance(event, ninfer.GenerationStart)
        break
    text = "".join(handle.text_deltas())
    assert text == handle.result().text


def test_next_works_on_the_handle_itself(world):
    w = world()
    handle = w.engine.submit(ends_at(1), max_tokens=9)
    events = [next(handle) for _ in range(4)]
    assert isinstance(events[-1], ninfer.GenerationResult)
    with pytest.raises(StopIteration):
        next(handle)


def test_text_deltas_by_channel_and_their_error(world):
    w = world()
    handle = w.engine.submit(thinking(), max_tokens=8, thinking_budget=2)
    assert "".join(handle.text_deltas("content")) == handle.result().text
    with pytest.raises(ninfer.InvalidRequest, match="channel"):
        handle.text_deltas("tool")
    w.program.fail_rows = {0}
    pieces = w.engine.submit(endless(), max_tokens=9).text_deltas()
    assert next(pieces)
    with pytest.raises(ninfer.ConstraintDeadEnd):
        next(pieces)


def test_a_text_cut_by_a_cancellation_does_not_pass_for_a_whole_one(world):
    w = world(threaded=False)
    handle = w.submit(endless(), max_tokens=50)
    pieces = handle.text_deltas()
    w.step(4)
    handle.cancel()
    w.step()
    seen: list[str] = []
    with pytest.raises(ninfer.Cancelled) as caught:
        seen.extend(pieces)
    assert caught.value.partial is handle.result(timeout=0)
    assert "".join(seen) == caught.value.partial.text != ""


def test_cancel_ends_with_what_was_committed(world):
    w = world(threaded=False)
    handle = w.engine.submit(endless(), max_tokens=50)
    w.step(4)
    handle.cancel()
    handle.cancel()
    w.step()
    result = handle.result(timeout=0)
    assert result.finish_reason == "cancelled"
    assert result.error is None
    assert len(result.token_ids) == 4
    w.check_at_rest()


def test_leaving_the_block_cancels(world):
    w = world(threaded=False)
    with w.engine.submit(endless(), max_tokens=50) as handle:
        w.step(3)
    w.step()
    assert handle.done
    w.check_at_rest()


def test_leaving_the_block_after_the_end_changes_nothing(world):
    w = world()
    with w.engine.submit(ends_at(2), max_tokens=50) as handle:
        result = handle.result()
    assert handle.result() is result
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_dropping_a_handle_cancels_it(world, steps):
    w = world(threaded=False)
    handle = w.engine.submit(endless(), max_tokens=50)
    w.step(steps)
    calls = len(w.program.calls)
    del handle
    gc.collect()
    assert len(w.program.calls) == calls, "the consumer's thread never calls Program"
    w.step()
    w.check_at_rest()


def test_dropping_an_iterator_over_a_temporary_handle_cancels_it(world):
    w = world(threaded=False)
    pieces = w.engine.stream(endless(), max_tokens=50).text_deltas()
    w.step(2)
    next(pieces)
    del pieces
    gc.collect()
    w.step()
    w.check_at_rest()


def test_capacity_comes_back_when_both_sides_are_done(world):
    w = world(threaded=False, max_outstanding=1)
    handle = w.engine.submit(ends_at(1), max_tokens=9)
    w.drain()
    assert handle.done
    assert w.engine.stats().outstanding == 1, "unread"
    with pytest.raises(ninfer.Overloaded):
        w.engine.submit(ends_at(1))
    *_, last = handle
    assert last is handle.result()
    assert w.engine.stats().outstanding == 0
    del handle
    gc.collect()
    assert w.engine.stats().outstanding == 0, "given back once"
    second = w.engine.submit(ends_at(1), max_tokens=9)
    second.close()
    assert w.engine.stats().outstanding == 1, "the worker is not done with it"
    w.drain()
    assert w.engine.stats().outstanding == 0


def test_block_waits_for_a_slot(world):
    w = world(max_outstanding=1)
    first = w.engine.submit(ends_at(30), max_tokens=50)
    second: list[ninfer.GenerationHandle] = []
    thread = threading.Thread(target=lambda: second.append(w.engine.submit(ends_at(1), block=True)))
    thread.start()
    first.result()
    thread.join(10)
    assert second[0].result().finish_reason == "stop"


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_async_iteration_and_await(world):
    w = world()

    async def main():
        handle = await w.engine.submit_async(ends_at(5), max_tokens=9)
        events = [event async for event in handle]
        assert isinstance(events[0], ninfer.GenerationStart)
        assert events[-1] is await handle
        pieces = [p async for p in (await w.engine.submit_async(ends_at(2))).text_deltas()]
        assert len(pieces) == 2
        with pytest.raises(StopAsyncIteration):
            await handle.__anext__()
        return await asyncio.gather(*[w.engine.submit(ends_at(i), max_tokens=40) for i in range(1, 12)])

    results = asyncio.run(main())
    assert [len(r.token_ids) for r in results] == list(range(2, 13))
    w.check_at_rest()


def test_sync_calls_work_under_a_running_loop(world):
    w = world()

    async def cell():
        same = ninfer.RequestOptions(max_tokens=9, sampling=ninfer.SamplingParams(seed=3))
        text = "".join(w.engine.stream(ends_at(3), same).text_deltas())
        assert text == "".join([piece async for piece in w.engine.stream(ends_at(3), same).text_deltas()])
        return w.engine.generate([ends_at(2), ends_at(3)], max_tokens=9)

    assert [r.finish_reason for r in asyncio.run(cell())] == ["stop", "stop"]


def test_cancelling_the_task_that_awaits_cancels_the_request(world):
    w = world(threaded=False)

    async def main():
        handle = w.engine.submit(endless(), max_tokens=50)
        task = asyncio.ensure_future(_awaits(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return handle

    handle = asyncio.run(main())
    w.step()
    assert handle.result(timeout=0).finish_reason == "cancelled"


async def _awaits(handle: ninfer.GenerationHandle) -> ninfer.GenerationResult:
    return await handle


@pytest.mark.parametrize("where", ["waiting", "body"])
def test_cancelling_the_task_that_iterates_cancels_the_request(world, where):
    w = world(threaded=False)

    async def reads(handle, inside):
        async for _ in handle:
            if where == "body":
                inside.set()
                await asyncio.sleep(60)

    async def main():
        handle = w.engine.submit(endless(), max_tokens=50)
        inside = asyncio.Event()
        task = asyncio.ensure_future(reads(handle, inside))
        if where == "body":
            w.step()
            await inside.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return handle

    handle = asyncio.run(main())
    w.step()
    assert handle.result(timeout=0).finish_reason == "cancelled"


def test_a_task_may_read_any_number_of_handles(world):
    """A server's task lives long: what it has read leaves nothing behind on it."""
    w = world(max_outstanding=4)

    async def main() -> int:
        for i in range(50):
            async for _ in w.engine.submit(ends_at(2), max_tokens=9):
                if i % 2:
                    break
        gc.collect()
        task = asyncio.current_task()
        assert len(ninfer.handle._iterated[task]) <= 1
        return len(task._callbacks)

    assert asyncio.run(main()) <= 2
    w.check_at_rest()


def test_a_task_that_ends_normally_cancels_nothing(world):
    w = world(threaded=False)

    async def main():
        handle = w.engine.submit(ends_at(3), max_tokens=50)
        w.step()
        async for _ in handle:
            break
        return handle

    handle = asyncio.run(main())
    w.drain()
    assert handle.result(timeout=0).finish_reason == "stop"


def test_a_closed_loop_does_not_disturb_the_worker(world):
    w = world(threaded=False)
    loop = asyncio.new_event_loop()
    handle = w.engine.submit(ends_at(4), max_tokens=50)
    waiting = loop.create_task(_awaits(handle))
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False
    loop.close()
    w.drain()
    assert handle.result(timeout=0).finish_reason == "stop"
    assert w.engine.available


def test_await_raises_the_typed_error(world):
    w = world(queue_timeout=5.0, threaded=False, max_concurrency=1)

    async def main():
        running = w.engine.submit(endless(), max_tokens=50)
        late = w.engine.submit(endless(), max_tokens=50)
        w.step(2)
        w.clock.now += 6
        w.step()
        with pytest.raises(ninfer.QueueTimeout) as caught:
            await late
        assert caught.value.partial.finish_reason == "error"
        running.close()

    asyncio.run(main())
    w.step()
    w.check_at_rest()

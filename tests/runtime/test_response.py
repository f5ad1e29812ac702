"""The path from worker to consumer, and capacity that comes back once."""

from __future__ import annotations

import threading

import pytest

from ninfer.results import Delta, GenerationResult
from ninfer.runtime.response import Outstanding, Response

RESULT = GenerationResult()


@pytest.mark.parametrize("order", ["worker first", "consumer first"])
def test_capacity_is_released_once_when_both_are_done(order):
    released = []
    response = Response(lambda: released.append(1), lambda: None)
    steps = [lambda: response.complete(RESULT), response.consumer_done]
    for step in steps if order == "worker first" else steps[::-1]:
        assert released == []
        step()
    assert released == [1]
    response.consumer_done()
    response.take()
    assert released == [1]


def test_a_race_releases_once():
    for _ in range(200):
        released = []
        response = Response(lambda released=released: released.append(1), lambda: None)
        barrier = threading.Barrier(2)

        def consumer(response=response, barrier=barrier):
            barrier.wait()
            response.consumer_done()

        thread = threading.Thread(target=consumer)
        thread.start()
        barrier.wait()
        response.complete(RESULT)
        thread.join()
        assert released == [1]


def test_taking_the_last_event_is_being_done():
    released = []
    response = Response(lambda: released.append(1), lambda: None)
    response.publish([Delta("content", "a"), Delta("thinking", "b"), Delta("content", "c")])
    response.complete(RESULT)
    assert response.text == "ac"
    assert [response.take().text for _ in range(3)] == ["a", "b", "c"]
    assert released == []
    assert response.take() is RESULT
    assert released == [1]
    assert response.take(block=False) is None


def test_cancelling_after_the_end_wakes_nobody():
    woken = []
    response = Response(lambda: None, lambda: woken.append(1))
    response.cancel()
    response.cancel()
    assert woken == [1]
    done = Response(lambda: None, lambda: woken.append(2))
    done.complete(RESULT)
    done.cancel()
    assert not done.cancel_requested
    assert woken == [1]


def test_watchers_hear_of_the_result_whenever_they_come():
    heard = []
    response = Response(lambda: None, lambda: None)
    response.watch(lambda: heard.append("before"))
    response.complete(RESULT)
    response.watch(lambda: heard.append("after"))
    assert heard == ["before", "after"]


def test_slots_are_counted():
    slots = Outstanding(2)
    assert slots.acquire(0)
    assert slots.acquire(0)
    assert not slots.acquire(0)
    assert not slots.acquire(0.01)
    assert slots.in_use == 2
    slots.release()
    assert slots.in_use == 1
    assert slots.acquire(10)


def test_a_slot_given_back_goes_to_who_waits():
    slots = Outstanding(1)
    slots.acquire(0)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(slots.acquire(10)))
    thread.start()
    slots.release()
    thread.join(10)
    assert answers == [True]
    assert slots.in_use == 1

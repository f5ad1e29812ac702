"""Many threads doing what they like with one engine, whose worker runs on a thread of its own."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from fakes.prompts import endless, ends_at, thinking

import ninfer


def use(engine: ninfer.Engine, seed: int, rounds: int, failures: list[BaseException]) -> None:
    choose = random.Random(seed)
    try:
        for _ in range(rounds):
            prompt = choose.choice([endless(choose.randint(1, 30)), ends_at(choose.randint(0, 9)), thinking()])
            limit = choose.randint(0, 12)
            handle = engine.submit(prompt, block=True, max_tokens=limit, thinking_budget=choose.choice([None, 0, 3]))
            act = choose.randrange(6)
            if act == 0:
                del handle
            elif act == 1:
                handle.cancel()
                assert handle.result().finish_reason in ("cancelled", "stop", "length")
            elif act == 2:
                events = list(handle)
                assert isinstance(events[-1], ninfer.GenerationResult)
                assert sum(isinstance(e, ninfer.GenerationStart) for e in events) == (limit > 0)
            elif act == 3:
                with handle:
                    next(handle)
            elif act == 4:
                asyncio.run(_wait(handle))
            else:
                assert len(handle.result(timeout=30).token_ids) <= limit
    except BaseException as error:
        failures.append(error)


async def _wait(handle: ninfer.GenerationHandle) -> None:
    try:
        await asyncio.wait_for(handle, 0.002)
    except TimeoutError:
        assert handle.result(timeout=30).finish_reason in ("cancelled", "stop", "length")


def stress(w, threads: int, rounds: int) -> None:
    failures: list[BaseException] = []
    workers = [threading.Thread(target=use, args=(w.engine, k, rounds, failures)) for k in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    w.wait()
    w.check_at_rest()


def test_a_short_while(world):
    w = world(max_concurrency=4, max_outstanding=6, concurrent_prefill=True, program={"drafts": 2, "polls": 1})
    stress(w, threads=4, rounds=40)


@pytest.mark.full
def test_a_long_while(world):
    for polls in (0, 2):
        for concurrent in (False, True):
            options = {"max_concurrency": 4, "max_outstanding": 6, "concurrent_prefill": concurrent}
            stress(world(**options, program={"drafts": 3, "polls": polls}), threads=8, rounds=2000)

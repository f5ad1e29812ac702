"""64 clients at once: every stream is the answer the engine gives alone, no event lost or doubled, memory flat."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import time

import httpx2
import psutil
import pytest
from live.server import TINY, serving

from ninfer import Chat, Engine, SamplingParams, SpecOptions

CLIENTS = 64
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def wide():
    options = {"max_context": 512, "max_concurrency": 8, "max_outstanding": CLIENTS, "progress": False}
    with Engine(TINY, **options) as engine, serving(engine) as server:
        yield server


def question(i):
    return f"What is {i % 40} plus {i % 7}?"


def body(path, i):
    common = {"model": "ninfer-tiny", "stream": True, "temperature": 0.8, "seed": i}
    if path == "/v1/responses":
        return {**common, "input": question(i), "max_output_tokens": 24}
    return {**common, "messages": [{"role": "user", "content": question(i)}], "max_tokens": 24}


def said(path, raw):
    """The text of a stream of which every event is checked."""
    frames = [frame for frame in raw.split("\n\n") if frame]
    data = [frame.split("data: ", 1)[1] for frame in frames]
    if path == PATHS[0]:
        assert data.pop() == "[DONE]"
        choices = [json.loads(item)["choices"][0] for item in data]
        assert [c["finish_reason"] is None for c in choices] == [True] * (len(choices) - 1) + [False]
        return "".join(c["delta"].get("content", "") for c in choices)
    events = [json.loads(item) for item in data]
    assert [frame.splitlines()[0] for frame in frames] == [f"event: {event['type']}" for event in events]
    kinds = [event["type"] for event in events]
    if path == PATHS[1]:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (kinds[0], kinds.count("response.completed") + kinds.count("response.incomplete")) == (
            "response.created",
            1,
        )
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert (kinds[0], kinds[-1], kinds.count("message_stop")) == ("message_start", "message_stop", 1)
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


async def wave(server, client, offset):
    async def one(i):
        path = PATHS[i % len(PATHS)]
        async with client.stream("POST", f"{server.url}{path}", json=body(path, i)) as answer:
            assert answer.status_code == 200
            chunks = [chunk async for chunk in answer.aiter_text()]
        return said(path, "".join(chunks))

    return await asyncio.gather(*(one(offset + i) for i in range(CLIENTS)))


def alone(engine, offset):
    chats = [Chat([{"role": "user", "content": question(offset + i)}], thinking=False) for i in range(CLIENTS)]
    return [
        engine.generate(chat, max_tokens=24, sampling=SamplingParams(temperature=0.8, seed=offset + i)).text
        for i, chat in enumerate(chats)
    ]


async def waves(server, seconds, least):
    """Waves of clients for that long, at least so many. The texts of the first, and memory in use after each."""
    limits = httpx2.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
    first, used, end = None, [], time.monotonic() + seconds
    async with httpx2.AsyncClient(limits=limits, timeout=120) as client:
        while len(used) < least or time.monotonic() < end:
            texts = await wave(server, client, 0 if first is None else len(used) * CLIENTS)
            first = first or texts
            gc.collect()
            used.append(psutil.Process().memory_info().rss)
    return first, used


def test_every_stream_is_the_engines_own_answer(wide):
    first, _ = asyncio.run(waves(wide, 0, 1))
    assert first == alone(wide.engine, 0)
    assert wide.idle()


def test_drafts_show_in_the_log_alone(wide, tmp_path):
    path = tmp_path / "requests.jsonl"
    greedy = {**body(PATHS[0], 3), "temperature": 0, "logprobs": True}
    options = {"max_context": 512, "spec": SpecOptions("mtp"), "progress": False}
    with Engine(TINY, **options) as engine, serving(engine, request_log=str(path)) as server:
        drafted = server.post(PATHS[0], {**greedy, "stream": False}).json()["choices"]
        streamed = said(PATHS[0], server.post(PATHS[0], greedy).text)
    plain = wide.post(PATHS[0], {**greedy, "stream": False}).json()["choices"]
    assert drafted[0]["message"] == plain[0]["message"]
    assert streamed == plain[0]["message"]["content"]
    tokens = [[entry["token"] for entry in choice["logprobs"]["content"]] for choice in (drafted[0], plain[0])]
    assert tokens[0] == tokens[1]
    for line in path.read_text().splitlines():
        assert json.loads(line)["speculation"]["accepted"] > 0


@pytest.mark.full
def test_a_minute_of_them_leaves_memory_as_it_was(wide):
    _, used = asyncio.run(waves(wide, 60, 9))
    third = len(used) // 3
    assert max(used[-third:]) - max(used[third : 2 * third]) < 8 << 20
    assert wide.idle()


@pytest.fixture
def many_files():
    """Both ends of a thousand connections."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    if former[1] != resource.RLIM_INFINITY and former[1] < 4096:
        pytest.skip("this process may not open enough files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(former[0], 4096), former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_a_thousand_idle_connections(wide, many_files):
    """They are kept, cost little, and take no place from others."""

    async def hold():
        before = psutil.Process().memory_info().rss
        kept = [await asyncio.open_connection("127.0.0.1", wide.port) for _ in range(1000)]
        while wide.app_connections() < 1000:
            await asyncio.sleep(0.01)
        used = psutil.Process().memory_info().rss - before
        answer = await asyncio.to_thread(wide.post, PATHS[0], {**body(PATHS[0], 1), "stream": False})
        for _, writer in kept:
            writer.close()
        return used, answer.status_code

    used, status = asyncio.run(hold())
    assert status == 200
    assert used < 50 << 20  # both ends are in this process

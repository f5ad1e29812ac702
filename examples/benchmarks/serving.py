"""What the HTTP server costs beside its engine: first token, processor time of a token, idle connections, start.

    python examples/benchmarks/serving.py [ARTIFACT] [--repeats N]

The engine is the bundled model's. The server runs in a thread of this process and its clients in a process of their
own. Processor time is that of the event loop's thread alone, for the server and for the same number of handles read in
process by ``async for``; their difference is what the gateway adds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from ninfer import Delta, Engine, OutputConstraint, SamplingParams
from ninfer.gateway.http import create_app

TINY = Path(__file__).parents[1] / "tiny" / "tiny.ninfer"
STREAMS, TOKENS, ANSWERS = 8, 400, 10
PATTERN = "[ab]{8000}"
ASK = "What is 3 plus 4?"
GREEDY = SamplingParams(temperature=0)


class Loop:
    """An event loop in a thread whose processor time can be read."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def seconds(self) -> float:
        """Processor time of the thread so far."""
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))


async def read(engine: Engine, tokens: int) -> float:
    """Read one answer in process; seconds to its first delta."""
    began, first = time.perf_counter(), None
    handle = await engine.submit_async(
        ASK, max_tokens=tokens, sampling=GREEDY, constraint=OutputConstraint.regex(PATTERN)
    )
    async for event in handle:
        if first is None and isinstance(event, Delta):
            first = time.perf_counter() - began
    assert first is not None
    return first


async def read_all(engine: Engine) -> None:
    await asyncio.gather(*(read(engine, TOKENS) for _ in range(STREAMS)))


CLIENT = """
import json, selectors, socket, sys, time
port, streams, tokens, answers = map(int, sys.argv[1:5])
data = sys.argv[5].replace("TOKENS", str(tokens)).encode()
lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
head = "\\r\\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode()
waiting, firsts = selectors.DefaultSelector(), []

def ask(one, left):
    one.sendall(head + data)
    return [b"", time.perf_counter(), None, left]

for _ in range(streams):
    one = socket.create_connection(("127.0.0.1", port))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waiting.register(one, selectors.EVENT_READ, ask(one, answers - 1))
while waiting.get_map():
    for key, _ in waiting.select():
        state = key.data
        state[0] += key.fileobj.recv(1 << 20)
        if state[2] is None and b'"delta":{"content":"' in state[0].replace(b'"content":""', b""):
            state[2] = time.perf_counter() - state[1]
        if b"[DONE]" in state[0][-64:]:
            firsts.append(state[2])
            if state[3]:
                waiting.modify(key.fileobj, selectors.EVENT_READ, ask(key.fileobj, state[3] - 1))
            else:
                waiting.unregister(key.fileobj)
        state[0] = state[0] if state[2] is None else state[0][-64:]
print(json.dumps(firsts))
"""


def ask(port: int, model: str, streams: int, tokens: int, answers: int = 1) -> list[float]:
    """Stream answers over HTTP, on each connection one after another; seconds to the first token of each, as their
    client sees it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": ASK}],
        "max_tokens": "TOKENS",
        "temperature": 0,
        "stream": True,
        "structured_outputs": {"regex": PATTERN},
    }
    text = json.dumps(body).replace('"TOKENS"', "TOKENS")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CLIENT, *map(str, (port, streams, tokens, answers)), text],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    firsts: list[float] = json.loads(done.stdout)
    return firsts


def medians(repeats: int, *measures: Callable[[], float]) -> list[float]:
    """Of measures taken in turn, so that whatever else the machine does disturbs them alike."""
    rounds = [[measure() for measure in measures] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", nargs="?", default=TINY)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    with Engine(arguments.artifact, max_concurrency=STREAMS, max_context=512, progress=False) as engine:
        loop = Loop()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listening.getsockname()[1]
        began = time.perf_counter()
        server = uvicorn.Server(uvicorn.Config(create_app(engine), log_config=None, timeout_keep_alive=75))
        serving = asyncio.run_coroutine_threadsafe(server.serve([listening]), loop.loop)
        while not _ready(port):
            time.sleep(0.002)
        print(f"start to ready            {time.perf_counter() - began:8.3f} s beside the opening of the engine")

        def asking() -> float:
            return statistics.median(ask(port, engine.model_name, 1, 4, ANSWERS))

        def inside() -> float:
            return statistics.median(loop.run(read(engine, 4)) for _ in range(ANSWERS))

        _ = asking(), inside()
        http, own = medians(repeats, asking, inside)
        print(f"first token               {http * 1e3:8.2f} ms over HTTP, {own * 1e3:.2f} in process")

        def spent(work: Callable[[], object]) -> float:
            before = loop.seconds()
            work()
            return (loop.seconds() - before) / (STREAMS * TOKENS)

        http, own = medians(
            max(3, repeats // 8),
            lambda: spent(lambda: ask(port, engine.model_name, STREAMS, TOKENS)),
            lambda: spent(lambda: loop.run(read_all(engine))),
        )
        print(
            f"processor time of a token {http * 1e6:8.1f} us over HTTP, {own * 1e6:.1f} in process, {STREAMS} streams"
        )

        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, max(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
        gc.collect()
        before = psutil.Process(os.getpid()).memory_info().rss
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(1000)]
        while len(server.server_state.connections) < 1000:
            time.sleep(0.01)
        used = psutil.Process(os.getpid()).memory_info().rss - before
        print(f"1,000 idle connections    {used / 1e6:8.1f} MB")
        for one in idle:
            one.close()
        server.should_exit = True
        serving.result()


def _ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return client.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


if __name__ == "__main__":
    main()

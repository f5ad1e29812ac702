"""The application of docs/embedding.md, as it is printed there."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from pathlib import Path

import httpx2
import pytest
import uvicorn

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "embedding.md"
TINY = ROOT / "examples" / "tiny" / "tiny.ninfer"


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def embedded():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names = {}
    exec(compile(code.replace("model.ninfer", str(TINY)), PAGE, "exec"), names)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(names["app"], log_config=None, timeout_keep_alive=75))
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listening]),), daemon=True)
    thread.start()
    with httpx2.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as client:
        wait_for(lambda: server.started)
        yield client
    server.should_exit = True
    thread.join(30)
    assert not names["engine"].available


def test_the_server_is_a_part_of_another(embedded):
    wait_for(lambda: embedded.get("/llm/ready").status_code == 200)
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "model": "house-model", "temperature": 0}
    answer = embedded.post("/llm/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "17 + 25 = 42"
    assert embedded.get("/llm/").status_code == 404


def test_routes_of_its_own_use_the_same_engine(embedded):
    text = embedded.post("/shout", content="Hello").text
    assert text
    assert text == text.upper()
    assert embedded.get("/busy").text == "0 active, 0 waiting\n"


def test_a_caller_who_leaves_its_own_route_cancels_the_answer(embedded):
    with embedded.stream("POST", "/shout", content="Sort these words: pear, apple, fig") as answer:
        next(answer.iter_raw())
    wait_for(lambda: embedded.get("/busy").text == "0 active, 0 waiting\n")

"""Bad input, and clients that leave or stall: the right status, the engine unaffected, capacity back at baseline."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest
from live.server import ENDLESS, TINY, serving, until

from ninfer import Engine

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
CHAT = PATHS[0]
ASK = {"model": "ninfer-tiny", "messages": [{"role": "user", "content": "What is 3 plus 4?"}], "temperature": 0}
ENDLESS_ASK = {**ASK, **ENDLESS}


def request(path, body, *, declared=None, kind="application/json"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = len(data) if declared is None else declared
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\nconnection: close"
    return f"{head}\r\ncontent-length: {length}\r\n\r\n".encode() + data


def connect(server, data):
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(data)
    return client


def read(client):
    """Everything until the other end closes."""
    with client.makefile("rb") as received:
        return received.read().decode()


def works(server):
    answer = server.post(CHAT, ASK)
    return answer.json()["choices"][0]["message"]["content"] == "3 + 4 = 7"


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nothing", b"[]", b"null", b'"x"', b'{"model": NaN}', b'{"model": 1, "model": 2}', b"\xff\xfe",
     b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"model": ' + b"9" * 5000 + b"}",
     b"\xef\xbb\xbf{}"],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_what_is_not_a_json_object(server, path, data):
    with connect(server, request(path, data)) as client:
        answer = read(client)
    assert answer.startswith("HTTP/1.1 400")
    error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [None, True, 5, 0.5, "", [], [[]], {}, [{}], [None], {"": None}])
def test_wrong_types_in_every_place(server, path, value):
    """Each field of a body in turn is something else: an answer or a refusal, never a failure."""
    body = {**ASK, "max_tokens": 4, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    if path == "/v1/responses":
        body = {"model": "ninfer-tiny", "input": body["messages"], "tools": [{"type": "function", "name": "f"}]}
    elif path != CHAT:
        body["tools"] = [{"name": "f", "input_schema": {}}]
    for changed in replaced(body, value):
        assert server.post(path, changed).status_code in (200, 400, 404), changed
    assert server.idle()


def replaced(tree, value):
    """Copies of a JSON value with one place in it changed."""
    yield value
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        for changed in replaced(item, value):
            copy = dict(tree) if isinstance(tree, dict) else list(tree)
            copy[key] = changed
            yield copy


def test_other_content_and_methods_and_paths(server):
    with connect(server, request(CHAT, ASK, kind="text/plain")) as client:
        assert client.recv(4096).startswith(b"HTTP/1.1 415")
    assert server.get(CHAT).status_code == 405
    assert server.get("/v2").status_code == 404
    assert server.get("/v2").json()["error"]["code"] == "not_found"
    with connect(server, b"\x00\x01\x02 nothing\r\n\r\n") as client:
        assert client.recv(4096).startswith(b"HTTP/1.1 400")
    assert works(server)


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow():
    """One answer at a time."""
    with Engine(TINY, max_context=2048, max_concurrency=1, progress=False) as engine, serving(engine) as server:
        yield server


def outcomes(server):
    lines = server.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("ninfer_requests_total") and not line.endswith(" 0.0")]
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in counted}


def hang_up(client, how):
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        client.shutdown(socket.SHUT_WR)
    else:
        client.close()


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_the_answer_is_decoded(narrow, how, stream):
    client = connect(narrow, request(CHAT, {**ENDLESS_ASK, "stream": stream}))
    assert until(lambda: narrow.engine.stats().active == 1)
    hang_up(client, how)
    assert narrow.idle()
    assert until(lambda: outcomes(narrow) == {"cancelled": 1})
    assert narrow.engine.stats().finished.get("cancelled") == 1
    client.close()
    assert works(narrow)


def test_leaving_while_the_request_waits(narrow):
    running = narrow.engine.submit("Hello", max_tokens=1900, ignore_eos=True)
    client = connect(narrow, request(CHAT, ASK))
    assert until(lambda: narrow.engine.stats().waiting == 1)
    hang_up(client, "close")
    assert until(lambda: narrow.engine.stats().waiting == 0)
    assert not running.done
    running.close()
    assert narrow.idle()
    assert until(lambda: outcomes(narrow) == {"cancelled": 1})


def test_leaving_while_the_body_is_sent(narrow):
    hang_up(connect(narrow, request(CHAT, ASK, declared=10_000)), "close")
    assert until(lambda: outcomes(narrow) == {"cancelled": 1})
    assert narrow.engine.stats().outstanding == 0
    assert works(narrow)


@pytest.mark.parametrize("phase", ["prepare", "submit"])
def test_leaving_while_the_request_is_prepared(narrow, monkeypatch, phase):
    """The thread that prepares or compiles finds out when it is done."""
    begun, go = threading.Event(), threading.Event()
    work, before = getattr(narrow.engine, phase), narrow.engine.stats().accepted

    def slow(*args, **kwargs):
        begun.set()
        assert go.wait(20)
        return work(*args, **kwargs)

    monkeypatch.setattr(narrow.engine, phase, slow)
    others = narrow.app_connections()
    client = connect(narrow, request(CHAT, ENDLESS_ASK))
    assert begun.wait(20)
    hang_up(client, "close")
    assert until(lambda: narrow.app_connections() == others)
    go.set()
    assert narrow.idle()
    assert until(lambda: outcomes(narrow) == {"cancelled": 1})
    assert narrow.engine.stats().accepted == before + (phase == "submit")
    monkeypatch.undo()
    assert works(narrow)


def test_a_client_that_does_not_read(engine):
    with serving(engine, stall_timeout=0.3) as server:
        body = {**ENDLESS_ASK, "stream": True, "logprobs": True, "top_logprobs": 20}
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(request(CHAT, body))
        assert until(lambda: server.engine.stats().outstanding == 1)
        assert server.idle()
        assert until(lambda: outcomes(server) in ({"cancelled": 1}, {"length": 1}))
        assert outcomes(server) == {"cancelled": 1}
        client.close()
        assert works(server)


def test_an_engine_fault_ends_one_request_only(server, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no text of this is for the client")

    monkeypatch.setattr(server.engine, "prepare", broken)
    for path in PATHS[:1]:
        failed = server.post(path, ASK)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert "no text" not in failed.text
    monkeypatch.undo()
    assert works(server)

"""Bad input, and clients that leave or stall: the right status, the engine unaffected, capacity back at baseline."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading

import pytest
from live.server import ENDLESS, TINY, serving, until

from ninfer import Engine
from ninfer.constraints.limits import STRETCH, Work

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


@pytest.fixture
def held(monkeypatch):
    """Holds one phase of every request that says so: its preparation, or the compilation of its constraint."""
    import ninfer.frontend.constrain as compiling

    class Held:
        begun, go = threading.Event(), threading.Event()

        def hold(self, server, phase):
            room, name = (server.engine._frontend, "prepare") if phase == "prepare" else (compiling, "language")
            work = getattr(room, name)

            def slow(first, *rest):
                if "[ab]" in repr(first) or "hold" in repr(first):
                    self.begun.set()
                    while not self.go.is_set():
                        Work().spend(STRETCH + 1) if phase == "compile" else self.go.wait(20)
                return work(first, *rest)

            monkeypatch.setattr(room, name, slow)

    held = Held()
    yield held
    held.go.set()


HELD_ASK = {
    **ENDLESS_ASK,
    "messages": [{"role": "user", "content": "hold"}],
    "structured_outputs": {"regex": "[ab]{7999}"},  # which nobody else has had compiled
}


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("phase", ["prepare", "compile"])
def test_leaving_while_the_request_is_prepared(engine, held, phase, how):
    """Its places are free at once, whatever its thread still does, and the next request is served in them."""
    with serving(engine, max_requests=1) as server:
        held.hold(server, phase)
        accepted, abandoned = engine.stats().accepted, engine.stats().constraints["abandoned"]
        client = connect(server, request(CHAT, HELD_ASK))
        assert held.begun.wait(20)
        assert server.post(CHAT, ASK).status_code == 429
        hang_up(client, how)
        assert until(lambda: running(server) == 0)
        assert server.idle()
        assert works(server)
        assert not held.go.is_set()
        assert until(lambda: engine.stats().constraints["abandoned"] == abandoned + (phase == "compile"))
        held.go.set()
        assert until(lambda: outcomes(server) == {"cancelled": 1, "overloaded": 1, "stop": 1})
        assert engine.stats().accepted == accepted + 1
        client.close()


def running(server):
    lines = server.get("/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith("ninfer_requests_running ")))


def test_leaving_a_compilation_that_another_waits_for(engine, held):
    with serving(engine) as server:
        held.hold(server, "compile")
        form = {**ASK, "structured_outputs": {"regex": "[ab]{3}"}}
        builds = engine.stats().constraints["builds"]
        first = connect(server, request(CHAT, form))
        assert held.begun.wait(20)
        waits = engine.stats().constraints["waits"]
        second = connect(server, request(CHAT, form))
        assert until(lambda: engine.stats().constraints["waits"] == waits + 1)
        hang_up(first, "close")
        assert until(lambda: engine.stats().outstanding == 1)
        held.go.set()
        with second:
            answer = read(second)
        text = json.loads(answer.partition("\r\n\r\n")[2])["choices"][0]["message"]["content"]
        assert len(text) == 3
        assert engine.stats().constraints["builds"] == builds + 1
        assert server.idle()


@pytest.mark.parametrize("phase", ["compile", "queue"])
def test_the_request_timeout_holds_before_the_request_runs(engine, held, phase):
    with serving(engine, request_timeout=0.2) as server:
        lanes = engine.options.max_concurrency if phase == "queue" else 0
        running = [engine.submit("Hello", max_tokens=1900, ignore_eos=True) for _ in range(lanes)]
        held.hold(server, "compile")
        answer = server.post(CHAT, HELD_ASK if phase == "compile" else ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert engine.stats().outstanding == lanes
        for handle in running:
            handle.close()
        assert server.idle()
        assert works(server)


def test_a_server_told_to_end_waits_for_no_compilation(engine, held):
    with serving(engine, drain=1) as server:
        held.hold(server, "compile")
        client = connect(server, request(CHAT, HELD_ASK))
        assert held.begun.wait(20)
    assert server.idle()
    assert not held.go.is_set()
    client.close()
    with serving(engine) as server:
        assert works(server)


def test_clients_that_leave_at_any_moment(engine):
    """Each after a time of its own, in whatever phase that finds its request; some share a constraint."""
    with serving(engine) as server:

        def client(seed):
            draw = random.Random(seed)
            for _ in range(5):
                form = {"regex": f"([a-z]{{1,{draw.randrange(20, 24)}}}[0-9]-?){{1,40}}"}
                text = "Tell me. " * draw.choice([1, 50, 5000])
                body = {**ASK, "messages": [{"role": "user", "content": text}], "max_tokens": 200}
                form = {"structured_outputs": form} if draw.random() < 0.7 else {}
                with connect(server, request(CHAT, {**body, **form, "stream": draw.random() < 0.5})) as leaving:
                    leaving.settimeout(draw.choice([0.001, 0.01, 0.03, 0.1]))
                    with contextlib.suppress(OSError):
                        leaving.recv(4096)
                    hang_up(leaving, draw.choice(["close", "reset", "half"]))

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert until(lambda: server.app_connections() <= 1)  # that of the test's own client
        assert server.idle()
        assert until(lambda: running(server) == 0)
        assert 0 < outcomes(server)["cancelled"] <= sum(outcomes(server).values()) <= 30
        assert works(server)


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

    monkeypatch.setattr(server.engine._frontend, "prepare", broken)
    for path in PATHS[:1]:
        failed = server.post(path, ASK)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
        assert "no text" not in failed.text
    monkeypatch.undo()
    assert works(server)

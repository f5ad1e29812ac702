"""What an operator relies on: keys, limits, readiness, metrics, the request log, shutdown."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import anthropic
import httpx2
import openai
import pytest
from live.server import ENDLESS, TINY, serving, until
from prometheus_client.parser import text_string_to_metric_families

from ninfer import Engine
from ninfer.errors import InvalidRequest
from ninfer.gateway.cli import main, parser
from ninfer.gateway.cli.serve import _listen
from ninfer.gateway.http import ServerOptions, create_app

CHAT = "/v1/chat/completions"


def body(model="ninfer-tiny", text="What is 3 plus 4?", **fields):
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 16,
        **fields,
    }


def sample(server, name, **labels):
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for found in family.samples:
            if found.name == name and found.labels == labels:
                return found.value
    return None


# -- access ------------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for(serve):
    server = serve(api_keys=["one", "two"])
    for headers in ({"authorization": "Bearer two"}, {"x-api-key": "one"}, {"Authorization": "bearer one"}):
        assert server.post(CHAT, body(), headers=headers).status_code == 200
        assert server.get("/v1/models", headers=headers).status_code == 200
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"x-api-key": "tw"}):
        refused = server.post(CHAT, body(), headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] in ("missing_api_key", "invalid_api_key")
        for path in ("/v1/models", "/v1/models/ninfer-tiny", "/metrics"):
            assert server.get(path, headers=headers).status_code == 401
    assert server.post("/v1/messages", {}).json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/ready"):
        assert server.get(path).status_code == 200


@pytest.mark.parametrize("keys", [[""], [" "], [5], ["ä"]])
def test_a_key_that_is_none(keys):
    with pytest.raises(InvalidRequest) as caught:
        ServerOptions(api_keys=keys)
    assert caught.value.field == "api_keys"


def test_one_key_is_a_key():
    assert ServerOptions(api_keys="secret").api_keys == ("secret",)
    assert "secret" not in repr(ServerOptions(api_keys="secret"))


def test_other_origins_are_let_in_only_when_named(serve, server):
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    assert "access-control-allow-origin" not in httpx2.options(f"{server.url}{CHAT}", headers=ask).headers
    named = serve(cors_origins=["https://page.example"])
    assert httpx2.options(f"{named.url}{CHAT}", headers=ask).headers["access-control-allow-origin"] == ask["Origin"]
    ask["Origin"] = "https://other.example"
    assert "access-control-allow-origin" not in httpx2.options(f"{named.url}{CHAT}", headers=ask).headers


def test_the_model_id_is_chosen(serve):
    server = serve(model_id="qwen")
    assert server.post(CHAT, body("qwen")).json()["model"] == "qwen"
    assert server.post(CHAT, body()).status_code == 404
    assert server.get("/v1/models").json()["data"][0]["id"] == "qwen"


@pytest.mark.parametrize("field", ["max_body", "max_requests", "request_timeout", "body_timeout", "stall_timeout"])
def test_limits_are_positive(engine, field):
    for value in (0, -1, "x", True):
        with pytest.raises(InvalidRequest) as caught:
            create_app(engine, **{field: value})
        assert caught.value.field == field
    with pytest.raises(TypeError):
        create_app(engine, colour=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_id", ""), ("model_id", 5), ("api_keys", None), ("cors_origins", [""]), ("cors_origins", 5),
     ("request_log", 1), ("warm_up", "no"), ("playground", 0)],
)  # fmt: skip
def test_other_options_are_of_their_type(field, value):
    with pytest.raises(InvalidRequest) as caught:
        ServerOptions(**{field: value})
    assert caught.value.field == field


# -- readiness ---------------------------------------------------------------------------------------------------------


def test_ready_follows_the_warm_up_and_the_engine(monkeypatch, tiny):
    go, warm_up, start = threading.Event(), tiny.warm_up, tiny.stats()
    monkeypatch.setattr(tiny, "warm_up", lambda: go.wait(20) and warm_up())
    threading.Timer(0.3, go.set).start()
    with serving(tiny) as server:  # returns when the server says ready
        assert go.is_set()
        assert tiny.stats() == start
        for name in ("decode_rounds_total", "prefill_units_total", "decode_seconds_total"):
            assert sample(server, f"ninfer_engine_{name}") == 0
        assert sample(server, "ninfer_requests_total", protocol="chat_completions", outcome="stop") == 0
        tiny.close()
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        refused = server.post(CHAT, body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert server.post("/v1/messages", {"model": "ninfer-tiny", "max_tokens": 3, "messages": [
            {"role": "user", "content": "x"}]}).json()["error"]["type"] == "api_error"  # fmt: skip
        assert sample(server, "ninfer_engine_available") == 0


@pytest.fixture
def tiny():
    """An engine that has answered nothing."""
    with Engine(TINY, max_context=256, progress=False) as engine:
        yield engine


# -- counts ------------------------------------------------------------------------------------------------------------


def test_metrics_settle_every_request(serve):
    server = serve()
    outcomes = lambda: {  # noqa: E731
        outcome: sample(server, "ninfer_requests_total", protocol="chat_completions", outcome=outcome)
        for outcome in ("stop", "length", "tool_calls", "refused", "cancelled", "failed", "overloaded", "timeout")
    }
    assert set(outcomes().values()) == {0}
    server.post(CHAT, body())
    server.post(CHAT, body(max_tokens=3))
    server.post(CHAT, body(n=2))
    server.post(CHAT, body("other"))
    with httpx2.stream("POST", f"{server.url}{CHAT}", json=body(
        stream=True, **ENDLESS)) as answer:  # fmt: skip
        received = answer.iter_lines()
        assert sample(server, "ninfer_requests_running") == 1
        while '"content":""' in (line := next(received)) or not line:
            pass
    assert until(lambda: outcomes()["cancelled"] == 1)
    assert {k: v for k, v in outcomes().items() if v} == {"stop": 1, "length": 1, "refused": 2, "cancelled": 1}
    prompt = sample(server, "ninfer_tokens_total", protocol="chat_completions", kind="prompt")
    assert prompt == 3 * server.engine.count_tokens("What is 3 plus 4?")
    assert sample(server, "ninfer_tokens_total", protocol="chat_completions", kind="completion") > 8 + 3
    assert sample(server, "ninfer_request_seconds_count", protocol="chat_completions") == 5
    assert sample(server, "ninfer_requests_running") == 0


def test_no_request_adds_a_series(serve):
    server = serve()
    server.post(CHAT, body())
    names = lambda: {line.split(" ")[0] for line in server.get("/metrics").text.splitlines()}  # noqa: E731
    before = names()
    server.post(CHAT, body("strange \n model", text="strange"))
    server.post(CHAT, body(colour="strange"))
    server.get("/strange")
    assert names() == before


def test_the_log_has_a_line_for_each_request_and_no_text(serve, tmp_path):
    path = tmp_path / "requests.jsonl"
    server = serve(request_log=str(path))
    secret = "plover"
    server.post(CHAT, body(text=secret))
    server.post(CHAT, body(text=secret, structured_outputs={"choice": [secret]}))
    server.post(CHAT, body(text=secret, **{secret: secret}))
    server.post(CHAT, body(secret))
    server.post("/v1/responses", {"model": "ninfer-tiny", "input": secret, "instructions": secret, "stream": True})
    server.post("/v1/messages/count_tokens", {"model": "ninfer-tiny", "messages": body(text=secret)["messages"]})
    assert until(lambda: len(path.read_text().splitlines()) == 6)
    assert secret not in path.read_text()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 400, 404, 200, 200]
    assert [line["outcome"] for line in lines[:4]] == ["stop" if lines[0]["finish_reason"] == "stop" else "length",
                                                       "stop", "refused", "refused"]  # fmt: skip
    assert lines[0]["constraint"] is None
    assert lines[1]["constraint"]["kind"] == "choice"
    assert lines[1]["constraint"]["complete"] is True
    assert lines[1]["usage"]["prompt_tokens"] > 0
    assert lines[1]["timings"]["ttft"] > 0
    assert len({line["id"] for line in lines}) == 6


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_long(serve):
    server = serve(max_body=1000)
    assert server.post(CHAT, body(text="x" * 2000)).status_code == 413
    chunks = httpx2.post(
        f"{server.url}{CHAT}", content=iter([b"{" * 600] * 3), headers={"content-type": "application/json"}
    )
    assert chunks.status_code == 413
    assert server.post("/v1/messages", {"x": "y" * 2000}).json()["error"]["type"] == "request_too_large"
    assert server.post(CHAT, body()).status_code == 200


def test_a_body_that_does_not_come(serve):
    server = serve(body_timeout=0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                       "content-length: 100\r\n\r\n{".encode())  # fmt: skip
        assert client.recv(4096).startswith(b"HTTP/1.1 408")
    assert server.idle()


def test_too_many_requests(serve):
    server = serve(max_requests=1)
    endless = body(stream=True, **ENDLESS)
    with httpx2.stream("POST", f"{server.url}{CHAT}", json=endless) as answer:
        received = answer.iter_bytes()
        next(received)
        refused = server.post(CHAT, body())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        refused = server.post("/v1/messages", {})
        assert (refused.status_code, refused.json()["error"]["type"]) == (529, "overloaded_error")
    assert until(lambda: server.post(CHAT, body()).status_code == 200)


def test_an_engine_that_is_full():
    options = {"max_context": 2048, "max_outstanding": 1, "progress": False}
    with Engine(TINY, **options) as engine, serving(engine, max_requests=8) as server:
        handle = engine.submit("Hello", max_tokens=1000, ignore_eos=True)
        assert server.post(CHAT, body()).status_code == 429
        handle.close()
        assert until(lambda: server.post(CHAT, body()).status_code == 200)


def test_timeouts():
    options = {"max_context": 4096, "max_concurrency": 1, "queue_timeout": 0.1, "progress": False}
    with Engine(TINY, **options) as engine, serving(engine, request_timeout=0.4) as server:
        endless = body(**{**ENDLESS, "max_tokens": 4000})
        late = server.post(CHAT, endless)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        events = server.post(CHAT, {**endless, "stream": True}).text
        assert '"code":"timeout"' in events
        assert "[DONE]" not in events
        form = endless["structured_outputs"]
        item = {"model": "ninfer-tiny", "input": "x", "max_output_tokens": 4000, "structured_outputs": form}
        failed = server.post("/v1/responses", {**item, "stream": True})
        assert failed.text.splitlines()[-3] == "event: response.failed"
        broken = server.post("/v1/messages", {**endless, "stream": True})
        assert broken.text.splitlines()[-3] == "event: error"
        with pytest.raises(openai.APIError, match="timeout has passed"):
            list(server.openai().chat.completions.create(
                model="ninfer-tiny", messages=endless["messages"], stream=True, max_tokens=4000,
                extra_body={"structured_outputs": form}))  # fmt: skip
        with pytest.raises(anthropic.APIStatusError, match="timeout has passed"):
            list(server.anthropic().messages.create(
                model="ninfer-tiny", messages=endless["messages"], stream=True, max_tokens=4000,
                extra_body={"structured_outputs": form}))  # fmt: skip
        handle = engine.submit("Hello", max_tokens=3000, ignore_eos=True)
        queued = server.post(CHAT, {**body(), "stream": True})
        assert (queued.status_code, queued.json()["error"]["code"]) == (503, "queue_timeout")
        handle.close()
        assert server.idle()


# -- the command -------------------------------------------------------------------------------------------------------


def command(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen(
        [sys.executable, "-m", "ninfer.gateway.cli", "serve", str(TINY), "--port", "0", *arguments],
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    for line in started.stderr:
        if "listening on " in line:
            return started, line.split("listening on ")[1].strip()
    raise AssertionError("the server did not start")


def test_the_command_serves_and_lets_answers_finish():
    started, url = command("--max-context", "2048", "--model-id", "qwen")
    try:
        assert url.startswith("http://127.0.0.1:")
        assert until(lambda: httpx2.get(f"{url}/ready").status_code == 200)
        endless = body("qwen", stream=True, max_tokens=1200, structured_outputs={"regex": "[ab]{1200}"})
        with httpx2.stream("POST", f"{url}{CHAT}", json=endless, timeout=60) as answer:
            received = answer.iter_text()
            next(received)
            started.send_signal(signal.SIGTERM)
            rest = "".join(received)
        assert rest.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")
        assert started.wait(20) == 0
    finally:
        started.kill()
        started.stderr.close()


def test_a_connection_is_kept_as_long_as_the_command_says():
    """Clients and balancers keep an unused one for up to a minute: the server must not be the first to close it."""
    assert parser().parse_args(["serve", "a.ninfer"]).keep_alive_timeout > 60
    started, url = command("--keep-alive-timeout", "1", "--no-warm-up")
    try:
        address = httpx2.URL(url)
        with socket.create_connection((address.host, address.port)) as client:
            client.settimeout(20)
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            answered = time.monotonic()
            while client.recv(1 << 16):
                pass
            assert time.monotonic() - answered > 0.9
    finally:
        started.kill()
        started.stderr.close()


@pytest.mark.parametrize("option", ["--keep-alive-timeout=0", "--drain-timeout=-1", "--stall-timeout=0"])
def test_times_of_the_command_are_positive(option, capsys):
    assert main(["serve", "missing.ninfer", "--port", "0", option]) == 2
    assert option[2:].split("=")[0].replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "kept"), [(5.0, 5000), (math.inf, 2**31 - 1), (1e-9, 1)])
def test_how_long_the_peer_of_a_connection_may_take_nothing(seconds, kept):
    with _listen("127.0.0.1", 0, seconds) as listening:
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == kept


def test_connections_send_at_once():
    """Otherwise the second chunk of a stream waits for the first one to be confirmed, which takes 40 ms."""
    with _listen("127.0.0.1", 0, 5.0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000


def test_a_port_in_use(server, capsys):
    assert main(["serve", str(TINY), "--port", str(server.port)]) == 1
    assert "in use" in capsys.readouterr().err
    assert main(["serve", str(TINY), "--port", "70000"]) == 2


def test_preparing_holds_up_no_other_answer(server, monkeypatch):
    """While one request keeps a processor busy with its preparation, another's stream keeps coming."""
    frontend, received, seen = server.engine._frontend, [], []
    prepare = frontend.prepare

    def busy(prompt):
        monkeypatch.undo()
        enough, deadline = len(received) + 50, time.monotonic() + 20
        while len(received) < enough and time.monotonic() < deadline:
            pass
        seen.append(len(received) >= enough)
        return prepare(prompt)

    with httpx2.stream("POST", f"{server.url}{CHAT}", json=body(stream=True, **ENDLESS), timeout=60) as answer:
        chunks = answer.iter_raw()
        received.append(next(chunks))
        monkeypatch.setattr(frontend, "prepare", busy)
        other = threading.Thread(target=server.post, args=(CHAT, body()))
        other.start()
        for chunk in chunks:
            received.append(chunk)
        other.join()
    assert seen == [True]

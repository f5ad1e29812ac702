"""The Ray Serve example, with two engines on a Ray of this machine."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = {"model": "ninfer-tiny", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}


@pytest.fixture(scope="module")
def address():
    ray = pytest.importorskip("ray")
    from ray import serve

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / "ray_serve"))
        patch.setenv("NINFER_CPU_THREADS", "1")
        import app

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        paths = ":".join(map(str, [EXAMPLES / "ray_serve", EXAMPLES.parent / "src"]))
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths, "NINFER_CPU_THREADS": "1"}},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app.build({"artifact": str(EXAMPLES / "tiny" / "tiny.ninfer"), "replicas": "2"}))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


def ask(address: str, session: str | None, **more):
    headers = {"content-type": "application/json"} | ({"x-session-id": session} if session else {})
    body = json.dumps(QUESTION | more).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.headers["x-replica"], response.read().decode()


def test_a_session_stays_where_its_context_is(address):
    homes = {f"session-{i}": ask(address, f"session-{i}")[0] for i in range(8)}
    assert len(set(homes.values())) == 2
    for _ in range(2):
        for session, home in homes.items():
            assert ask(address, session)[0] == home


def test_requests_without_a_session_are_spread(address):
    assert len({ask(address, None)[0] for _ in range(16)}) == 2


def test_answers_are_those_of_one_engine(address):
    _, text = ask(address, "a")
    answer = json.loads(text)
    assert answer["choices"][0]["message"]["content"] == "17 + 25 = 42"
    _, stream = ask(address, "a", stream=True)
    assert stream.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "17 + 25 = 42"


def test_a_refusal_is_the_server_s_own(address):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(address, "a", model="other")
    assert refused.value.code == 404
    assert "x-replica" in refused.value.headers


def test_a_session_moves_when_its_replica_is_lost(address):
    import ray

    home = ask(address, "traveller")[0]
    (name,) = (a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].endswith(home))
    ray.kill(ray.get_actor(name, namespace="serve"))
    end = time.monotonic() + 60
    while True:
        try:
            moved, text = ask(address, "traveller")
            break
        except urllib.error.HTTPError:
            assert time.monotonic() < end
    assert moved != home
    assert json.loads(text)["choices"][0]["message"]["content"] == "17 + 25 = 42"

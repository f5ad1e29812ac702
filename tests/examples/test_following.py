"""Rounds that commits launch, over the small model and a device that does nothing until it is waited for: the answers
are those of a device that blocks, whose rounds are asked for one by one."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from fakes.async_device import AsyncDevice

import ninfer
from ninfer import Chat, OutputConstraint, SamplingParams
from ninfer._cpu.device import CpuDevice
from ninfer.program import rounds

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
WARM = SamplingParams(temperature=1.2, seed=11)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["place", "n"],
}
REQUESTS = {
    "free": {"max_tokens": 80, "ignore_eos": True},
    "schema": {"max_tokens": 80, "constraint": OutputConstraint.json_schema(SCHEMA)},
    "regex": {"max_tokens": 40, "constraint": OutputConstraint.regex("[a-z]{3,30}!")},
    "scores": {"max_tokens": 30, "logprobs": 3, "ignore_eos": True},
    "stop string": {"max_tokens": 60, "stop": ("the",), "ignore_eos": True},
    "thinking": {"max_tokens": 40, "thinking_budget": 9, "constraint": OutputConstraint.regex("[a-z]{3,30}!")},
}


def answers(engine: ninfer.Engine, names: list[str]) -> list[tuple[object, ...]]:
    handles = []
    for i, name in enumerate(names):
        prompt = Chat([{"role": "user", "content": f"Where is number {i}?"}], thinking=name == "thinking")
        handles.append(engine.submit(prompt, **({"sampling": WARM, "cache": "disabled"} | REQUESTS[name])))
    results = [handle.result() for handle in handles]
    return [(r.token_ids, r.text, r.thinking, r.finish_reason, r.logprobs) for r in results]


@pytest.mark.parametrize(
    "names", [["free"], ["schema"], ["regex"], ["scores"], ["stop string"], ["thinking"], [*REQUESTS]], ids="+".join
)
def test_answers_of_rounds_that_follow(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_concurrency": 8, "max_context": 512, "progress": False, "spec": "none"}
    with ninfer.Engine(TINY, device="cpu", **options) as engine:
        want = answers(engine, names)
    followed, follow = [], rounds.follow
    monkeypatch.setattr(rounds, "follow", lambda *a: (followed.append(1), follow(*a))[1])
    late = AsyncDevice(CpuDevice())
    with (
        patch("ninfer.runtime.devices.open_device", return_value=late),
        ninfer.Engine(TINY, device="cpu", **options) as engine,
    ):
        assert answers(engine, names) == want
        decoded = engine.stats().decode_rounds
    assert len(followed) > decoded / 2
    assert late.submitted == late.finished

"""The public Engine over a small random model on the host."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import psutil
import pytest

import ninfer
from ninfer.artifact import write_artifact
from ninfer.models.qwen3_5.geometries import GEOMETRIES
from ninfer.models.qwen3_5.synthetic import synthetic_source

PROMPTS = [ninfer.TokenPrompt([5 + (7 * i + j) % 200 for j in range(3 + 11 * i)]) for i in range(6)]
HOT = ninfer.SamplingParams(seed=3, temperature=40.0, top_k=64)  # random weights are very sure of themselves
FIXED = ninfer.RequestOptions(max_tokens=16, ignore_eos=True, sampling=HOT)


@pytest.fixture(scope="module")
def source() -> Any:
    return synthetic_source("tiny", "q8")


@pytest.fixture(scope="module")
def engine(source: Any) -> Iterator[ninfer.Engine]:
    options = ninfer.EngineOptions(max_context=256, max_concurrency=4, progress=False)
    with ninfer.Engine(source, options, concurrent_prefill=True, prefill_chunk=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(source: Any) -> list[tuple[int, ...]]:
    """Every prompt's answer, computed alone and in one prefill."""
    with ninfer.Engine(source, max_context=256, max_concurrency=1, progress=False) as alone:
        answers = [alone.generate(prompt, FIXED).token_ids for prompt in PROMPTS]
    assert all(len(set(answer)) > 8 for answer in answers)
    return answers


def at_baseline(engine: ninfer.Engine) -> bool:
    engine.cache.clear()
    stats = engine.stats()
    used = stats.memory["pages.main.used"] + stats.memory["state_slots.used"]
    return stats.outstanding == stats.active == stats.waiting == used == 0


def test_one_answer(engine):
    handle = engine.submit("Where is Ada?", FIXED)
    events = list(handle)
    result = handle.result()
    assert isinstance(events[0], ninfer.GenerationStart)
    assert events[0].prompt_tokens == engine.count_tokens("Where is Ada?")
    assert len(result.token_ids) == 16
    assert result.stop_reason == "max_tokens"
    assert result.usage.completion_tokens == 16
    assert result.timings.ttft > 0
    assert "synthetic-tiny-q8 on cpu" in repr(engine)
    assert at_baseline(engine)


def test_batches_threads_and_tasks_all_get_the_same_tokens(engine, expected):
    assert [r.token_ids for r in engine.generate(PROMPTS, FIXED)] == expected

    answers: dict[int, tuple[int, ...]] = {}

    def ask(i: int) -> None:
        answers[i] = engine.submit(PROMPTS[i], FIXED, block=True).result().token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(PROMPTS))] == expected

    async def main() -> list[tuple[int, ...]]:
        async def ask(prompt: ninfer.TokenPrompt) -> tuple[int, ...]:
            handle = await engine.submit_async(prompt, FIXED)
            return tuple([t async for e in handle if isinstance(e, ninfer.Delta) for t in e.token_ids])

        return await asyncio.gather(*map(ask, PROMPTS))

    streamed = asyncio.run(main())
    assert all(full[: len(part)] == part for part, full in zip(streamed, expected)), "text may lag behind at the end"
    assert at_baseline(engine)


def test_logprobs_are_of_the_emitted_tokens(engine):
    result = engine.generate(PROMPTS[1], FIXED, logprobs=3, sampling=ninfer.SamplingParams(temperature=0.0))
    assert [score.token_id for score in result.logprobs] == list(result.token_ids)
    for score in result.logprobs:
        assert score.logprob <= 0
        assert len(score.top) == 3
        assert score.top[0] == (score.token_id, score.logprob), "greedy takes the most likely token"
        assert sum(np.exp(p) for _, p in score.top) <= 1 + 1e-5


def test_a_thinking_budget_is_forced(engine):
    chat = ninfer.Chat([{"role": "user", "content": "Where is Ada?"}], thinking=True)
    result = engine.generate(chat, FIXED, thinking_budget=4, max_tokens=30)
    assert 4 < result.usage.thinking_tokens < 12
    assert result.usage.completion_tokens == 30
    nothing = engine.generate(chat, FIXED, thinking_budget=0)
    assert nothing.thinking.strip() == ""


def test_cancelling_gives_everything_back(engine):
    handles = [engine.submit(prompt, FIXED, max_tokens=200) for prompt in PROMPTS]
    next(iter(handles[0]))
    handles[0].cancel()
    assert handles[0].result().finish_reason == "cancelled"
    handles[1].close()
    del handles
    gc.collect()
    assert engine.generate(PROMPTS[0], FIXED).finish_reason == "length"
    assert at_baseline(engine)


def test_bad_input_changes_nothing(engine, expected):
    refused = [
        (ninfer.InvalidRequest, lambda: engine.chat([{"role": "nobody", "content": "x"}])),
        (ninfer.InvalidRequest, lambda: engine.generate(ninfer.TokenPrompt([10**6]))),
        (ninfer.InvalidRequest, lambda: engine.generate("x", stop_token_ids=[10**6])),
        (ninfer.ContextOverflow, lambda: engine.generate(ninfer.TokenPrompt([7] * 257))),
        (TypeError, lambda: engine.generate("x", speed=1)),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert at_baseline(engine)
    assert engine.generate(PROMPTS[2], FIXED).token_ids == expected[2]


def test_the_context_is_filled_to_its_end(engine):
    result = engine.generate(ninfer.TokenPrompt([7] * 250), FIXED, max_tokens=100)
    assert (result.stop_reason, len(result.token_ids)) == ("context", 7)
    assert len(engine.generate(ninfer.TokenPrompt([7] * 256), FIXED).token_ids) == 1
    assert at_baseline(engine)


def test_an_artifact_file_is_opened_by_its_path(source, expected, tmp_path: Path):
    path = tmp_path / "model.ninfer"
    objects = source.directory.objects
    write_artifact(
        path, source.directory, lambda name: [(0, source.view(objects[name].offset, objects[name].nbytes).tobytes())]
    )
    with ninfer.Engine(path, max_context=256, max_concurrency=2, kv_capacity=512, progress=False) as engine:
        assert engine.generate(PROMPTS[1], FIXED).token_ids == expected[1]
        assert engine.stats().memory["pages.main.total"] == 8


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"max_context": 10**9}, ninfer.InvalidRequest, "max_context"),
        ({"kv_capacity": 3}, ninfer.InvalidRequest, "kv_capacity"),
        ({"max_context": 200, "kv_capacity": 10**9}, ninfer.InvalidRequest, "kv_capacity"),
    ],
)
def test_options_that_this_model_cannot_have(source, options, error, field):
    with pytest.raises(error) as caught:
        ninfer.Engine(source, progress=False, **options)
    assert caught.value.field == field


def test_a_missing_or_broken_artifact(tmp_path: Path):
    with pytest.raises(ninfer.ArtifactError):
        ninfer.Engine(tmp_path / "nothing.ninfer")
    broken = tmp_path / "broken.ninfer"
    broken.write_bytes(b"not an artifact" * 1000)
    with pytest.raises(ninfer.ArtifactError):
        ninfer.Engine(str(broken))


def test_opening_and_closing_leaves_nothing_behind(source):
    def cycle() -> None:
        engine = ninfer.Engine(source, max_context=2048, max_concurrency=4, progress=False)
        handle = engine.submit(PROMPTS[0], FIXED, max_tokens=500)
        next(iter(handle))
        engine.close()
        with pytest.raises(ninfer.EngineClosed):
            handle.result(timeout=0)

    cycle()
    threads, memory = threading.active_count(), psutil.Process().memory_info().rss
    for _ in range(5):
        cycle()
    assert threading.active_count() == threads
    assert psutil.Process().memory_info().rss - memory < 64 << 20


def test_loading_reports_progress(source):
    seen: dict[str, tuple[int, int]] = {}
    callback = lambda stage, done, total: seen.__setitem__(stage, (done, total))  # noqa: E731
    with ninfer.Engine(source, max_context=64, max_concurrency=1, progress=callback) as engine:
        assert engine.available
    assert "load" in seen
    for done, total in seen.values():  # "compile" too, where this machine has not run the kernels before
        assert done == total > 0


def test_a_prompt_of_another_model_is_refused(engine):
    prepared = engine.prepare(PROMPTS[0])
    tokens = np.full(3, 10**5, np.int32)
    foreign = attrs.evolve(prepared, tokens=tokens)
    with pytest.raises(ninfer.InvalidRequest, match="prompt"):
        engine.submit(foreign)
    assert at_baseline(engine)


def test_the_interpreter_ends_quietly_under_a_running_engine():
    code = """
import ninfer
from ninfer.models.qwen3_5.synthetic import synthetic_source
engine = ninfer.Engine(synthetic_source("tiny", "q8"), max_context=2048, progress=False)
handles = [engine.submit("hello", max_tokens=1500, ignore_eos=True) for _ in range(3)]
print(type(next(iter(handles[0]))).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("GenerationStart\n", "")


def test_the_mixture_geometry_generates(source):
    config = dict(GEOMETRIES["tiny"])
    config.pop("intermediate_size")
    config.update(
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    with ninfer.Engine(synthetic_source(config, "q8"), max_context=64, max_concurrency=2, progress=False) as engine:
        assert [len(r.token_ids) for r in engine.generate(PROMPTS[:2], FIXED)] == [16, 16]

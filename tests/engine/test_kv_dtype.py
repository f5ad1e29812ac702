"""How keys and values are kept: what it costs in memory, and what it may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ninfer
from ninfer.models.qwen3_5.synthetic import synthetic_source

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
HOT = ninfer.SamplingParams(seed=3, temperature=40.0, top_k=64)  # random weights are very sure of themselves
FIXED = ninfer.RequestOptions(max_tokens=16, ignore_eos=True, sampling=HOT)


@pytest.fixture(scope="module")
def source() -> Any:
    return synthetic_source("tiny", "q8")


def test_smaller_types_take_less_memory(source):
    sizes = {}
    for dtype in ("fp32", "bf16", "int8"):
        with ninfer.Engine(source, max_context=64, max_concurrency=1, kv_dtype=dtype, progress=False) as engine:
            stats = engine.stats().memory
            sizes[dtype] = stats["kv_bytes_per_token"]
            assert stats["bytes.kv"] >= 64 * sizes[dtype]
            assert len(engine.generate(ninfer.TokenPrompt([5, 6, 7]), FIXED).token_ids) == 16
    assert sizes["fp32"] == 2 * sizes["bf16"]
    assert sizes["bf16"] / 2 < sizes["int8"] < 0.6 * sizes["bf16"]


def test_int8_tokens_do_not_depend_on_chunks_or_company(source):
    prompts = [ninfer.TokenPrompt([5 + (7 * i + j) % 200 for j in range(3 + 40 * i)]) for i in range(4)]
    options: dict[str, Any] = {"max_context": 256, "kv_dtype": "int8", "progress": False}
    with ninfer.Engine(source, max_concurrency=1, **options) as alone:
        expected = [alone.generate(prompt, FIXED).token_ids for prompt in prompts]
    assert all(len(set(tokens)) > 8 for tokens in expected)
    with ninfer.Engine(source, max_concurrency=4, prefill_chunk=13, **options) as together:
        assert [result.token_ids for result in together.generate(prompts, FIXED)] == expected


@pytest.mark.parametrize("spec", ["none", "mtp"])
def test_int8_pages_are_reused_and_drafted_from_like_others(spec):
    """A second turn from cached pages, and tokens verified in rounds, are those of a fresh engine without either."""
    options: dict[str, Any] = {"max_context": 512, "max_concurrency": 1, "kv_dtype": "int8", "progress": False}
    greedy = ninfer.RequestOptions(max_tokens=24, sampling=ninfer.SamplingParams(temperature=0))
    messages = [{"role": "user", "content": "Where is Ada? " * 20}]
    answers = []
    for extra in ({"cache": ninfer.CacheOptions(enabled=False)}, {"spec": spec}):
        with ninfer.Engine(TINY, **options, **extra) as engine:
            first = engine.generate(ninfer.Chat(messages, thinking=False), greedy)
            turns = [*messages, first.message, {"role": "user", "content": "And Bo?"}]
            second = engine.generate(ninfer.Chat(turns, thinking=False), greedy)
        answers.append((first.token_ids, second.token_ids))
    assert second.usage.cached_tokens > 64
    assert answers[0] == answers[1]


def test_int8_answers_of_a_trained_model_are_those_of_fp32_where_it_is_sure():
    """Greedy, side by side up to the first token that differs: there, and only there, the two best were close."""
    questions = [
        "Where is Ada?", "Write a table of three animals.", "Why is the sky blue?", "Count from one to ten.",
        "Tell me a story about a boat and a storm.",
    ]  # fmt: skip
    answers = []
    for dtype in ("fp32", "int8"):
        with ninfer.Engine(TINY, max_context=512, max_concurrency=1, kv_dtype=dtype, progress=False) as engine:
            chats = [ninfer.Chat([{"role": "user", "content": q}], thinking=False) for q in questions]
            greedy = ninfer.SamplingParams(temperature=0)
            answers.append([engine.generate(c, max_tokens=64, sampling=greedy, logprobs=2).logprobs for c in chats])
    compared = 0
    for exact, ours in zip(*answers):
        for a, b in zip(exact, ours):
            if a.token_id != b.token_id:
                assert a.top[0][1] - a.top[1][1] < 0.1, "the two best of fp32 were far apart"
                break
            assert abs(a.logprob - b.logprob) < 0.1
            compared += 1
    assert compared > 60

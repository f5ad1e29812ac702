"""A whole engine on a GPU against the same engine on the host, over the small trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

import ninfer
from ninfer.device import Device

pytestmark = pytest.mark.device
ARTIFACT = Path(__file__).parents[3] / "examples" / "tiny" / "tiny.ninfer"
PROMPTS = [
    "Hello!",
    "What is 7 plus 5?",
    "Where is Ada?",
    "Tell me about the weather in Oslo.",
    "2 + 2",
    "Who are you?",
]
MARGIN = 0.3
"""Natural log by which bf16 activations may move a log-probability of this model."""


@pytest.fixture(scope="module")
def engines(gpu: Device) -> Iterator[tuple[ninfer.Engine, ninfer.Engine]]:
    with (
        ninfer.Engine(ARTIFACT, device="cuda:0", max_concurrency=4, max_context=1024, progress=False) as fast,
        ninfer.Engine(ARTIFACT, device="cpu", max_concurrency=4, max_context=1024, progress=False) as slow,
    ):
        yield fast, slow


def agree(got: ninfer.GenerationResult, want: ninfer.GenerationResult) -> int:
    """Tokens are equal up to the first close call of the host; returns how many were compared."""
    assert got.logprobs is not None
    assert want.logprobs is not None
    for i, (mine, theirs) in enumerate(zip(got.token_ids, want.token_ids)):
        first, *second = want.logprobs[i].top[:2]
        gap = first[1] - second[0][1] if second else math.inf  # a constraint may leave one token
        if mine != theirs:
            assert gap < MARGIN, f"token {i}: {mine} for {theirs}, {gap:.3f} ahead of the next"
            return i
        assert abs(got.logprobs[i].logprob - want.logprobs[i].logprob) < MARGIN
    return min(len(got.token_ids), len(want.token_ids))


def test_same_tokens_as_the_host(engines: tuple[ninfer.Engine, ninfer.Engine]) -> None:
    fast, slow = engines
    options = ninfer.RequestOptions(max_tokens=48, sampling=ninfer.SamplingParams(temperature=0), logprobs=2)
    got, want = fast.generate(PROMPTS, options), slow.generate(PROMPTS, options)
    assert sum(agree(*pair) for pair in zip(got, want)) > 48


def test_an_answer_after_a_hit_is_the_one_from_nothing(engines: tuple[ninfer.Engine, ninfer.Engine]) -> None:
    fast, _ = engines
    options = ninfer.RequestOptions(max_tokens=48, sampling=ninfer.SamplingParams(temperature=0), logprobs=2)
    compared = 0
    for question in PROMPTS:
        prompt = "I have one more question for you. " * 12 + question  # long enough that a hit is worth its copies
        fast.cache.clear()
        cold = fast.generate(prompt, options, cache="disabled")
        fast.generate(prompt, options)
        warm = fast.generate(prompt, options)
        assert warm.usage.cached_tokens > 0
        compared += agree(warm, cold)
    assert compared > 48


def test_two_constraints_on_one_exact_prompt_keep_to_their_own(engines: tuple[ninfer.Engine, ninfer.Engine]) -> None:
    fast, _ = engines
    prompt = ninfer.TokenPrompt(fast.prepare("Where is Ada?").tokens.tolist())
    fast.generate(prompt, max_tokens=1)
    for words in (["yes", "no"], ["left", "right"]):
        result = fast.generate(prompt, max_tokens=16, constraint=ninfer.OutputConstraint.choice(words))
        assert result.usage.cached_tokens == len(prompt.ids)
        assert result.text in words


def test_a_constraint_holds_and_seeds_repeat(engines: tuple[ninfer.Engine, ninfer.Engine]) -> None:
    fast, _ = engines
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    options = {
        "max_tokens": 40, "sampling": ninfer.SamplingParams(temperature=1.0, top_k=0, seed=3),
        "constraint": ninfer.OutputConstraint.json_schema(schema),
    }  # fmt: skip
    alone = fast.generate("Give me a number", **options)
    together = fast.generate(["Give me a number"] * 4, **options)
    assert isinstance(alone.parsed["n"], int)
    assert isinstance(together[0].parsed["n"], int)
    assert alone.token_ids == fast.generate("Give me a number", **options).token_ids


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": None}, {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                                 "additionalProperties": False}]},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
]  # fmt: skip


def test_schemas_bind_and_choose_the_tokens_of_the_host(engines: tuple[ninfer.Engine, ninfer.Engine]) -> None:
    """Requests of a batch have a schema each, or none."""
    fast, slow = engines
    constraints = [*map(ninfer.OutputConstraint.json_schema, SCHEMAS), None]
    compared = 0
    for prompt in PROMPTS[:3]:
        options = {"max_tokens": 96, "sampling": ninfer.SamplingParams(temperature=0), "logprobs": 2}
        handles = [fast.submit(prompt, constraint=constraint, **options) for constraint in constraints]
        for constraint, handle in zip(constraints, handles):
            got, want = handle.result(), slow.generate(prompt, constraint=constraint, **options)
            compared += agree(got, want)
            if constraint is not None:
                assert got.finish_reason == "stop"
                assert got.constraint.complete
                assert constraint.accepts(got.text)
        for schema, handle in zip(SCHEMAS, handles):
            jsonschema.validate(handle.result().parsed, schema)
    assert compared > 100


@pytest.mark.parametrize("spec", ["mtp"])
def test_schemas_bind_what_is_drafted(spec: str, gpu: Device) -> None:
    constraints = list(map(ninfer.OutputConstraint.json_schema, SCHEMAS))
    options = ninfer.SpecOptions(spec)
    with ninfer.Engine(
        ARTIFACT, device="cuda:0", spec=options, max_concurrency=4, max_context=512, progress=False
    ) as engine:
        for temperature in (0.0, 1.0):
            sampling = ninfer.SamplingParams(temperature=temperature, top_k=0, seed=5)
            handles = [
                engine.submit("Who are you?", max_tokens=96, sampling=sampling, constraint=c) for c in constraints
            ]
            for schema, handle in zip(SCHEMAS, handles):
                result = handle.result()
                assert result.finish_reason == "stop"
                jsonschema.validate(result.parsed, schema)


def test_long_prompts_are_prefilled_in_chunks(engines: tuple[ninfer.Engine, ninfer.Engine]) -> None:
    fast, slow = engines
    text = ninfer.TokenPrompt([17 + i * 31 % 200 for i in range(700)])
    options = ninfer.RequestOptions(
        max_tokens=8, sampling=ninfer.SamplingParams(temperature=0), logprobs=2, ignore_eos=True
    )
    agree(fast.generate(text, options), slow.generate(text, options))


def test_memory_comes_back(gpu: Device, engines: object) -> None:
    free = []
    for _ in range(5):
        with ninfer.Engine(ARTIFACT, device="cuda:0", kv_capacity=4096, max_context=1024, progress=False) as engine:
            engine.generate("Hi", max_tokens=2)
        free.append(gpu.memory().free)
    assert max(free) - min(free) < 64 << 20


def test_a_full_gpu_says_what_was_needed_and_what_was_free(gpu: Device, engines: object) -> None:
    held = gpu.arena(gpu.memory().free - (200 << 20))
    try:
        with pytest.raises(ninfer.OutOfDeviceMemory) as caught:
            ninfer.Engine(ARTIFACT, device="cuda:0", max_concurrency=8, max_context=4096, progress=False)
    finally:
        held.close()
    assert caught.value.free < 200 << 20
    with ninfer.Engine(ARTIFACT, device="cuda:0", max_context=1024, progress=False) as engine:
        memory = engine.stats().memory
        assert {"bytes.weights", "bytes.operations", "bytes.kv", "bytes.graphs"} <= set(memory)
        assert engine.generate("Hi", max_tokens=2).token_ids

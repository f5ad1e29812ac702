"""Block drafting through the public engine. The weights are random, so hardly any draft is kept: what is said is the
ordinary answer all the same."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator

import jsonschema
import pytest
from oracles.distributions import assert_same_distribution

import ninfer
from ninfer import Chat, OutputConstraint, SamplingParams, SpecOptions
from ninfer.models.qwen3_5.synthetic import synthetic_source

GREEDY = SamplingParams(temperature=0)


def opened(spec: SpecOptions | str, **options) -> ninfer.Engine:
    source = synthetic_source("tiny", "q8", seed=3, components=("text", "dflash", "dflash2"))
    chosen = {"device": "cpu", "max_concurrency": 4, "max_context": 1536, "progress": False, "spec": spec} | options
    return ninfer.Engine(source, **chosen)


@pytest.fixture(scope="module")
def plain() -> Iterator[ninfer.Engine]:
    with opened("none") as engine:
        yield engine


@pytest.fixture(scope="module", params=["dflash", "dflash2"])
def drafting(request) -> Iterator[ninfer.Engine]:
    with opened(request.param) as engine:
        yield engine


def test_greedy_answers_are_the_ordinary_ones(plain, drafting):
    prompts = [f"{word} " * n for word, n in (("one", 1), ("two", 40), ("three", 90), ("four", 150), ("five", 3))]
    ordinary = plain.generate(prompts, max_tokens=60, sampling=GREEDY)
    drafted = drafting.generate(prompts, max_tokens=60, sampling=GREEDY)
    for one, other in zip(ordinary, drafted, strict=True):
        assert other.error is None
        assert other.token_ids == one.token_ids
        spent = other.speculation
        assert len(spent.accepted_per_position) == 7
        assert spent.accepted == sum(spent.accepted_per_position) <= spent.drafted


def test_a_continued_chat_goes_on_with_the_same_context(plain, drafting):
    turns = [{"role": "user", "content": "tell me " * 30}]
    for _ in range(3):
        want, got = (e.generate(Chat(turns), max_tokens=30, sampling=GREEDY) for e in (plain, drafting))
        assert got.token_ids == want.token_ids
        turns += [{"role": "assistant", "content": got.text or "."}, {"role": "user", "content": "and more"}]


@pytest.mark.parametrize(("backend", "tokens"), [("dflash", 1), ("dflash", 3), ("dflash2", 4)])
def test_fewer_drafts_are_a_prefix_of_the_block(plain, backend, tokens):
    with opened(SpecOptions(backend, draft_tokens=tokens), max_concurrency=1) as engine:
        result = engine.generate("one two three", max_tokens=40, sampling=GREEDY, logprobs=1)
    want = plain.generate("one two three", max_tokens=40, sampling=GREEDY, logprobs=1)
    assert result.token_ids == want.token_ids
    assert len(result.speculation.accepted_per_position) == tokens


def test_constrained_answers_are_valid(drafting):
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["age"], "additionalProperties": False}  # fmt: skip
    for seed in range(3):
        sampling = SamplingParams(temperature=3.0, seed=seed, top_k=0)
        result = drafting.generate(
            Chat([{"role": "user", "content": "Who?"}], thinking=True), sampling=sampling, max_tokens=200,
            constraint=OutputConstraint.json_schema(schema), thinking_budget=7,
        )  # fmt: skip
        if result.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))


@pytest.mark.parametrize(
    ("count", "sampling", "constraint"),
    [(250, {"top_k": 3, "temperature": 30.0}, None), (120, {"top_k": 0, "temperature": 20.0}, "[ab]{2}[cd]")]
    + [
        pytest.param(2000, {"top_k": k, "temperature": t}, constraint, marks=pytest.mark.full)
        for k in (0, 3, 8)
        for t in (10.0, 40.0)
        for constraint in (None, "[ab]{2}[cd]")
    ],
)
def test_answers_have_the_ordinary_distribution(plain, drafting, count, sampling, constraint):
    """Over seeds, of which the two engines get different ones."""
    found, prompt = [], Chat([{"role": "user", "content": "one two three"}], thinking=False)
    for engine, first in ((plain, 0), (drafting, count)):
        waiting, answers = deque(), []
        for n in range(first, first + count):
            options = {"max_tokens": 3, "sampling": SamplingParams(seed=n, **sampling)}
            if constraint is not None:
                options["constraint"] = OutputConstraint.regex(constraint)
            waiting.append(engine.submit(prompt, block=True, **options))
            if len(waiting) == 16:
                answers.append(waiting.popleft().result().token_ids)
        found.append(answers + [handle.result().token_ids for handle in waiting])
    assert_same_distribution(*found)


@pytest.mark.parametrize("backend", ["dflash", "dflash2"])
def test_an_absent_companion_is_refused(backend):
    with pytest.raises(ninfer.InvalidRequest, match=backend) as caught:
        ninfer.Engine(synthetic_source("tiny", "q8"), device="cpu", spec=backend, progress=False)
    assert caught.value.field == "spec.backend"


def test_more_drafts_than_a_block_has_are_refused(monkeypatch):
    from ninfer.models.qwen3_5 import synthetic

    short = synthetic._dflash
    monkeypatch.setattr(synthetic, "_dflash", lambda text: short(text) | {"block_size": 4})
    with opened(SpecOptions("dflash", draft_tokens=3)):
        pass
    with pytest.raises(ninfer.InvalidRequest) as caught:
        opened("dflash")
    assert caught.value.field == "spec.draft_tokens"

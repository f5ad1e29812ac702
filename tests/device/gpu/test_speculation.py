"""Speculation on a GPU: the small trained model with and without drafts, and both against the host."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scipy.stats import chi2_contingency

import ninfer
from ninfer.device import Device
from ninfer.models.qwen3_5.synthetic import synthetic_source

pytestmark = pytest.mark.device
ARTIFACT = Path(__file__).parents[3] / "examples" / "tiny" / "tiny.ninfer"
QUESTIONS = [
    "What is 17 + 25?", "Tell me a story.", "Who are you?", "Ada is in the garden. Where is Ada?", "What is 3 + 4?",
    "Write about rain.", "Hello!", "What is 120 + 7?",
]  # fmt: skip
MARGIN = 0.3
"""Natural log by which bf16 activations may move a log-probability of this model."""


def opened(spec: str, width: int | None = None, adaptive: bool = False, rows: int = 8) -> ninfer.Engine:
    chosen = ninfer.SpecOptions(spec, draft_tokens=width, adaptive=adaptive)
    artifact = ARTIFACT.with_name("tiny-dflash.ninfer") if spec.startswith("dflash") else ARTIFACT
    return ninfer.Engine(artifact, device="cuda:0", max_concurrency=rows, max_context=1024, progress=False, spec=chosen)


@pytest.fixture(scope="module")
def plain(gpu: Device) -> Iterator[ninfer.Engine]:
    with opened("none") as engine:
        yield engine


@pytest.fixture(scope="module", params=["mtp", "dflash", "dflash2"])
def drafting(gpu: Device, request: pytest.FixtureRequest) -> Iterator[ninfer.Engine]:
    with opened(request.param) as engine:
        yield engine


def chats(thinking: bool) -> list[ninfer.Chat]:
    return [ninfer.Chat([{"role": "user", "content": text}], thinking=thinking) for text in QUESTIONS]


def agree(got: ninfer.GenerationResult, want: ninfer.GenerationResult) -> int:
    """Tokens are equal up to the first close call; returns how many were compared."""
    assert got.error is None
    assert want.logprobs is not None
    for i, (mine, theirs) in enumerate(zip(got.token_ids, want.token_ids)):
        if mine != theirs:
            first, second = want.logprobs[i].top[:2]
            assert first[1] - second[1] < MARGIN, f"token {i}: {mine} for {theirs}"
            return i
    return min(len(got.token_ids), len(want.token_ids))


@pytest.mark.parametrize("thinking", [False, True])
def test_greedy_answers_are_the_ordinary_ones(plain, drafting, thinking) -> None:
    options = ninfer.RequestOptions(max_tokens=80, sampling=ninfer.SamplingParams(temperature=0), logprobs=2)
    want, got = plain.generate(chats(thinking), options), drafting.generate(chats(thinking), options)
    assert sum(agree(*pair) for pair in zip(got, want)) > 50
    rounds = sum(r.speculation.rounds for r in got)
    assert 1 + sum(r.speculation.accepted for r in got) / rounds > 2


@pytest.mark.parametrize("width", [1, 2, 5, 7])
def test_every_width(plain, width) -> None:
    options = ninfer.RequestOptions(max_tokens=60, sampling=ninfer.SamplingParams(temperature=0), logprobs=2)
    want = plain.generate(chats(True)[:3], options)
    with opened("mtp", width) as engine:
        got = engine.generate(chats(True)[:3], options)
    assert sum(agree(*pair) for pair in zip(got, want)) > 40


@pytest.mark.parametrize("backend", ["mtp", "dflash2"])
def test_a_head_of_some_tokens_drafts_those_alone(gpu: Device, backend) -> None:
    """Random weights: what is said does not depend on it, and nothing else is ever drafted."""
    source = synthetic_source("tiny", "q8", seed=3, components=("text", backend, "proposal"))
    options = {"device": "cuda:0", "max_context": 512, "max_concurrency": 1, "progress": False}
    answers = []
    for choice in (True, False):
        spec = ninfer.SpecOptions(backend, proposal_head=choice)
        with ninfer.Engine(source, spec=spec, **options) as engine:
            sampling = ninfer.SamplingParams(temperature=0)
            answers.append(engine.generate("one two", max_tokens=40, sampling=sampling, logprobs=2))
            drafts = engine._core._worker._program._units._output.fields["drafts"]
            assert not choice or drafts.max() < 256
    agree(*answers)


@pytest.mark.parametrize("backend", ["mtp", "dflash2"])
def test_rounds_that_adapt(plain, backend) -> None:
    """Good drafts and, at a temperature where none is kept, bad ones: rounds of every recorded width."""
    options = ninfer.RequestOptions(max_tokens=80, sampling=ninfer.SamplingParams(temperature=0), logprobs=2)
    with opened(backend, 7, adaptive=True, rows=3) as engine:
        want, got = plain.generate(chats(True), options), engine.generate(chats(True), options)
        assert sum(agree(*pair) for pair in zip(got, want)) > 50
        hot = ninfer.SamplingParams(temperature=30.0, top_k=0)  # a named seed would always get all drafts
        for result in engine.generate(chats(True)[:3], max_tokens=80, sampling=hot, ignore_eos=True):
            assert result.error is None
            assert result.speculation.drafted < 80 * 7 / 2  # one that costs next to nothing is made for long


def test_constrained_answers_are_valid(drafting) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    constraint = ninfer.OutputConstraint.json_schema(schema)
    for temperature in (0.0, 1.5):
        sampling = ninfer.SamplingParams(temperature=temperature, top_k=0, seed=2)
        for result in drafting.generate(chats(False), constraint=constraint, sampling=sampling, max_tokens=100):
            assert result.error is None
            if result.finish_reason == "stop":
                assert constraint.accepts(result.text)
                assert isinstance(json.loads(result.text)["age"], int)


def test_answers_have_the_ordinary_distribution(plain, drafting) -> None:
    """The second to fourth tokens at a temperature that spreads them, over seeds."""
    counts = []
    for base, engine in ((0, plain), (10_000, drafting)):
        handles = [
            engine.submit(
                chats(False)[3], block=True, max_tokens=4,
                sampling=ninfer.SamplingParams(temperature=4.0, top_k=3, seed=base + i),
            )
            for i in range(48)
        ]  # fmt: skip
        found = Counter(handle.result().token_ids for handle in handles)
        for i in range(48, 480):
            sampling = ninfer.SamplingParams(temperature=4.0, top_k=3, seed=base + i)
            found[engine.submit(chats(False)[3], max_tokens=4, sampling=sampling).result().token_ids] += 1
        counts.append(found)
    common = [key for key, n in (counts[0] + counts[1]).items() if n >= 12]
    table = [[found[key] for key in common] + [480 - sum(found[key] for key in common) + 1] for found in counts]
    assert len(common) > 1
    assert chi2_contingency(table).pvalue > 1e-4

"""Answers with drafts against distributions that are known: every answer that can be given, with its probability."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from scipy.stats import chisquare

import ninfer
from ninfer import Chat, OutputConstraint, SamplingParams

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CHAT = Chat([{"role": "user", "content": "Ada is in the garden. Ben is in the kitchen. Where is Ada?"}], thinking=False)
CASES = {
    "free": (4.0, 3, {"max_tokens": 3}),
    "regex": (2.0, 0, {"constraint": OutputConstraint.regex("[ab]{2}[cd]")}),
    "choice": (3.0, 0, {"constraint": OutputConstraint.choice(["in", "it", "no", "not"])}),
}
"""Temperature, top_k and what bounds an answer, so that all of them can be counted."""
Answer = tuple[int, ...]


def opened(backend: str) -> ninfer.Engine:
    file = TINY / ("tiny-dflash.ninfer" if backend.startswith("dflash") else "tiny.ninfer")
    return ninfer.Engine(file, device="cpu", max_concurrency=8, max_context=512, progress=False, spec=backend)


@pytest.fixture(scope="module")
def enumerated() -> dict[str, dict[Answer, float]]:
    """For each case the probability of every answer: the product of its tokens', which follow from the logits that an
    engine without drafts reports of all tokens that are possible at each place."""
    with opened("none") as engine:
        return {case: probabilities(engine, *CASES[case]) for case in CASES}


def probabilities(engine: ninfer.Engine, temperature: float, top_k: int, bounds: dict) -> dict[Answer, float]:
    ahead: dict[Answer, dict[int, float]] = {}
    said: set[Answer] = set()
    for seed in range(0, 400, 16):  # nearly uniform, until no branch is left that was not walked
        hot = [SamplingParams(temperature=100.0, top_k=top_k, top_p=1.0, seed=seed + i) for i in range(16)]
        handles = [engine.submit(CHAT, block=True, sampling=sampling, logprobs=20, **bounds) for sampling in hot]
        for result in [handle.result() for handle in handles]:
            said.add(answer := tuple(result.token_ids))
            for i, place in enumerate(result.logprobs):
                possible = [(t, lp) for t, lp in place.top if lp > -math.inf][: top_k or None]
                assert top_k or len(possible) < 20, "more tokens may be possible than are reported"
                total = sum(math.exp(lp / temperature) for _, lp in possible)
                ahead[answer[:i]] = {t: math.exp(lp / temperature) / total for t, lp in possible}
        if all((*prefix, token) in ahead or (*prefix, token) in said for prefix in ahead for token in ahead[prefix]):
            break
    else:
        raise AssertionError("not every answer was found")
    answers = {answer: math.prod(ahead[answer[:i]][token] for i, token in enumerate(answer)) for answer in said}
    assert sum(answers.values()) == pytest.approx(1)
    assert len(answers) > 4
    return answers


@pytest.fixture(scope="module", params=["mtp", "dflash", "dflash2"])
def drafting(request) -> Iterator[ninfer.Engine]:
    with opened(request.param) as engine:
        yield engine


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.full)])
def test_answers_are_as_likely_as_they_should_be(enumerated, drafting, count, case):
    temperature, top_k, bounds = CASES[case]
    found: Counter[Answer] = Counter()
    kept = 0
    for seed in range(0, count, 8):
        some = [SamplingParams(temperature=temperature, top_k=top_k, top_p=1.0, seed=seed + i) for i in range(8)]
        for result in [h.result() for h in [drafting.submit(CHAT, sampling=one, **bounds) for one in some]]:
            found[tuple(result.token_ids)] += 1
            kept += result.speculation.accepted
    want = {answer: count * p for answer, p in enumerated[case].items()}
    assert found.keys() <= want.keys()
    assert kept > 0 or case != "free", "the others are too odd for a draft to be kept: those are refused"
    common = [answer for answer, expected in want.items() if expected >= 5]
    table = [(found[answer], want[answer]) for answer in common]
    rest = count - sum(seen for seen, _ in table), count - sum(expected for _, expected in table)
    if rest[1] > 1e-6 * count:
        table.append(rest)
    assert chisquare(*zip(*table)).pvalue > 1e-4

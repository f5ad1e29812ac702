"""Drafts that a script makes instead of the module: always right, never right, illegal, past the end, across the close
of the thinking. Answers are the ordinary ones whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ninfer
from ninfer import Chat, OutputConstraint, SamplingParams, SpecOptions, Tool
from ninfer.program.sequence import Phase

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
GREEDY = SamplingParams(temperature=0)
ADA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
Script = Callable[[tuple[int, ...], list[int]], list[int]]
"""From a prompt and what was generated behind it to what is drafted next."""


def opened(width: int, **options) -> ninfer.Engine:
    spec = SpecOptions("mtp", draft_tokens=width) if width else "none"
    chosen = {"device": "cpu", "max_concurrency": 8, "max_context": 1024, "progress": False, "spec": spec} | options
    return ninfer.Engine(TINY, **chosen)


@pytest.fixture(scope="module")
def plain() -> Iterator[ninfer.Engine]:
    with opened(0) as engine:
        yield engine


@pytest.fixture(scope="module", params=[1, 7])
def scripted(request) -> Iterator[ninfer.Engine]:
    with opened(request.param) as engine:
        yield engine


def follow(engine: ninfer.Engine, script: Script) -> None:
    """From now on a request's drafts are what ``script`` says."""
    batches, window = engine._core._worker._program._batches, engine.options.spec.window
    enter = type(batches)._enter

    def scripted_enter(sequences):
        records = enter(batches, sequences)
        for record in records:
            if record.phase is Phase.DECODE:
                prompt = tuple(record.ledger[: record.prompt].tolist())
                generated = record.ledger[record.prompt : record.length].tolist()
                record.drafts = tuple(script(prompt, generated)[:window])
        return records

    batches._enter = scripted_enter


def knowing(engine: ninfer.Engine, answers: dict[str, ninfer.GenerationResult], chats: dict[str, Chat]) -> dict:
    """Whole answers by prompt."""
    return {tuple(engine.prepare(chats[name]).tokens.tolist()): list(answers[name].token_ids) for name in chats}


def chats(thinking: bool = False) -> dict[str, Chat]:
    questions = (
        "What is 17 + 25?", "Tell me a story.", "Who are you?", "Ada is in the garden. Where is Ada?", "Hello!",
        "What is 3 + 4?", "Write about rain.", "Count from one to five.",
    )  # fmt: skip
    return {text: Chat([{"role": "user", "content": text}], thinking=thinking) for text in questions}


def right(known: dict) -> Script:
    return lambda prompt, generated: known[prompt][len(generated) :]


def wrong(known: dict) -> Script:
    """Another token than the right one at every place, some of them no start of anything."""
    others = lambda tokens: [(token + 1 + place) % 1000 for place, token in enumerate(tokens)]  # noqa: E731
    return lambda prompt, generated: others(right(known)(prompt, generated))


def past_the_end(known: dict) -> Script:
    """The right ones, and then the end of the answer again and again and other tokens."""
    return lambda prompt, generated: [*right(known)(prompt, generated), known[prompt][-1], 7, known[prompt][-1], 9]


def now_and_then(known: dict) -> Script:
    """Right ones in every other round, none or a wrong one between."""
    return lambda prompt, generated: (
        right(known)(prompt, generated)[: len(generated) % 3] + [3] * (len(generated) % 2) if len(generated) % 4 else []
    )


@pytest.mark.parametrize(
    ("make", "thinking"), [(right, False), (wrong, True), (past_the_end, False), (now_and_then, True)]
)
def test_whatever_is_drafted_answers_are_the_ordinary_ones(plain, scripted, make, thinking):
    """In one batch of eight, with logprobs."""
    asked = chats(thinking)
    want = dict(zip(asked, plain.generate(list(asked.values()), max_tokens=60, sampling=GREEDY)))
    follow(scripted, make(knowing(plain, want, asked)))
    before = scripted.stats()
    for name, result in zip(asked, scripted.generate(list(asked.values()), max_tokens=60, sampling=GREEDY)):
        assert (result.token_ids, result.text, result.stop_reason) == (
            want[name].token_ids, want[name].text, want[name].stop_reason,
        )  # fmt: skip
        spent, window, length = result.speculation, scripted.options.spec.window, len(result.token_ids)
        if make is right:
            assert spent.accepted == spent.drafted
            assert spent.rounds <= -(-(length - 1) // (window + 1))
        elif make is wrong:
            assert spent.accepted == 0
    rounds = scripted.stats().decode_rounds - before.decode_rounds
    longest = max(len(one.token_ids) for one in want.values())
    assert rounds >= longest - 1 if make is wrong else rounds < longest + 8


@pytest.mark.parametrize("size", range(1, 9))
def test_batches_of_every_size_with_good_and_bad_drafts(plain, scripted, size):
    """Some rows have every draft kept, others none; one is cancelled on the way."""
    asked = dict(list(chats().items())[:size])
    want = dict(zip(asked, plain.generate(list(asked.values()), max_tokens=24, sampling=GREEDY)))
    known = knowing(plain, want, asked)
    good = set(list(known)[::2])
    one, other = right(known), wrong(known)
    follow(scripted, lambda prompt, generated: (one if prompt in good else other)(prompt, generated))
    handles = [scripted.submit(chat, max_tokens=24, sampling=GREEDY) for chat in asked.values()]
    if size > 2:
        next(iter(handles[1].text_deltas()), None)
        handles[1].cancel()
    for i, (handle, answer) in enumerate(zip(handles, want.values())):
        result = handle.result()
        assert result.token_ids == answer.token_ids[: len(result.token_ids)]
        assert len(result.token_ids) == len(answer.token_ids) or (i == 1 and size > 2)


CONSTRAINED = {
    "schema": {"constraint": OutputConstraint.json_schema(ADA)},
    "choice": {"constraint": OutputConstraint.choice(["garden", "garage", "kitchen", "office"])},
    "regex": {"constraint": OutputConstraint.regex("[A-Z][a-z]{2,5} \\d{2}")},
    "call": {"tool_choice": "required"},
}


def asked_for(kind: str) -> Chat:
    tools = (Tool(name="find", parameters=ADA, strict=True),) if kind == "call" else ()
    return Chat([{"role": "user", "content": "Who is Ada?"}], tools=tools, thinking=True)


@pytest.mark.parametrize("kind", CONSTRAINED)
def test_a_close_of_the_thinking_inside_the_drafts(plain, scripted, kind):
    """Every round drafts the close and the start of a code block, which no constraint here allows; and then the answer
    itself, right across the close."""
    chat, options = asked_for(kind), CONSTRAINED[kind] | {"max_tokens": 120, "thinking_budget": 30}
    want = plain.generate(chat, sampling=GREEDY, **options)
    assert want.error is None
    closing = plain._frontend._tokenizer.encode("\n</think>\n\n```json\n{")
    follow(scripted, lambda prompt, generated: closing)
    got = scripted.generate(chat, sampling=GREEDY, **options)
    assert (got.token_ids, got.text, got.thinking) == (want.token_ids, want.text, want.thinking)
    for seed in range(2):
        result = scripted.generate(chat, sampling=SamplingParams(temperature=1.5, seed=seed), **options)
        assert result.error is None
        if result.finish_reason == "stop":
            assert options["constraint"].accepts(result.text)
    follow(scripted, right(knowing(plain, {kind: want}, {kind: chat})))
    got = scripted.generate(chat, sampling=GREEDY, **options)
    assert (got.token_ids, got.text, got.thinking) == (want.token_ids, want.text, want.thinking)
    assert [(call.name, call.arguments) for call in got.tool_calls] == [
        (call.name, call.arguments) for call in want.tool_calls
    ]
    assert got.speculation.accepted == got.speculation.drafted


@pytest.mark.parametrize("kind", CONSTRAINED)
def test_illegal_drafts_are_never_said(plain, scripted, kind):
    """Every token of the vocabulary in turn, legal or not, at a temperature that would let any pass."""
    chat, options = asked_for(kind), CONSTRAINED[kind] | {"max_tokens": 60, "thinking_budget": 4}
    want = plain.generate(chat, sampling=GREEDY, **options)
    size = plain._frontend.vocab_size
    follow(scripted, lambda prompt, generated: [(37 * (len(generated) + i)) % size for i in range(7)])
    got = scripted.generate(chat, sampling=GREEDY, **options)
    assert (got.token_ids, got.text) == (want.token_ids, want.text)
    result = scripted.generate(chat, sampling=SamplingParams(temperature=9.0, top_k=0, seed=1), **options)
    assert result.error is None
    if result.finish_reason == "stop":
        assert options["constraint"].accepts(result.text)
    assert result.speculation.drafted > result.speculation.accepted

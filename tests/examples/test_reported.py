"""What has broken in other engines, end to end on the shipped model: thinking beside JSON, drafts across the end of the
thinking, text in company, prefixes resumed at odd places, every number of lanes."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from scipy.stats import chi2_contingency

import ninfer
from ninfer import CacheOptions, Chat, OutputConstraint, SamplingParams, SpecOptions
from ninfer.program.batches import Batches

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
GREEDY = SamplingParams(temperature=0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Extract name and age as JSON: Mia Novak is 34 years old."}]


def opened(**options) -> ninfer.Engine:
    return ninfer.Engine(TINY, **{"max_context": 1024, "max_concurrency": 8, "progress": False} | options)


@pytest.fixture(scope="module")
def engine() -> Iterator[ninfer.Engine]:
    with opened() as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting() -> Iterator[ninfer.Engine]:
    with opened(spec=SpecOptions("mtp", draft_tokens=7)) as engine:
        yield engine


# -- thinking and the answer behind it -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_stays_free_and_the_content_alone_is_json(engine, stream):
    chat, options = Chat(ASK, thinking=True), {"constraint": OutputConstraint.json_schema(PERSON), "sampling": GREEDY}
    if stream:
        parts = {"thinking": "", "content": ""}
        for event in engine.stream(chat, max_tokens=400, **options):
            if isinstance(event, ninfer.Delta):
                parts[event.channel] += event.text
        thinking, text = parts["thinking"], parts["content"]
    else:
        result = engine.generate(chat, max_tokens=400, **options)
        thinking, text = result.thinking, result.text
    assert thinking.strip()
    assert not thinking.strip().startswith("{")
    jsonschema.Draft202012Validator(PERSON).validate(json.loads(text))


@pytest.mark.parametrize("spec", ["none", "mtp"])
@pytest.mark.parametrize("budget", [16, 24])
def test_a_forced_close_is_counted_and_not_shown(engine, drafting, spec, budget):
    own = drafting if spec == "mtp" else engine
    chat = Chat([{"role": "user", "content": "What is 17 + 25? Think about it."}], thinking=True)
    free = own.generate(chat, sampling=GREEDY, max_tokens=300)
    assert free.usage.thinking_tokens > budget, "the budget must bind"
    result = own.generate(chat, sampling=GREEDY, max_tokens=300, thinking_budget=budget)
    assert "think>" not in result.text + result.thinking
    forced = len(own._frontend.close_tokens)
    assert budget < result.usage.thinking_tokens <= budget + forced
    assert result.usage.completion_tokens == len(result.token_ids) > result.usage.thinking_tokens
    assert free.thinking.startswith(result.thinking.rstrip())


# -- drafts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch, engine):
    """Every round drafts the end of the thinking and a code fence, wherever it is."""
    script = list(engine._frontend._tokenizer.encode("\n</think>\n\n```json\n{"))
    decode = Batches.decode

    def with_script(self, sequences, licences, masks):
        self._take_drafts()
        for sequence in sequences:
            record = self.store.sequences.get(sequence)
            last = int(record.ledger[record.length - 1])
            at = script.index(last) + 1 if last in script else 0
            record.drafts = tuple((script[at:] + script)[: self.shape.window])
        return decode(self, sequences, licences, masks)

    monkeypatch.setattr(Batches, "decode", with_script)


@pytest.mark.parametrize("tokens", range(1, 8))
def test_drafts_across_the_end_of_the_thinking_change_nothing(engine, scripted, tokens):
    chat, constraint = Chat(ASK, thinking=True), OutputConstraint.json_schema(PERSON)
    options = {"constraint": constraint, "sampling": GREEDY, "max_tokens": 300}
    want = engine.generate(chat, **options)
    with opened(spec=SpecOptions("mtp", draft_tokens=tokens), max_concurrency=1) as own:
        result = own.generate(chat, **options)
    assert result.token_ids == want.token_ids
    assert (result.thinking, result.text) == (want.thinking, want.text)
    assert 0 < result.speculation.accepted < result.speculation.drafted


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.full)])
def test_drafts_across_the_end_of_the_thinking_keep_the_distribution(engine, drafting, scripted, count):
    chat = Chat([{"role": "user", "content": "Where is Ada?"}], thinking=True)
    words = ["garden", "garage", "kitchen"]
    options = {"constraint": OutputConstraint.choice(words), "thinking_budget": 3, "max_tokens": 60}

    def counted(own, seeds):
        texts, waiting = [], deque()
        for seed in seeds:
            waiting.append(own.submit(chat, sampling=SamplingParams(temperature=2.0, seed=seed), **options))
            if len(waiting) == 12:
                texts.append(waiting.popleft().result().text)
        texts += [handle.result().text for handle in waiting]
        return [texts.count(word) for word in words]

    table = [counted(engine, range(count)), counted(drafting, range(count, 2 * count))]
    assert sum(map(sum, table)) == 2 * count, "every answer is one of the words"
    table = [[one, other] for one, other in zip(*table) if one + other]
    assert len(table) > 1, "the case decides nothing"
    assert chi2_contingency(table).pvalue > 1e-4


def test_illegal_drafts_are_counted_and_not_logged(drafting, caplog):
    with caplog.at_level(logging.DEBUG):
        result = drafting.generate(
            Chat(ASK, thinking=False), constraint=OutputConstraint.json_object(), max_tokens=40,
            sampling=SamplingParams(temperature=2.0, seed=1),
        )  # fmt: skip
    assert result.speculation.accepted < result.speculation.drafted
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_what_stands_in_a_reused_prefix_is_known_with_drafts(drafting):
    """The fact is within the first sixty tokens, which are not read again."""
    chat = Chat(ASK, thinking=False)
    drafting.cache.clear()
    for again in range(3):
        result = drafting.generate(chat, max_tokens=60, sampling=GREEDY)
        assert (result.usage.cached_tokens > 0) == bool(again)
        assert "Mia Novak" in result.text
        assert "34" in result.text


# -- company -------------------------------------------------------------------------------------------------------


def test_text_does_not_depend_on_company(engine):
    """Eight answers at once are shown like each alone, broken characters included."""
    chats = [Chat([{"role": "user", "content": f"What is {n} + 4?"}], thinking=bool(n % 2)) for n in range(8)]
    options = {"max_tokens": 40, "ignore_eos": True}
    samplings = [SamplingParams(temperature=4.0, top_k=0, seed=n) for n in range(8)]
    alone = [engine.generate(chat, sampling=sampling, **options) for chat, sampling in zip(chats, samplings)]
    handles = [engine.submit(chat, sampling=sampling, **options) for chat, sampling in zip(chats, samplings)]
    for handle, want in zip(handles, alone):
        deltas = [event for event in handle if isinstance(event, ninfer.Delta)]
        result = handle.result()
        assert (result.text, result.thinking) == (want.text, want.thinking)
        assert "".join(event.text for event in deltas if event.channel == "content") == want.text
    assert any("\ufffd" in result.text + result.thinking for result in alone), "the case decides nothing"


@pytest.mark.parametrize("lanes", [1, 2, 5, 8])
def test_every_number_of_lanes_has_states_for_all_of_them(lanes):
    """Without a spare state too: one for each lane, whatever was kept before."""
    cache = CacheOptions(device_state_slots=0)
    with opened(max_concurrency=lanes, max_context=256, cache=cache) as own:
        prompts = [ninfer.TokenPrompt([30 + n, 40, 50]) for n in range(2 * lanes)]
        results = own.generate(prompts, max_tokens=6, sampling=GREEDY, ignore_eos=True)
        assert [len(result.token_ids) for result in results] == [6] * len(prompts)
        assert own.stats().memory["state_slots.total"] == lanes


def test_what_a_limit_reserves_can_be_seen(engine):
    """A short answer under a large limit: its pages are reserved while it runs, and none of them is used for long."""
    handle = engine.submit(ninfer.TokenPrompt([30, 40, 50]), max_tokens=900, sampling=GREEDY, ignore_eos=True)
    next(event for event in handle if isinstance(event, ninfer.Delta))
    memory = engine.stats().memory
    handle.cancel()
    handle.result()
    assert memory["pages.main.reserved"] >= 10
    assert engine.stats().memory["pages.main.reserved"] == 0


# -- prefixes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [13, 37])
def test_a_prefix_is_resumed_exactly_whatever_the_chunks(chunk):
    """Cut where chunks, pages and turns do not meet: tokens and log-probabilities are those of reading everything."""
    cache = CacheOptions(device_state_slots=8)
    options = {"max_tokens": 8, "sampling": GREEDY, "ignore_eos": True, "logprobs": 2}
    with opened(max_context=512, max_concurrency=1, prefill_chunk=chunk, cache=cache) as own:
        stem = [30 + i * 7 % 200 for i in range(131)]
        for length in (63, 64, 65, 131):
            first = own.generate(ninfer.TokenPrompt(stem[:length]), **options)
            prompt = ninfer.TokenPrompt([*stem[:length], *first.token_ids, *stem[:29]])
            warm, cold = own.generate(prompt, **options), own.generate(prompt, cache="disabled", **options)
            assert warm.usage.cached_tokens == length + 7
            assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)

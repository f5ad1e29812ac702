"""Speculation through the public engine: the shipped model with its own drafting module and with its companions, side
by side with ordinary decoding."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from unittest.mock import patch

import jsonschema
import pytest
from fakes.async_device import AsyncDevice
from oracles.distributions import assert_same_distribution

import ninfer
from ninfer import Chat, OutputConstraint, PauseOutcome, SamplingParams, SpecOptions, Tool
from ninfer._cpu.device import CpuDevice
from ninfer.models.qwen3_5.synthetic import synthetic_source
from ninfer.runtime.measuring import measure_rounds
from ninfer.runtime.prices import Prices

TINY = Path(__file__).parents[2] / "examples" / "tiny"
GREEDY = SamplingParams(temperature=0)
PAUSED = (PauseOutcome.SNAPSHOT, PauseOutcome.REPLAY)


def opened(spec: SpecOptions | str, **options) -> ninfer.Engine:
    chosen = {"device": "cpu", "max_concurrency": 8, "max_context": 1024, "progress": False, "spec": spec} | options
    backend = spec if isinstance(spec, str) else spec.backend
    return ninfer.Engine(TINY / ("tiny.ninfer" if backend in ("none", "mtp") else "tiny-dflash.ninfer"), **chosen)


@pytest.fixture(scope="module")
def plain() -> Iterator[ninfer.Engine]:
    with opened("none") as engine:
        yield engine


@pytest.fixture(scope="module")
def ordinary(plain) -> dict:
    """What ``plain`` has said, for all that are compared with it."""
    return {}


@pytest.fixture(scope="module", params=["mtp", "dflash", "dflash2"])
def drafting(request) -> Iterator[ninfer.Engine]:
    with opened(request.param) as engine:
        yield engine


LEAST = {3: 2.9, 7: 6.3}
"""Tokens of a round by the number of drafts: three of the module, seven of the companions."""


def conversations(tiny, count: int) -> list[Chat]:
    """Held-out prompts of every kind the model was trained for."""
    sets = tiny("corpus").corpus.held_out_sets(-(-count // 7))
    items = [item for kind in zip(*sets.values()) for item in kind]
    return [
        Chat(item["messages"][:-1], tools=item.get("tools") or (), thinking=item["thinking"]) for item in items[:count]
    ]


@pytest.mark.parametrize("count", [36, pytest.param(500, marks=pytest.mark.full)])
def test_greedy_answers_are_the_ordinary_ones(plain, drafting, ordinary, tiny, count):
    chats = conversations(tiny, count)
    if count not in ordinary:
        ordinary[count] = plain.generate(chats, max_tokens=200, sampling=GREEDY)
    drafted = drafting.generate(chats, max_tokens=200, sampling=GREEDY)
    for one, other in zip(ordinary[count], drafted, strict=True):
        assert other.error is None
        assert other.token_ids == one.token_ids
        assert (other.text, other.thinking, other.finish_reason) == (one.text, one.thinking, one.finish_reason)
        assert [(c.name, c.arguments) for c in other.tool_calls] == [(c.name, c.arguments) for c in one.tool_calls]
    rounds = sum(result.speculation.rounds for result in drafted)
    kept = sum(result.speculation.accepted for result in drafted)
    assert (rounds + kept) / rounds >= LEAST[len(drafted[0].speculation.accepted_per_position)]


@pytest.mark.parametrize(
    ("backend", "tokens"), [*(("mtp", n) for n in range(1, 8)), ("dflash", 1), ("dflash", 7), ("dflash2", 4)]
)
def test_every_width(plain, backend, tokens):
    chat = Chat([{"role": "user", "content": "What is 17 + 25?"}], thinking=True)
    with opened(SpecOptions(backend, draft_tokens=tokens), max_concurrency=1) as engine:
        result = engine.generate(chat, sampling=GREEDY, logprobs=1)
    want = plain.generate(chat, sampling=GREEDY, logprobs=1)
    assert result.token_ids == want.token_ids
    assert [t.token_id for t in result.logprobs] == list(want.token_ids)
    for one, other in zip(want.logprobs, result.logprobs):
        assert other.logprob == pytest.approx(one.logprob, abs=1e-5)
    spent = result.speculation
    assert len(spent.accepted_per_position) == tokens
    assert sum(spent.accepted_per_position) == spent.accepted <= spent.drafted <= tokens * spent.rounds
    assert list(spent.accepted_per_position) == sorted(spent.accepted_per_position, reverse=True)


@pytest.mark.parametrize("limit", range(1, 10))
def test_output_ends_at_its_budget(plain, drafting, limit):
    chat = Chat([{"role": "user", "content": "Tell me a story."}], thinking=True)
    result = drafting.generate(chat, max_tokens=limit, sampling=GREEDY)
    assert result.token_ids == plain.generate(chat, max_tokens=limit, sampling=GREEDY).token_ids
    assert (len(result.token_ids), result.finish_reason, result.stop_reason) == (limit, "length", "max_tokens")


@pytest.mark.parametrize("budget", range(12))
def test_the_thinking_budget_holds_at_every_edge(plain, drafting, budget):
    chat = Chat([{"role": "user", "content": "What is 17 + 25?"}], thinking=True)
    options = {"thinking_budget": budget, "sampling": GREEDY, "max_tokens": 120}
    result, want = drafting.generate(chat, **options), plain.generate(chat, **options)
    assert result.token_ids == want.token_ids
    assert result.thinking == want.thinking


def test_stop_strings_end_inside_a_round(plain, drafting):
    chat = Chat([{"role": "user", "content": "Tell me a story."}], thinking=True)
    text = plain.generate(chat, sampling=GREEDY, max_tokens=100).text
    assert len(text) > 33
    for at in range(4, 30, 3):
        stop = text[at : at + 3]
        one, other = (e.generate(chat, sampling=GREEDY, max_tokens=100, stop=stop) for e in (plain, drafting))
        assert (other.text, other.token_ids, other.stop_reason) == (one.text, one.token_ids, "stop_string")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_constrained_answers_are_valid(drafting, temperature):
    """The draft module knows nothing of the constraint, so illegal drafts are common."""
    constraint = OutputConstraint.json_schema(PERSON)
    for thinking in (False, True):
        chats = [Chat([{"role": "user", "content": f"Who is {n}?"}], thinking=thinking) for n in ("Ada", "Ben", "Cleo")]
        sampling = SamplingParams(temperature=temperature, seed=5, top_k=0)
        results = drafting.generate(chats, sampling=sampling, constraint=constraint, thinking_budget=20, max_tokens=120)
        for result in results:
            assert result.error is None
            assert result.finish_reason == "stop"
            jsonschema.Draft202012Validator(PERSON).validate(json.loads(result.text))
            assert result.speculation.accepted < result.speculation.drafted


def test_strict_tools_under_random_drafts():
    tool = Tool(name="lookup", parameters=PERSON, strict=True)
    chat = Chat([{"role": "user", "content": "Who is Ada?"}], tools=(tool,), thinking=True)
    source = synthetic_source("tiny", "q8", components=("text", "mtp"))
    with ninfer.Engine(source, device="cpu", max_context=1024, progress=False, spec="mtp") as engine:
        for seed in range(4):
            sampling = SamplingParams(temperature=40.0, seed=seed, top_k=0)
            result = engine.generate(chat, sampling=sampling, tool_choice="required", thinking_budget=5, max_tokens=400)
            assert result.finish_reason in ("tool_calls", "length")
            for call in result.tool_calls:
                jsonschema.Draft202012Validator(PERSON).validate(call.arguments)


def answers(
    engine: ninfer.Engine, chat: Chat, seeds: Iterable[int | None], sampling: dict, **options
) -> list[tuple[int, ...]]:
    handles = (engine.submit(chat, block=True, sampling=SamplingParams(seed=n, **sampling), **options) for n in seeds)
    found, waiting = [], deque()
    for handle in handles:
        waiting.append(handle)
        if len(waiting) == 16:
            found.append(waiting.popleft().result().token_ids)
    return found + [handle.result().token_ids for handle in waiting]


CASES = {
    "choice": {"constraint": OutputConstraint.choice(["garden", "garage", "kitchen", "office", "cellar"])},
    "regex": {"constraint": OutputConstraint.regex("[ab]{2}[cd]")},
    "schema": {"constraint": OutputConstraint.json_schema({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2})},
    "grammar": {"constraint": OutputConstraint.grammar('root ::= ("yes" | "no") " "? [01]')},
    "free": {"max_tokens": 3},
}
HOT = {"temperature": 12.0, "top_k": 3}
"""So hot that a draft, mostly one of the three, is often refused. Colder, nearly all that is said is one answer."""
COVER = [
    ("mtp", "choice", {"temperature": 1.5, "top_k": 20, "top_p": 0.9}), ("mtp", "schema", {"temperature": 3.0}),
    ("dflash", "choice", {"temperature": 3.0, "top_k": 0}), ("dflash2", "grammar", {"temperature": 1.5}),
    ("dflash2", "schema", {"temperature": 2.0, "top_k": 64, "presence_penalty": 0.5}),
]  # fmt: skip
"""Backends, kinds of constraints, temperatures and truncations that the cases below leave out."""


@pytest.mark.parametrize(
    ("count", "case", "sampling"),
    [
        (150, "regex", {"temperature": 2.0, "top_k": 20}),
        (150, "free", HOT),
        pytest.param(3000, "free", HOT, marks=pytest.mark.full),
        *(
            pytest.param(3000, case, {"temperature": t, "top_k": k, **more}, marks=pytest.mark.full)
            for case in CASES
            for t in ((3.0,) if case == "free" else (1.5, 3.0))
            for k, more in ((0, {}), (20, {"top_p": 0.9}), (64, {"presence_penalty": 0.5}))
        ),
    ],
)
def test_answers_have_the_ordinary_distribution(plain, drafting, ordinary, count, case, sampling):
    check_distribution(plain, drafting, ordinary, count, case, sampling)


@pytest.mark.parametrize(("drafting", "case", "sampling"), COVER, indirect=["drafting"])
def test_every_constraint_keeps_the_distribution(plain, drafting, ordinary, case, sampling):
    check_distribution(plain, drafting, ordinary, 100, case, sampling)


def check_distribution(plain, drafting, ordinary, count, case, sampling, named=True):
    """Over seeds; the two engines get different ones, or the second draws its own."""
    chat = Chat(
        [{"role": "user", "content": "Ada is in the garden. Ben is in the kitchen. Where is Ada?"}], thinking=False
    )
    asked = count, case, *sorted(sampling.items())
    if asked not in ordinary:
        ordinary[asked] = answers(plain, chat, range(count), sampling, **CASES[case])
    others = range(count, 2 * count) if named else [None] * count
    with patch("ninfer.intake.secrets.randbits", Random(count).getrandbits):
        assert_same_distribution(ordinary[asked], answers(drafting, chat, others, sampling, **CASES[case]))


def test_rows_that_are_cancelled_leave_the_others_alone(plain, drafting, tiny):
    chats = conversations(tiny, 8)
    want = plain.generate(chats, max_tokens=60, sampling=GREEDY)
    handles = [drafting.submit(chat, max_tokens=60, sampling=GREEDY) for chat in chats]
    for handle in handles[::3]:
        next(iter(handle.text_deltas()), None)
        handle.cancel()
    for i, handle in enumerate(handles):
        result = handle.result()
        if i % 3:
            assert result.token_ids == want[i].token_ids
        else:
            assert result.token_ids == want[i].token_ids[: len(result.token_ids)]
    assert drafting.stats().active == 0


class Scripted(Prices):
    """Which no round changes."""

    def observe(self, rows: int, drafts: int, seconds: float) -> None:
        pass


@pytest.fixture(scope="module", params=["mtp", "dflash2"])
def adapting(request) -> Iterator[ninfer.Engine]:
    """Where a draft is dear, so that requests change their minds often."""
    choices = range(1 + SpecOptions(request.param).window)
    prices = Scripted(choices, {rows: [1 + 0.8 * k for k in choices] for rows in (1, 8)})
    with patch("ninfer.runtime.instance.measure_rounds", return_value=prices):
        engine = opened(SpecOptions(request.param, adaptive=True), pause="explicit")
    with engine:
        yield engine


def test_rounds_that_adapt_say_the_same(plain, adapting, tiny):
    """All at once, some of them cancelled, some paused: whoever gets to the end says what it would have said."""
    chats, options = conversations(tiny, 16), {"max_tokens": 80, "sampling": GREEDY}
    want = plain.generate(chats, **options)
    before = adapting.stats()
    handles = [adapting.submit(chat, **options) for chat in chats]
    paused = []
    for i, handle in enumerate(handles[:8]):
        next(iter(handle.text_deltas()), None)
        if i % 4 == 1:
            handle.cancel()
        elif i % 4 == 3:
            paused.append(handle)
            adapting.pause(handle)
    for handle in paused:
        adapting.resume(handle)
    for i, (handle, one) in enumerate(zip(handles, want)):
        result = handle.result()
        whole = result.finish_reason != "cancelled"
        assert whole or (i < 8 and i % 4 == 1)
        assert result.token_ids == one.token_ids[: len(result.token_ids)]
        assert not whole or result.text == one.text
    after = adapting.stats()
    drafts, rows = after.decode_drafts - before.decode_drafts, after.decode_rows - before.decode_rows
    assert 0.1 * rows < drafts < 0.9 * adapting.options.spec.window * rows


def test_a_seed_repeats_an_answer_whatever_else_runs(adapting, tiny):
    """A request that names one has the same rounds alone and beside others that adapt."""
    chats = conversations(tiny, 6)
    options = {"max_tokens": 40, "sampling": SamplingParams(temperature=1.2, seed=11), "cache": "disabled"}
    alone = [adapting.generate(chat, **options) for chat in chats]
    others = [adapting.submit(chat, max_tokens=40) for chat in conversations(tiny, 12)]
    for one, other in zip(alone, adapting.generate(chats, **options), strict=True):
        assert (other.token_ids, other.speculation) == (one.token_ids, one.speculation)
    assert all(other.result() for other in others)


@pytest.mark.parametrize("adapting", ["mtp"], indirect=True)
def test_all_drafts_or_as_many_as_pay(adapting):
    """Where no draft pays few are made, but for a request that names its seed and draws."""
    chat, before = Chat([{"role": "user", "content": "Tell me a story."}], thinking=False), adapting.stats()
    for _ in range(4):
        adapting.generate(chat, max_tokens=60, ignore_eos=True, sampling=SamplingParams(temperature=3.0))
    after = adapting.stats()
    few = (after.decode_drafts - before.decode_drafts) / (after.decode_rows - before.decode_rows)
    adapting.generate(chat, max_tokens=60, ignore_eos=True, sampling=SamplingParams(temperature=3.0, seed=1))
    last = adapting.stats()
    all_ = (last.decode_drafts - after.decode_drafts) / (last.decode_rows - after.decode_rows)
    assert few < 1 < 2.5 < all_


@pytest.mark.parametrize(("case", "sampling"), [("regex", {"temperature": 2.0, "top_k": 20}), ("free", HOT)])
def test_rounds_that_adapt_keep_the_distribution(plain, adapting, ordinary, case, sampling):
    check_distribution(plain, adapting, ordinary, 150, case, sampling, named=False)


@pytest.mark.parametrize("backend", ["mtp", "dflash2"])
def test_a_device_with_few_recorded_widths(plain, tiny, backend):
    """Rounds run in the next wider recording, and everything happens later than it was asked for."""
    chats, options = conversations(tiny, 6), {"max_tokens": 40, "sampling": GREEDY}
    want = plain.generate(chats, **options)
    prices = Scripted((0, 1, 3, 7), {n: [1 + 0.15 * k for k in (0, 1, 3, 7)] for n in (1, 3)})
    late = AsyncDevice(CpuDevice())
    with (
        patch("ninfer.runtime.instance.measure_rounds", return_value=prices),
        patch("ninfer.runtime.devices.open_device", return_value=late),
        opened(SpecOptions(backend, draft_tokens=7, adaptive=True), max_concurrency=3, max_context=512) as engine,
    ):
        assert engine._core._worker._program._units.widths == (1, 2, 4, 8)
        for one, other in zip(want, engine.generate(chats, **options), strict=True):
            assert (other.token_ids, other.text) == (one.token_ids, one.text)
        warm = {"max_tokens": 20, "sampling": SamplingParams(temperature=1.5, seed=3), "cache": "disabled"}
        alone, together = [engine.generate(chat, **warm) for chat in chats[:3]], engine.generate(chats[:3], **warm)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert late.submitted == late.finished


def test_what_rounds_cost_is_measured_at_the_start(plain):
    """Whether a draft pays is then up to the machine."""
    asked, measured = {"max_tokens": 20, "sampling": GREEDY}, []

    def measure(*arguments, **options):
        measured.append(measure_rounds(*arguments, **options))
        return measured[-1]

    with (
        patch("ninfer.runtime.instance.measure_rounds", measure),
        opened(SpecOptions("mtp", adaptive=True), max_concurrency=2) as engine,
    ):
        (prices,) = measured
        assert prices.choices == (0, 1, 2, 3)
        assert min(seconds for rows in (1, 2) for seconds in prices.seconds(rows)) > 0
        assert "at most 3 drafts" in repr(engine)
        result = engine.generate("What is 17 + 25?", **asked)
        assert result.token_ids == plain.generate("What is 17 + 25?", **asked).token_ids
        assert engine.stats().active == 0
    with pytest.raises(ninfer.InvalidRequest) as caught:
        opened(SpecOptions("mtp", adaptive=True), max_context=16)
    assert caught.value.field == "max_context"


@pytest.mark.parametrize(("backend", "value"), [("none", True), ("mtp", 1), ("mtp", None), ("mtp", "yes")])
def test_bad_adaptive(backend, value):
    with pytest.raises(ninfer.InvalidRequest) as caught:
        SpecOptions(backend, adaptive=value)
    assert caught.value.field == "adaptive"


def test_a_model_without_the_module_is_refused():
    with pytest.raises(ninfer.InvalidRequest, match="mtp") as caught:
        ninfer.Engine(synthetic_source("tiny", "q8"), device="cpu", spec="mtp", progress=False)
    assert caught.value.field == "spec.backend"


@pytest.mark.parametrize("value", ["eagle", 3, None, True])
def test_bad_backends(value):
    with pytest.raises(ninfer.InvalidRequest):
        ninfer.EngineOptions(spec=value)


@pytest.mark.parametrize("value", [0, 8, True, 2.0, "3"])
def test_bad_widths(value):
    with pytest.raises(ninfer.InvalidRequest, match="draft_tokens"):
        SpecOptions("mtp", draft_tokens=value)


BACKENDS = pytest.mark.parametrize("backend", ["mtp", "dflash", "dflash2"])


@BACKENDS
def test_a_resumed_conversation_drafts_as_a_cold_one(backend):
    """What is kept of a finished answer includes the history of what drafts: the same drafts are kept afterwards."""
    first = [{"role": "user", "content": "Tell me a story."}]
    with opened(backend, max_concurrency=2) as engine:
        told = engine.generate(Chat(first, thinking=False), max_tokens=80, sampling=GREEDY, session="tale")
        for text in ("And what is 17 + 25?", "Tell me more about it, please.", "Where is Ada?"):
            chat = Chat([*first, told.message, {"role": "user", "content": text}], thinking=False)
            options = {"max_tokens": 60, "sampling": GREEDY}
            cold = engine.generate(chat, cache="disabled", **options)
            warm = engine.generate(chat, session="tale", update_session=False, **options)
            assert cold.usage.cached_tokens == 0 < warm.usage.cached_tokens
            assert warm.token_ids == cold.token_ids
            assert warm.speculation == cold.speculation


@BACKENDS
def test_the_same_prompt_again_drafts_as_before(backend):
    chat = Chat([{"role": "user", "content": "What is 31 + 12? Think about it."}], thinking=True)
    options = {"max_tokens": 100, "sampling": GREEDY}
    with opened(backend, max_concurrency=2) as engine:
        cold = engine.generate(chat, cache="disabled", **options)
        results = [engine.generate(chat, **options) for _ in range(3)]
    assert results[-1].usage.cached_tokens > 0
    for result in results:
        assert (result.token_ids, result.speculation) == (cold.token_ids, cold.speculation)


@BACKENDS
@pytest.mark.parametrize("mode", ["snapshot", "replay"])
def test_a_paused_request_drafts_on_as_before(backend, mode):
    """What drafts goes on from the same history, so as many drafts are kept. Those made before a pause may be lost."""
    chat = Chat([{"role": "user", "content": "What is 331 + 412? Think about it."}], thinking=True)
    options = {"max_tokens": 100, "sampling": GREEDY, "cache": "disabled"}
    with opened(backend, max_concurrency=2, pause="explicit") as engine:
        want, pauses = engine.generate(chat, **options), 0
        with engine.submit(chat, **options) as handle:
            for event in handle:
                if isinstance(event, ninfer.Delta) and pauses < 3 and engine.pause(handle, mode) in PAUSED:
                    pauses += 1
                    engine.resume(handle)
        result = handle.result()
    assert pauses > 0
    assert result.token_ids == want.token_ids
    rates = [r.speculation.accepted / r.speculation.rounds for r in (result, want)]
    assert rates[0] > 0.9 * rates[1]

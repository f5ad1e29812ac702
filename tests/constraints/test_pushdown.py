"""Masks of our own parser against the recogniser, for every token of small vocabularies."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.schemas import schema

from ninfer.constraints import OutputConstraint, language
from ninfer.constraints.compose import PhaseMarker, after_thinking, free_text
from ninfer.constraints.ir import Counted, Grammar, Ref, alt, seq
from ninfer.constraints.pushdown import Pushdown
from ninfer.constraints.recognise import Machine, Run
from ninfer.constraints.tokentrie import code_range, split_text
from ninfer.errors import InvariantError

STOP, MARKER = 256, 257


def string(**bounds):
    return {"type": "string", **bounds}


def closed(**properties):
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


SCHEMAS = [
    {"type": "object"},
    string(),
    string(minLength=2, maxLength=3),
    string(maxLength=0),
    string(pattern="b"),
    string(pattern='^"\n$'),
    string(pattern="^a.b?$", maxLength=4),
    string(format="date"),
    {"type": "object", "properties": {"a": string(maxLength=2), "ab": string(pattern="^[ab]+$")}},
    {"anyOf": [string(maxLength=1), string(pattern="^a+$"), {"enum": ["ab", "b"]}]},
    # Two strings of different length are open at once, and what follows them differs.
    {"anyOf": [closed(a=string(maxLength=1), b={"const": 1}), closed(a=string(minLength=1), b={"const": 2})]},
    {"type": "array", "items": string(minLength=1), "maxItems": 2},
    {"type": ["number", "null"], "minimum": -1.5},
    {"type": "array", "items": {"enum": ["a", "ab", "abc", 1, None, [True]]}},
]  # fmt: skip


def legal(index, parser):
    words = np.zeros(index.words, np.uint32)
    parser.fill(words)
    return {int(i) for i in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))}


def could_read(run, data):
    """Whether bytes, perhaps ending inside a character, can follow what was read."""
    run = copy.copy(run)  # reading replaces what a run holds and changes none of it
    whole, tail = split_text(data)
    if not run.feed(whole):
        return False
    if not tail:
        return True
    span = code_range(tail)
    return span is not None and any(
        low <= span[1] and span[0] < high
        for state, _ in run._active.values()
        for ranges, _ in state.chars
        for low, high in ranges
    )


def walk(index, grammar, seed, steps=24, warm=False):
    """A random walk; at every step each token is legal exactly if the recogniser could read it."""
    pushdown = Pushdown(grammar, index.contents(), index.classes.stop)
    if warm:
        pushdown.warm(0.05)
    parser, run = pushdown.parser(), Run(Machine(grammar))
    chance, pending = random.Random(seed), b""
    for _ in range(steps):
        ids = legal(index, parser)
        complete = run.complete and not pending
        assert parser.complete == complete
        for token in range(index.size):
            if index.classes.text[token]:
                assert (token in ids) == could_read(run, pending + index.classes.data[token]), token
            else:
                assert (token in ids) == (token == STOP and complete)
        choices = sorted(ids - {STOP})
        if not choices:
            break
        token = chance.choice([i for i in choices if i < 128 or i > 258] or choices)
        if chance.random() < 0.15:
            token = chance.choice(choices)
        assert parser.accept(token)
        whole, pending = split_text(pending + index.classes.data[token])
        assert run.feed(whole)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:60])
def test_schemas(small_index, schema):
    for seed in range(3):
        walk(small_index, language(OutputConstraint.json_schema(schema)), seed)


@given(seed=st.integers(0, 10**6), warm=st.booleans())
def test_drawn_schemas(small_index, seed, warm):
    grammar = language(OutputConstraint.json_schema(schema(random.Random(seed), depth=2)))
    walk(small_index, grammar, seed, steps=10, warm=warm)


@pytest.mark.parametrize(
    "pattern", ["[a-z]+", "(?:ab|c){1,4}", "(?:[^\\n]{1,5}\\n)+", "a.b?", "[é中]{2}x*", "(?:a*b)*", ""]
)
def test_regular_expressions(small_index, pattern):
    grammar = language(OutputConstraint.regex(pattern))
    assert not grammar.free_form
    for seed in range(2):
        walk(small_index, grammar, seed, steps=12, warm=bool(seed))


def test_choices(small_index):
    grammar = language(OutputConstraint.choice(["a", "ab", "", "é中😀\n", "中", "abc"]))
    for seed in range(4):
        walk(small_index, grammar, seed)


def test_thinking(small_index):
    """The close is one marker; its spelling cannot be written, and whatever follows is the turn's own."""
    turn = language(OutputConstraint.choice([" a", "b"]))
    pushdown = Pushdown(after_thinking(turn, PhaseMarker("</think>", MARKER)), small_index.contents(), (STOP,))
    parser = pushdown.parser()
    for byte in b"x</think\n":
        assert STOP not in legal(small_index, parser)
        assert parser.accept(byte)
    parser.rollback(1)
    assert ord(">") not in legal(small_index, parser)
    assert MARKER not in legal(small_index, parser)
    assert parser.accept(ord("\n"))
    assert MARKER in legal(small_index, parser)
    assert parser.accept(MARKER)
    assert legal(small_index, parser) == {ord("\n"), small_index.classes.data.index(b"\n\n")}
    assert parser.accept_bytes(b"\n\n")
    assert legal(small_index, parser) == {ord(" "), ord("b"), small_index.classes.data.index(b" ", 260)}


def test_undoing_a_step_restores_everything(small_index):
    grammar = language(OutputConstraint.json_schema(SCHEMAS[8]))
    parser, chance = Pushdown(grammar, small_index.contents(), (STOP,)).parser(), random.Random(5)
    for _ in range(40):
        before = legal(small_index, parser), parser.complete
        steps = 0
        for _ in range(chance.randrange(4)):
            ids = sorted(legal(small_index, parser) - {STOP})
            steps += bool(ids) and parser.accept(chance.choice(ids))
        parser.rollback(steps)
        assert (legal(small_index, parser), parser.complete) == before
        ids = sorted(before[0] - {STOP})
        if ids:
            assert parser.accept(chance.choice(ids))
        assert not parser.accept(258)


def test_forgetting_changes_no_answer(small_index, monkeypatch):
    """When too much is remembered, everything is learnt anew under a parser that goes on."""
    monkeypatch.setattr("ninfer.constraints.pushdown._MAX_POINTS", 40)
    for seed in range(3):
        walk(small_index, language(OutputConstraint.json_schema({"type": "object"})), seed)


@pytest.mark.parametrize("schema", [SCHEMAS[8], SCHEMAS[10], {"type": "object"}], ids=str)
def test_looking_ahead_changes_no_answer(small_index, schema):
    grammar = language(OutputConstraint.json_schema(schema))
    ahead, fresh = (Pushdown(grammar, small_index.contents(), (STOP,)) for _ in range(2))
    ahead.warm(0.3)
    parsers, chance = (ahead.parser(), fresh.parser()), random.Random(3)
    for _ in range(30):
        masks = [legal(small_index, parser) for parser in parsers]
        assert masks[0] == masks[1]
        token = chance.choice(sorted(masks[0] - {STOP}) or [STOP])
        if token == STOP:
            break
        assert [parser.accept(token) for parser in parsers] == [True, True]


def test_left_recursion_is_noticed(small_index, monkeypatch):
    monkeypatch.setattr("ninfer.constraints.pushdown._MAX_CLOSURE", 1000)
    with pytest.raises(InvariantError):
        Pushdown(Grammar({"root": alt([seq(Ref("root"), "a"), "a"])}), small_index.contents(), (STOP,))


def test_what_follows_a_string_must_be_told_from_it(small_index):
    grammar = Grammar({"root": seq(Counted(0, 3), free_text("x"))})
    with pytest.raises(InvariantError):
        legal(small_index, Pushdown(grammar, small_index.contents(), (STOP,)).parser())


@given(seed=st.integers(0, 10**6), low=st.integers(0, 3), more=st.integers(0, 3), second=st.integers(0, 4))
def test_bounds_that_overlap(small_index, seed, low, more, second):
    """Masks are exact at every bound, also while several bounded strings are open."""
    either = alt([seq('"', Counted(low, low + more), '"'), seq('"', Counted(second, second), '","a"')])
    walk(small_index, Grammar({"root": either}), seed, steps=8)

"""The recogniser against enumerated languages, Python's engine and a naive derivation search."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.automata import Dfa
from ninfer.constraints.chars import ANY, normalise
from ninfer.constraints.ir import (
    EMPTY,
    NOTHING,
    Alt,
    Auto,
    Class,
    Counted,
    Grammar,
    Lit,
    NotTok,
    Ref,
    Rep,
    Seq,
    Tok,
    alt,
    json_spelled,
    optional,
    seq,
)
from ninfer.constraints.recognise import Machine, Run
from ninfer.constraints.regex import parse

WORDS = ["".join(w) for n in range(7) for w in itertools.product("ab", repeat=n)]


def machine(root, **rules):
    return Machine(Grammar({"root": root, **rules}))


def test_recursion_of_every_kind():
    left = machine(alt((seq(Ref("root"), "a"), EMPTY)))
    right = machine(alt((seq("a", Ref("root")), EMPTY)))
    middle = machine(alt((seq("a", Ref("root"), "b"), "ab")))
    hidden = machine(seq(Ref("e"), Ref("root"), "a") if False else alt((seq(Ref("e"), Ref("root"), "a"), "b")), e=EMPTY)
    both = machine(alt((seq(Ref("root"), Ref("root")), "a", EMPTY)))
    for word in WORDS:
        only_a = set(word) <= {"a"}
        assert left.accepts(word) == right.accepts(word) == both.accepts(word) == only_a
        half = len(word) // 2
        assert middle.accepts(word) == (half > 0 and word == "a" * half + "b" * half)
        assert hidden.accepts(word) == (re.fullmatch("ba*", word) is not None)


def test_mutual_recursion_and_nullable_rules():
    g = machine(seq(Ref("x"), Ref("y")), x=alt((Ref("y"), "a", EMPTY)), y=alt((Ref("x"), "b", EMPTY)))
    for word in WORDS:
        assert g.accepts(word) == (word in {"", "a", "b", "ab", "aa", "ba", "bb"})


def test_empty_language():
    for g in (machine(NOTHING), machine(seq("a", NOTHING)), machine(Ref("root")), machine(seq("a", Ref("root")))):
        assert not any(g.accepts(word) for word in WORDS)


def test_long_right_recursion_is_linear_and_deep_nesting_works():
    string = machine(seq('"', Ref("s")), s=alt(('"', seq(Class(normalise([(0x61, 0x7B)])), Ref("s")))))
    assert string.accepts('"' + "q" * 20_000 + '"')
    brackets = machine(alt((seq("(", Ref("root"), ")"), "x")))
    assert brackets.accepts("(" * 5000 + "x" + ")" * 5000)
    assert not brackets.accepts("(" * 5000 + "x" + ")" * 4999)


@given(st.recursive(
    st.sampled_from(["a", "b", "", "[ab]"]),
    lambda inner: st.one_of(
        st.tuples(st.just("seq"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("alt"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("rep"), inner, st.integers(0, 2), st.one_of(st.none(), st.integers(0, 2))),
    ),
    max_leaves=8,
))  # fmt: skip
def test_regular_grammars_equal_pythons_engine(tree):
    def build(t):
        if isinstance(t, str):
            return (Class(normalise([(0x61, 0x63)])), "[ab]") if t == "[ab]" else (Lit(t), re.escape(t))
        if t[0] == "rep":
            node, text = build(t[1])
            high = None if t[3] is None else t[2] + t[3]
            return Rep(node, t[2], high), f"(?:{text}){{{t[2]},{'' if high is None else high}}}"
        parts = [build(x) for x in t[1]]
        nodes, texts = tuple(p[0] for p in parts), [p[1] for p in parts]
        return (
            (Seq(nodes), "(?:" + "".join(texts) + ")") if t[0] == "seq" else (Alt(nodes), "(?:" + "|".join(texts) + ")")
        )

    node, text = build(tree)
    g, pattern = machine(node), re.compile(text)
    for word in WORDS[:63]:
        assert g.accepts(word) == (pattern.fullmatch(word) is not None)


@given(value=st.text(max_size=6), low=st.integers(0, 3), extra=st.one_of(st.none(), st.integers(0, 3)))
def test_counted_json_strings(value, low, extra):
    high = None if extra is None else low + extra
    g = machine(Counted(low, high))
    spelled = json_spelled(value)
    assert json.loads(f'"{spelled}"') == value
    assert g.accepts(spelled) == (low <= len(value) and (high is None or len(value) <= high))


def test_json_spelling_is_canonical():
    g = machine(seq('"', Counted(0, None), '"'))
    assert g.accepts('"\\n\\"\\\\\\u0001é😀/"')
    for wrong in ['"\n"', '"\\u00e9"', '"\\/"', '"\\u000a"', '"\\u001F"', '"\\x"', '"']:
        assert not g.accepts(wrong), wrong
    assert not g.accepts(b'"\xed\xa0\x80"')
    assert not g.accepts(b'"\xff"')


@given(value=st.text('ab"\n\\é', max_size=5))
def test_automata_spelled_both_ways(value):
    dfa = Dfa.from_regex(parse(r'[^b]*"?\n?'), search=False)
    assert machine(Auto(dfa, "raw")).accepts(value) == dfa.accepts(value)
    assert machine(Auto(dfa, "json")).accepts(json_spelled(value)) == dfa.accepts(value)


def test_tokens_are_read_by_id():
    g = machine(seq("a", Tok((7,)), NotTok((1, 2)), "b"))
    run = Run(g)
    assert run.feed("a")
    assert run.feed_token(7)
    assert run.feed_token(3)
    assert not run.complete
    assert run.feed("b")
    assert run.complete
    for path in ([1], [7, 2]):
        run = Run(g)
        run.feed("a")
        assert not all(run.feed_token(t) for t in path)


def test_builders_flatten_and_join():
    assert seq("a", seq("b", ""), "c") == Lit("abc")
    assert alt(("a", alt(("b", "a")))) == Alt((Lit("a"), Lit("b")))
    assert optional("a") == Alt((Lit("a"), EMPTY))
    assert machine(Class(ANY)).accepts("😀")
    with pytest.raises(KeyError):
        Machine(Grammar({"root": Ref("missing")})).accepts("a")

"""What XGrammar makes of emitted text, byte by byte, against the recogniser."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.automata import Dfa
from ninfer.constraints.chars import complement, normalise
from ninfer.constraints.emit import char_class, emit
from ninfer.constraints.gbnf import parse
from ninfer.constraints.ir import EMPTY, Auto, Class, Grammar, Lit, NotTok, Ref, Rep, Tok, alt, seq
from ninfer.constraints.limits import MAX_EMITTED_BYTES, Work
from ninfer.constraints.prune import pruned
from ninfer.constraints.recognise import Machine, Run
from ninfer.constraints.regex import parse as parse_regex
from ninfer.constraints.vocab import TokenIndex
from ninfer.errors import ConstraintLimit, UnsatisfiableSchema

STOP, MARKER = 256, 257


def legal(index, parser):
    words = np.zeros(index.words, np.uint32)
    parser.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: index.size]
    return set(np.flatnonzero(bits).tolist())


def compare(index, grammar, steps=24, seeds=3):
    """Random walks: at every whole character, each ASCII byte and the end are as the recogniser says."""
    compiled = index.compiler().compile(emit(grammar, index.classes.reserved))
    machine = Machine(grammar)
    for seed in range(seeds):
        chance, parser, text = random.Random(seed), compiled.parser(), b""
        for _ in range(steps):
            ids = legal(index, parser)
            assert (STOP in ids) == parser.complete
            assert ids <= set(range(257))
            try:
                read = text.decode()
            except UnicodeDecodeError:
                read = None
            if read is not None:
                run = Run(machine)
                assert run.feed(read)
                assert run.complete == parser.complete, read
                for byte in range(128):
                    assert Run(machine).feed(read + chr(byte)) == (byte in ids), (read, chr(byte))
            choices = sorted(i for i in ids if i < 256)
            if not choices:
                break
            # Bytes of longer characters are legal almost everywhere; ASCII makes the more telling walks.
            token = chance.choice([i for i in choices if i < 128] or choices)
            if chance.random() < 0.1:
                token = chance.choice(choices)
            assert parser.accept(token)
            text += bytes([token])


GRAMMARS = [
    'root ::= "status=" ("ok" | "error") "\\n"',
    "root ::= [0-9]+",
    'root ::= "(" root ")" | "x"',
    'root ::= root "a" | ""',
    'root ::= ("" | "a")* "b"',
    'root ::= ("a"*)* "b"',
    'root ::= ([^"\\\\] | "\\\\" ["\\\\n])*',
    'root ::= ([^"\\\\] | "\\\\" ["\\\\n] | "")* "x"',
    'root ::= ([^a] | ("b"?))* | "c"{2,4} (= "x")',
    'root ::= "é中😀\\n" | [^a-z]{2,} | [é-😀]{1,2}',
    'root ::= a* "z"\na ::= b | ""\nb ::= [^x] | a',
    'root ::= "true" | true\ntrue ::= ("t" | [^t]+)*',
    'root ::= [^\\-\\]]{0,3} "-" "ab"{2}',
    'root ::= "a" b | "c"\nb ::= b "d" | c\nc ::= "e" b | "f"',
    'root ::= "a" dead | "b"\ndead ::= "c" dead',
]


@pytest.mark.parametrize("text", GRAMMARS)
def test_grammars(byte_index, text):
    compare(byte_index, pruned(parse(text, Work()), Work()))


@pytest.mark.parametrize("pattern", ["b", "^a.b$", '^"\n?$', r"^\s+$", "[^a-z]{2}", "^(?:ab)*$"])
def test_automata(byte_index, pattern):
    dfa = Dfa.from_regex(parse_regex(pattern), search=True)
    compare(byte_index, Grammar({"root": seq('"', Auto(dfa, "raw"), '"')}), steps=12, seeds=6)


leaves = st.sampled_from(
    [Lit("a"), Lit("bc"), Class(((0x61, 0x64),)), Class(complement(((0x62, 0x63),))), EMPTY, Ref("x")]
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: seq(*parts)),
        st.lists(inner, min_size=1, max_size=3).map(alt),
        st.builds(Rep, inner, st.integers(0, 2), st.sampled_from([2, 3, None])),
    ),
    max_leaves=8,
)


@given(root=nodes, x=nodes)
def test_any_grammar(byte_index, root, x):
    try:
        grammar = pruned(Grammar({"root": root, "x": x}), Work())
    except UnsatisfiableSchema:
        return
    compare(byte_index, grammar, steps=6, seeds=2)


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)), min_size=1, max_size=4))
def test_classes(byte_index, ends):
    """A class and its complement part the scalar values; neither has a surrogate."""
    ranges = normalise((min(pair), max(pair) + 1) for pair in ends)
    for chosen in (ranges, complement(ranges)):
        compiled = byte_index.compiler().compile(f"root ::= {char_class(chosen)}\n")
        for code in {e + d for r in ranges for e in r for d in (-1, 0)} | {0x41, 0xD7FF, 0xE000}:
            inside = any(low <= code < high for low, high in chosen)
            if 0 <= code < 0x110000:
                data = chr(code).encode("utf-8", "surrogatepass")
                parser = compiled.parser()
                assert parser.accept_bytes(data) == inside, hex(code)


def test_tokens(byte_index):
    compiled = byte_index.compiler().compile(
        emit(Grammar({"root": seq("a", Tok((MARKER,)), NotTok((0x62,)))}), byte_index.classes.reserved)
    )
    parser = compiled.parser()
    assert legal(byte_index, parser) == {0x61}
    assert parser.accept(0x61)
    assert legal(byte_index, parser) == {MARKER}
    assert parser.accept(MARKER)
    assert legal(byte_index, parser) == set(range(256)) - {0x62}


def test_markers_and_ends_are_not_their_spelling(byte_index):
    """A literal that spells a control token is ordinary text."""
    parser = byte_index.compiler().compile('root ::= "<eos>"\n').parser()
    for byte in b"<eos>":
        assert STOP not in legal(byte_index, parser)
        assert parser.accept(byte)
    assert legal(byte_index, parser) == {STOP}


def test_the_size_of_emitted_text_is_limited():
    wide = Grammar({"root": alt(Lit(f"{i:07d}" * 8) for i in range(60_000))})
    emit(wide)
    with pytest.raises(ConstraintLimit) as caught:
        emit(Grammar({"root": seq(*[Lit("é" * (MAX_EMITTED_BYTES // 20))] * 3)}))
    assert caught.value.limit == "emitted"


def test_warming_changes_no_mask(small_index):
    """What was built ahead is what is built when it is needed, and the parser of a language starts at its beginning."""
    text = 'root ::= ("- " [^\\n]{1,3} "\\n" | "#" [a-c]+)*'
    emitted = emit(pruned(parse(text), Work()), small_index.classes.reserved)
    indices = small_index, TokenIndex(small_index.classes)
    ahead, fresh = (index.compiler().compile(emitted) for index in indices)
    ahead.warm(0.3)
    parsers = [ahead.parser(), fresh.parser()]
    for byte in "- ab\n#acc- 中\n".encode():
        masks = [legal(small_index, parser) for parser in parsers]
        assert masks[0] == masks[1]
        assert parsers[0].complete == parsers[1].complete
        assert [parser.accept_bytes(bytes([byte])) for parser in parsers] == [True, True]

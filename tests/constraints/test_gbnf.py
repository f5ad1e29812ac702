"""GBNF: accepted syntax by what it means, refused syntax by where it stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.gbnf import parse
from ninfer.constraints.ir import NotTok, Tok
from ninfer.constraints.limits import MAX_GRAMMAR_NESTING, MAX_GRAMMAR_REPEAT
from ninfer.constraints.recognise import Machine
from ninfer.errors import InvalidGrammar, UnsatisfiableSchema


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ('root ::= "status=" ("ok" | "error") "\\n"', ["status=ok\n", "status=error\n"], ["status=ok", "ok\n"]),
        ("root ::= [0-9]+", ["1", "12"], ["", "a"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)"]),
        ('root ::= root "a" | ""', ["", "aaa"], ["b"]),
        ("root ::= [^a]", ["中", "\n"], ["a", ""]),
        ('# comment\nroot ::= a # more\n  b | "x"\n\na ::= "1"\nb ::= "2"{2}', ["122", "x"], ["12", "1x"]),
        ('root ::= "a"{2,} "b"{1,2} "c"{0}', ["aab", "aaabb"], ["ab", "aabbb", "aabc"]),
        ('root ::= ("a" | "b"?)* "!" ()', ["!", "abba!"], ["", "c!"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\"\\\\" [\\]\\-\\^a-c]', ['Aé😀\t"\\]', 'Aé😀\t"\\b'], ['Aé😀\t"\\d']),
        ('a ::= "x"* (= "b")\nroot ::= a "b"', ["b", "xxb"], ["x"]),
        ('a ::= "x"* (= "c")\nroot ::= a "b"', ["xb"], []),
        ('root ::= under_score "é"\nunder_score ::= "1" |\n  "2"', ["1é", "2é"], ["é"]),
        ('root   ::= one-2.b\none-2.b ::= [^"\\\\]+', ["abc"], ['"', ""]),
        ("root ::= [-a] [a-]", ["-a", "a-"], ["b-"]),
    ],
)
def test_languages(text, yes, no):
    machine = Machine(parse(text))
    assert [t for t in yes if not machine.accepts(t)] == []
    assert [t for t in no if machine.accepts(t)] == []


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("root ::= x", 1, 10),
        ('root ::= "é" ;', 1, 14),
        ('root ::= "a" |', 1, 15),
        ('root ::= "a"\nroot ::= "b"', 2, 1),
        ('a ::= "x"', 1, 1),
        ('root ::= Regex("a")', 1, 10),
        ("root ::= TagDispatch()", 1, 10),
        ("root ::= TokenTagDispatch()", 1, 10),
        ("root ::= Substring(1)", 1, 10),
        ("root ::= Foo(1)", 1, 10),
        ('root[temperature=0.1] ::= "a"', 1, 5),
        ('root ::= "a"\nb[max_tokens=3] ::= "a"', 2, 2),
        ('root ::= "\\ud800"', 1, 11),
        ('root ::= "\\U00110000"', 1, 11),
        ("root ::= [\\d]", 1, 11),
        ('root ::= "a"{99999999999}', 1, 14),
        ('root ::= "\0"', 1, 11),
        ('root ::= "\\x4"', 1, 11),
        ("root ::= []", 1, 10),
        ("root ::= [z-a]", 1, 11),
        ('root ::= "a"**', 1, 14),
        ('root ::= "a"{3,1}', 1, 13),
        ('root ::= "a"{,1}', 1, 14),
        ('root ::= ("a"', 1, 10),
        ('root ::= "a', 1, 10),
        ("root ::= [a", 1, 10),
        ("root", 1, 5),
        ('9a ::= "x"', 1, 1),
        ('root ::= "a" (= "b") "c"', 1, 14),
        ("root ::= Token()", 1, 16),
        ("root ::= Token(1,)", 1, 18),
        ('root ::= "\\q"', 1, 11),
        ('root ::= "a" ) "b"', 1, 14),
        ("", 1, 1),
    ],
)
def test_refusals_name_line_and_column(text, line, column):
    with pytest.raises(InvalidGrammar) as error:
        parse(text)
    assert (error.value.line, error.value.column) == (line, column)


def test_token_terminals_must_be_ordinary_text():
    grammar = parse("root ::= Token(1, 2) ExcludeToken( 3 )", is_text_token=lambda i: i < 10)
    assert grammar.rules["root"].parts == (Tok((1, 2)), NotTok((3,)))
    for bad in ("Token(10)", "ExcludeToken(1, 12)", "Token(1234567890123)"):
        with pytest.raises(InvalidGrammar):
            parse(f"root ::= {bad}", is_text_token=lambda i: i < 10)


def test_a_root_without_finite_text_is_unsatisfiable():
    for text in ("root ::= root", 'root ::= "a" b\nb ::= "c" b'):
        with pytest.raises(UnsatisfiableSchema):
            parse(text)
    parse('root ::= "a" | b\nb ::= "c" b')


def test_limits_just_below_and_above():
    parse(f'root ::= "a"{{{MAX_GRAMMAR_REPEAT}}}')
    with pytest.raises(InvalidGrammar):
        parse(f'root ::= "a"{{{MAX_GRAMMAR_REPEAT + 1}}}')
    parse("root ::= " + "(" * MAX_GRAMMAR_NESTING + "x" + ")" * MAX_GRAMMAR_NESTING + "\nx ::= [a]")
    with pytest.raises(InvalidGrammar):
        parse("root ::= " + "(" * (MAX_GRAMMAR_NESTING + 1) + "[a]" + ")" * (MAX_GRAMMAR_NESTING + 1))


@given(st.text(alphabet='root:= "ab|()[]^-*+?{}1,\\x\n#.Token', max_size=40))
def test_any_text_parses_or_is_refused_with_a_place(text):
    for candidate in (text, "root ::= " + text):
        place = None
        try:
            Machine(parse(candidate))
        except InvalidGrammar as error:
            place = error.line, error.column
        except UnsatisfiableSchema:
            continue
        if place is not None:
            lines = candidate.split("\n")
            assert 1 <= place[0] <= len(lines)
            assert 1 <= place[1] <= len(lines[place[0] - 1]) + 1

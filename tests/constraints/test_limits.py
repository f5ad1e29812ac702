"""Every documented limit, with an input that just passes and one that just does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ninfer.constraints import limits
from ninfer.constraints.output import OutputConstraint
from ninfer.constraints.source import MAX_SOURCE_DEPTH
from ninfer.errors import ConstraintLimit, InvalidGrammar, InvalidRegex

SPACE = " " * (limits.MAX_SOURCE_BYTES - 2)


def nested_groups(depth, body):
    return "(" * depth + body + ")" * depth


CASES = {
    "source bytes": lambda n: OutputConstraint.json_schema("{" + SPACE + " " * n + "}"),
    "depth": lambda n: OutputConstraint.json_schema("[" * (MAX_SOURCE_DEPTH + n) + "]" * (MAX_SOURCE_DEPTH + n)),
    "choices": lambda n: OutputConstraint.choice([str(i) for i in range(limits.MAX_CHOICES + n)]),
    "copies": lambda n: OutputConstraint.regex(f"(?:a{{512}}){{{512 + n}}}"),
    "items": lambda n: OutputConstraint.json_schema({"maxItems": limits.MAX_GRAMMAR_REPEAT + n}),
    "members": lambda n: OutputConstraint.json_schema({"maxProperties": limits.MAX_OBJECT_STATES + n}),
    "unique": lambda n: OutputConstraint.json_schema({"items": {"enum": list(range(12 + n))}, "uniqueItems": True}),
    "length": lambda n: OutputConstraint.json_schema({"pattern": "a$", "maxLength": limits.MAX_STRING_LENGTH + n}),
}


def refusal(make):
    try:
        make().check()
    except ConstraintLimit as error:
        return error.limit
    except Exception as error:
        return type(error).__name__
    return None


@pytest.mark.parametrize("limit", CASES)
def test_just_below_and_above(limit):
    below, above = refusal(lambda: CASES[limit](0)), refusal(lambda: CASES[limit](1))
    assert below in (None, "InvalidSchema")  # an array is no schema, but it was read
    assert above == limit


def test_nesting():
    OutputConstraint.regex(nested_groups(limits.MAX_REGEX_NESTING, "a")).check()
    with pytest.raises(InvalidRegex):
        OutputConstraint.regex(nested_groups(limits.MAX_REGEX_NESTING + 1, "a")).check()
    grammar = OutputConstraint.grammar("root ::= " + nested_groups(limits.MAX_GRAMMAR_NESTING, "[a]"))
    assert grammar.accepts("a")
    with pytest.raises(InvalidGrammar):
        OutputConstraint.grammar("root ::= " + nested_groups(limits.MAX_GRAMMAR_NESTING + 1, "[a]")).check()


def test_automaton_states():
    limits.check_states(limits.MAX_DFA_STATES)
    with pytest.raises(ConstraintLimit):
        limits.check_states(limits.MAX_DFA_STATES + 1)


def test_the_page_states_the_limits_and_its_example_holds():
    page = (Path(__file__).parents[2] / "docs" / "constraints.md").read_text()
    for value in (limits.MAX_WORK, limits.MAX_CHOICES, limits.MAX_INTERSECTIONS, limits.MAX_STRING_LENGTH,
                  limits.MAX_DFA_STATES, limits.MAX_COPIES, limits.MAX_UNIQUE_STATES):  # fmt: skip
        assert f"{value:,}" in page
    example = re.search("```python\n(.*?)person.accepts", page, re.S)
    names = {}
    exec(example.group(1), names)
    for text, expected in re.findall(r"person\.accepts\('(.*)'\)\s+# (True|False)", page):
        assert names["person"].accepts(text) == json.loads(expected.lower())

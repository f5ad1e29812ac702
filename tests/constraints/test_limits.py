"""Every documented limit, with an input that just passes and one that just does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ninfer.constraints import limits
from ninfer.constraints.output import OutputConstraint
from ninfer.constraints.parameters import strict_parameters
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
    "breadth": lambda n: OutputConstraint.grammar("root ::= " + "[ab]? " * (limits.MAX_BREADTH // 2) + '"c"?' * n),
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


NESTED = {"items": {"type": "string", "pattern": "a$", "maxLength": limits.MAX_STRING_LENGTH + 1}}
PLACES = {
    "pattern and length": (lambda: OutputConstraint.json_schema(NESTED), {"pointer": "/items/pattern"}),
    "copies of a pattern": (
        lambda: OutputConstraint.json_schema({"not": {"pattern": "(?:a{8192}b){100}"}}),
        {"pointer": "/not/pattern", "offset": 12},
    ),
    "copies of a regex": (lambda: OutputConstraint.regex("x(?:y|(?:a{512}){2}b){513}"), {"offset": 21}),
    "copies of a grammar": (
        lambda: OutputConstraint.grammar('root ::= a\na ::= "b" (("c"{512} | "d"){513} "e")*'),
        {"line": 2, "column": 28},
    ),
    "items": (
        lambda: OutputConstraint.json_schema({"properties": {"a": {"maxItems": 1 << 20}}}),
        {"pointer": "/properties/a"},
    ),
    "members": (
        lambda: OutputConstraint.json_schema({"items": {"maxProperties": limits.MAX_OBJECT_STATES + 1}}),
        {"pointer": "/items/maxProperties"},
    ),
    "unique": (
        lambda: OutputConstraint.json_schema({"items": {"items": {"enum": list(range(13))}, "uniqueItems": True}}),
        {"pointer": "/items/uniqueItems"},
    ),
    "depth of a value": (
        lambda: OutputConstraint.json_schema('{"anyOf":[{"const":' + "[" * 260 + "]" * 260 + "}]}"),
        {"pointer": "/anyOf/0/const"},
    ),
    "depth of the text": (
        lambda: OutputConstraint.json_schema("\n" + "[" * 3000),
        {"line": 2, "column": MAX_SOURCE_DEPTH + 1},
    ),
    "digits": (lambda: OutputConstraint.json_schema('{"minimum":' + "1" * 5000 + "}"), {"line": 1, "column": 12}),
    "intersections": (
        lambda: OutputConstraint.json_schema(
            {
                "items": {
                    "allOf": [{"anyOf": [{"type": "string", "pattern": f"{p}{i}"} for i in range(200)]} for p in "ab"]
                }
            }
        ),
        {"pointer": "/items"},
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_limits_say_where(name):
    """The place in the schema, the text or the pattern, in fields and in the message."""
    make, place = PLACES[name]
    with pytest.raises(ConstraintLimit) as caught:
        make().check()
    found = {field: getattr(caught.value, field) for field in ("pointer", "line", "column", "offset")}
    assert {field: value for field, value in found.items() if value is not None} == place
    assert all(str(value) in str(caught.value) for value in place.values())


def test_a_tool_parameter_at_a_limit_is_named():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 9000}},
        "additionalProperties": False,
    }
    with pytest.raises(ConstraintLimit) as caught:
        strict_parameters(schema, tool="f", closing="\n</parameter>", field="tools[1].parameters")
    assert (caught.value.field, caught.value.pointer) == ("tools[1].parameters", "/properties/a")
    assert str(caught.value).startswith("tools[1].parameters: at '/properties/a': ")


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

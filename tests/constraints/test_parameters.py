"""Strict tool parameters: order, encodings, values that cannot be told from their end."""

from __future__ import annotations

import pytest

from ninfer.constraints.ir import Grammar
from ninfer.constraints.parameters import strict_parameters
from ninfer.constraints.recognise import Machine
from ninfer.errors import ConstraintError, ToolContractError, UnsupportedSchema

CLOSING = "\n</parameter>"
CLOSED = {"type": "object", "additionalProperties": False}
INT, STR = {"type": "integer"}, {"type": "string"}


def compile_strict(schema, **options):
    return strict_parameters(schema, tool="t", closing=CLOSING, **options)


def values(parameters, name):
    rule = next(p.rule for p in parameters.members if p.name == name)
    return Machine(Grammar(parameters.rules, rule)).accepts


def one(schema):
    return values(compile_strict({**CLOSED, "properties": {"p": schema}}), "p")


def test_members_in_order_with_their_encodings():
    schema = {
        **CLOSED, "required": ["days"],
        "properties": {"city": STR, "days": INT, "flags": {"type": "array", "items": STR}, "never": False},
    }  # fmt: skip
    found = compile_strict({"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": schema}}, prefix="t0_")
    assert [(p.name, p.required, p.encoding) for p in found.members] == [
        ("city", False, "raw"), ("days", True, "json"), ("flags", False, "json"),
    ]  # fmt: skip
    assert all(name.startswith("t0_") for name in found.rules)
    assert values(found, "city")('  "上海" \n')
    assert not values(found, "city")(f"a{CLOSING}b")
    assert values(found, "days")("3")
    assert not values(found, "days")('"3"')


def test_raw_values():
    accepts = one({**STR, "maxLength": 20, "pattern": "^[^<]"})
    assert accepts("a\n</param")
    assert accepts("a\n")
    assert not accepts("<a")
    assert not accepts("a" * 21)
    assert not accepts(f"a{CLOSING}")
    accepts = one({"enum": ["é\n", "b"]})
    assert accepts("é\n")
    assert not accepts('"b"')
    accepts = one({"anyOf": [{**STR, "maxLength": 1}, {"const": "long"}]})
    assert accepts("long")
    assert accepts("")
    assert not accepts("lo")


def test_nested_json_uses_the_separators_of_the_template():
    accepts = one({"type": "array", "items": {"anyOf": [INT, {"type": "object"}, {"const": {"k": [1, 2]}}]}})
    assert accepts('[1, {"a": 2}, {"k": [1, 2]}]')
    assert not accepts('[1,{"a":2}]')


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({**CLOSED, "properties": {"p": {"type": ["string", "integer"]}}}, "/properties/p"),
        ({**CLOSED, "properties": {"p": {"enum": ["a", 1]}}}, "/properties/p"),
        ({**CLOSED, "properties": {"p": {}}}, "/properties/p"),
        ({**CLOSED, "properties": {"p": {"enum": ["a", f"b{CLOSING}c"]}}}, "/properties/p"),
        ({**CLOSED, "properties": {"p": {**STR, "pattern": f"{CLOSING}"}}}, "/properties/p"),
        ({**CLOSED, "properties": {"a>b": INT}}, "/properties/a>b"),
        ({**CLOSED, "properties": {"": INT}}, "/properties/"),
        ({**CLOSED, "properties": {"a\n": INT}}, "/properties/a\n"),
        ({"type": "object", "properties": {"p": INT}}, ""),
        ({**CLOSED, "properties": {"p": INT}, "minProperties": 1}, ""),
        ({"anyOf": [{**CLOSED, "properties": {"p": INT}}, {**CLOSED, "properties": {"q": INT}}]}, ""),
        ({"const": {}}, ""),
        (STR, ""),
        (True, ""),
    ],
)
def test_refusals(schema, pointer):
    with pytest.raises(ToolContractError) as error:
        compile_strict(schema)
    assert (error.value.tool, error.value.pointer) == ("t", pointer)


def test_schema_errors_name_the_tool_field():
    with pytest.raises(UnsupportedSchema) as error:
        compile_strict({**CLOSED, "properties": {"p": {"minimun": 1}}}, field="tools[2].parameters")
    assert error.value.field == "tools[2].parameters"
    assert error.value.pointer == "/properties/p/minimun"
    assert str(error.value).startswith("tools[2].parameters: ")
    with pytest.raises(ConstraintError):
        compile_strict({**CLOSED, "properties": {"p": {"not": INT, "type": "number"}}})


def test_a_delimiter_without_borders_first_occurs_where_the_value_ends():
    assert not any(CLOSING.startswith(CLOSING[i:]) for i in range(1, len(CLOSING)))

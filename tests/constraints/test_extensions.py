"""Keywords beyond the base table, case by case, and where each is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.ir import Grammar
from ninfer.constraints.limits import Work
from ninfer.constraints.multiples import multiples
from ninfer.constraints.numbers import INT64, Bounds
from ninfer.constraints.output import OutputConstraint
from ninfer.constraints.recognise import Machine
from ninfer.errors import ConstraintLimit, UnsatisfiableSchema, UnsupportedSchema

CLOSED = {"type": "object", "additionalProperties": False}
INT, STR, BOOL, OBJ = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}, {"type": "object"}
ABC = {**CLOSED, "properties": {"a": INT, "b": INT, "c": INT}}
EVENT = {
    **CLOSED, "required": ["kind"],
    "properties": {"kind": {"enum": ["card", "cash"]}, "number": STR},
    "if": {"properties": {"kind": {"const": "card"}}, "required": ["kind"]},
    "then": {"required": ["number"]}, "else": {"properties": {"number": False}},
}  # fmt: skip

LANGUAGES = [
    # format
    ({**STR, "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-2-9"', '""']),
    ({**STR, "format": "date-time", "maxLength": 20}, ['"2024-01-01T00:00:00Z"'], ['"2024-01-01T00:00:00.1Z"']),
    ({"format": "ipv4"}, ['"1.2.3.4"', "7"], ['"1.2.3"']),
    ({"enum": ["1.2.3.4", "x", 3], "format": "ipv4"}, ['"1.2.3.4"', "3"], ['"x"']),
    ({**STR, "format": "uuid", "pattern": "^a"}, ['"a0000000-0000-0000-0000-000000000000"'],
     ['"b0000000-0000-0000-0000-000000000000"']),
    # multipleOf
    ({**INT, "multipleOf": 5, "minimum": -10, "maximum": 12}, ["-10", "0", "10"], ["-15", "3", "15", "-0", "5.0"]),
    ({"type": "number", "multipleOf": 100}, ["0", "-200", "9223372036854775800"], ["50", "0.5", "100.0", "-0"]),
    ({"multipleOf": 7, "allOf": [{"multipleOf": 3}], "minimum": 1, "maximum": 50}, ["21", "42", '"x"'], ["7", "63"]),
    ({"enum": [1.0, 2, 4.5, 6], "multipleOf": 2}, ["2", "6"], ["1", "4.5"]),
    # minProperties, maxProperties
    ({**ABC, "minProperties": 2}, ['{"a":1,"c":1}', '{"a":1,"b":1,"c":1}'], ["{}", '{"b":1}']),
    ({**ABC, "maxProperties": 1}, ["{}", '{"b":1}'], ['{"a":1,"b":1}', '{"b":1,"c":1}']),
    ({**ABC, "minProperties": 1, "maxProperties": 2, "required": ["b"]}, ['{"b":1}', '{"a":1,"b":1}', '{"b":1,"c":1}'],
     ["{}", '{"a":1}', '{"a":1,"b":1,"c":1}']),
    ({**OBJ, "minProperties": 1}, ['{"x":1}', '{"x":1,"y":2}'], ["{}"]),
    ({**OBJ, "properties": {"a": INT, "b": INT}, "required": ["a"], "minProperties": 2},
     ['{"a":1,"b":1}', '{"a":1,"z":1}'], ['{"a":1}']),
    ({**OBJ, "properties": {"a": INT}, "maxProperties": 2}, ["{}", '{"a":1,"z":1}', '{"x":1,"y":1}'],
     ['{"a":1,"x":1,"y":1}']),
    ({**OBJ, "maxProperties": 0}, ["{}"], ['{"a":1}']),
    # patternProperties
    ({**CLOSED, "patternProperties": {"^x-": INT}}, ["{}", '{"x-a":1}', '{"x-":1,"x-b":2}'],
     ['{"y":1}', '{"x-a":"s"}']),
    ({**CLOSED, "properties": {"x-1": {"minimum": 5}, "k": STR}, "patternProperties": {"^x-": INT}},
     ['{"x-1":5,"k":"s","x-2":1}'], ['{"x-1":4}', '{"x-1":"s"}', '{"x-2":1,"x-1":5}']),
    ({**OBJ, "patternProperties": {"a": INT, "b": {"minimum": 5}}, "additionalProperties": STR},
     ['{"a":1,"b":"s","ab":5,"c":"s"}'], ['{"ab":4}', '{"ab":"s"}', '{"a":"s"}', '{"b":4}', '{"c":1}']),
    ({**OBJ, "patternProperties": {"^secret": False}}, ['{"x":1}'], ['{"secret":1}', '{"secretx":1}']),
    ({**CLOSED, "minProperties": 1, "patternProperties": {"^\\d+$": BOOL}}, ['{"1":true}'], ["{}", '{"a":true}']),
    ({**CLOSED, "patternProperties": {'^"$': INT}}, ['{"\\"":1}'], ['{""":1}']),
    # dependentRequired
    ({**ABC, "dependentRequired": {"a": ["c"]}}, ['{"a":1,"c":1}', '{"b":1}', '{"c":1}'], ['{"a":1}', '{"a":1,"b":1}']),
    ({**ABC, "dependentRequired": {"a": ["b"], "b": ["c"]}}, ['{"a":1,"b":1,"c":1}', '{"b":1,"c":1}', '{"c":1}'],
     ['{"a":1,"b":1}', '{"b":1}', '{"a":1,"c":1}']),
    ({"dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":2}', '{"x":1}', "3", "{}"], ['{"a":1}', '{"a":1,"x":2}']),
    ({"enum": [{"a": 1}, {"a": 1, "b": 2}, 3], "dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":2}', "3"], ['{"a":1}']),
    # if, then, else
    (EVENT, ['{"kind":"card","number":"1"}', '{"kind":"cash"}'],
     ['{"kind":"card"}', '{"kind":"cash","number":"1"}', "{}"]),
    ({**INT, "if": {"minimum": 10}, "then": {"multipleOf": 10}}, ["3", "20"], ["15"]),
    ({"if": STR, "then": {"maxLength": 1}, "else": {"maximum": 5}}, ['"a"', "5", "null"], ['"ab"', "6"]),
    ({**STR, "then": {"maxLength": 1}}, ['"ab"'], ["1"]),
    # not
    ({**STR, "not": {"enum": ["a", "b"]}}, ['"c"', '""', '"aa"'], ['"a"', '"b"', "1"]),
    ({**STR, "not": {"pattern": "^x"}, "maxLength": 2}, ['"ax"', '""'], ['"x"', '"xa"', '"aaa"']),
    ({**INT, "not": {"const": 3}, "minimum": 2, "maximum": 4}, ["2", "4"], ["3", "1"]),
    ({"type": "number", "not": {"const": 0.5}}, ["0.25", "0.5000001", "1"], ["0.5", "5e-1", "0.50"]),
    ({**OBJ, "properties": {"a": INT}, "not": {"required": ["a"]}}, ["{}", '{"b":1}'], ['{"a":1}']),
    ({**ABC, "not": {"anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}]}}, ['{"a":1}', '{"b":1}', "{}"],
     ['{"a":1,"b":1}', '{"c":1}']),
    ({**STR, "not": {"minLength": 3}}, ['"ab"', '""'], ['"abc"']),
    ({**STR, "not": {"maxLength": 2}}, ['"abc"'], ['"ab"']),
    ({"type": "array", "items": INT, "not": {"maxItems": 1}}, ["[1,2]"], ["[1]", "[]"]),
    ({"type": "array", "items": INT, "not": {"prefixItems": [{"const": 1}]}}, ["[2]", "[2,1]"], ["[1]", "[]", "[1,2]"]),
    ({"type": "array", "items": INT, "not": {"items": False}}, ["[2]"], ["[]"]),
    ({"type": ["integer", "null"], "not": {"type": "null"}}, ["1"], ["null"]),
    ({**BOOL, "not": {"const": True}}, ["false"], ["true"]),
    ({"enum": [1, 1.5, "x", [1]], "not": {"type": "integer"}}, ["1.5", '"x"', "[1]"], ["1"]),
    ({"enum": [[1], ["a"]], "not": {"items": INT}}, ['["a"]'], ["[1]"]),
    ({**INT, "not": {"oneOf": [{"const": 1}, {"const": 2}]}}, ["3"], ["1", "2"]),
    ({**INT, "not": {"if": {"minimum": 5}, "then": {"maximum": 7}, "else": {"maximum": 2}}}, ["3", "8"], ["1", "6"]),
    ({**OBJ, "properties": {"a": {}, "b": {}}, "not": {"dependentRequired": {"a": ["b"]}}}, ['{"a":1}'],
     ["{}", '{"a":1,"b":1}', '{"b":1}']),
    # uniqueItems
    ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True, "minItems": 1},
     ['["a"]', '["b",1,"a"]'], ["[]", '["a","a"]', '["a","b","a"]', '["c"]']),
    ({"type": "array", "items": BOOL, "uniqueItems": True}, ["[true,false]", "[]"], ["[true,true]"]),
    ({"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, ["[7]"], ["[7,8]"]),
    ({"type": "array", "prefixItems": [{"enum": [1, 2]}, {"enum": [2, 3]}], "items": False, "uniqueItems": True},
     ["[1,2]", "[2,3]", "[2]"], ["[2,2]", "[3]"]),
    ({"type": "array", "items": INT, "uniqueItems": False}, ["[1,1]"], []),
    ({"enum": [[1, 2], [1, 1.0], ["a", "a"]], "uniqueItems": True}, ["[1,2]"], ["[1,1]", '["a","a"]']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "yes", "no"), LANGUAGES, ids=[json.dumps(c[0])[:70] for c in LANGUAGES])
def test_languages(schema, yes, no):
    constraint = OutputConstraint.json_schema(schema)
    assert [t for t in yes if not constraint.accepts(t)] == []
    assert [t for t in no if constraint.accepts(t)] == []


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({**STR, "format": "email"}, "/format"),
        ({**STR, "format": "Date"}, "/format"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
        ({"items": {**OBJ, "minProperties": 2}}, "/items/minProperties"),
        ({**CLOSED, "patternProperties": {"a(?=b)": INT}}, "/patternProperties/a(?=b)"),
        ({**CLOSED, "patternProperties": {"a": INT}, "required": ["a"]}, "/required/0"),
        ({"type": "array", "items": {"enum": [1, 2]}, "not": {"uniqueItems": True}}, "/not/uniqueItems"),
        ({"type": "array", "items": INT, "uniqueItems": True}, "/uniqueItems"),
        ({"type": "number", "not": INT}, "/not/type"),
        ({"type": "array", "not": {"items": INT}}, "/not/items"),
        ({**OBJ, "not": {"additionalProperties": INT}}, "/not/additionalProperties"),
        ({**OBJ, "not": {"patternProperties": {"a": INT}}}, "/not/patternProperties"),
        ({**OBJ, "not": {"const": {}}}, "/not/const"),
        ({"type": "array", "if": {"items": INT}, "else": {"maxItems": 1}}, "/if/items"),
    ],
    ids=str,
)
def test_refused(schema, pointer):
    with pytest.raises(UnsupportedSchema) as error:
        OutputConstraint.json_schema(schema).check()
    assert error.value.pointer == pointer


@pytest.mark.parametrize(
    "schema",
    [
        {**ABC, "minProperties": 4},
        {**ABC, "required": ["a", "b"], "maxProperties": 1},
        {**INT, "multipleOf": 10, "minimum": 11, "maximum": 19},
        {**STR, "format": "ipv4", "maxLength": 6},
        {**STR, "not": {"pattern": ""}},
        {"not": {}},
        {**BOOL, "not": {"enum": [True, False]}},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3},
        {**ABC, "required": ["a"], "dependentRequired": {"a": ["b"]}, "not": {"required": ["b"]}},
    ],
    ids=str,
)
def test_unsatisfiable(schema):
    with pytest.raises(UnsatisfiableSchema):
        OutputConstraint.json_schema(schema).check()


def test_states_are_bounded():
    for schema, limit, pointer in (
        ({"items": {"enum": list(range(13))}, "uniqueItems": True}, "unique", "/uniqueItems"),
        ({**OBJ, "maxProperties": 16_385}, "members", "/maxProperties"),
        ({"items": {"type": "integer"}, "maxItems": 65_537}, "items", None),
        ({**INT, "multipleOf": 999_983}, "states", None),
    ):
        with pytest.raises(ConstraintLimit) as error:
            OutputConstraint.json_schema(schema).check()
        assert error.value.limit == limit
        assert pointer in (None, error.value.pointer)
    OutputConstraint.json_schema({"items": {"enum": list(range(12))}, "uniqueItems": True}).check()
    OutputConstraint.json_schema({**OBJ, "maxProperties": 1000}).check()


@given(low=st.integers(-130, 130), size=st.integers(0, 130), divisor=st.sampled_from([2, 3, 4, 7, 10, 12, 20, 50, 100]))
def test_multiples_of_small_ranges(low, size, divisor):
    machine = Machine(Grammar({"root": multiples(Bounds(low=low, high=low + size), divisor, Work())}))
    for x in range(low - 25, low + size + 26):
        assert machine.accepts(str(x)) == (low <= x <= low + size and x % divisor == 0)
    assert not machine.accepts("-0")
    assert not machine.accepts("00")


@given(data=st.data(), divisor=st.sampled_from([2, 3, 7, 25, 30, 1000]))
def test_multiples_of_any_int64(data, divisor):
    bound = st.one_of(st.integers(*INT64), st.sampled_from([None, INT64[0], INT64[1], 0]))
    low, high = data.draw(bound), data.draw(bound)
    machine = Machine(Grammar({"root": multiples(Bounds(low=low, high=high), divisor, Work())}))
    for _ in range(20):
        x = data.draw(st.integers(INT64[0] - 100, INT64[1] + 100))
        x = data.draw(st.sampled_from([x, x - x % divisor, low or x, high or x, (high or x) + 1, (low or x) - 1]))
        inside = (INT64[0] if low is None else low) <= x <= (INT64[1] if high is None else high)
        assert machine.accepts(str(x)) == (inside and INT64[0] <= x <= INT64[1] and x % divisor == 0)

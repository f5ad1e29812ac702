"""The language of every kind of constraint, case by case: texts accepted, texts rejected, constraints refused."""

from __future__ import annotations

import json

import pytest

from ninfer.constraints.output import OutputConstraint
from ninfer.errors import (
    ConstraintLimit,
    InvalidChoice,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    UnsatisfiableSchema,
    UnsupportedSchema,
)

CLOSED = {"type": "object", "additionalProperties": False}
INT, STR, BOOL = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
DRAFT_07 = {"$schema": "http://json-schema.org/draft-07/schema#"}
S64 = 2**63


def check(constraint, yes, no):
    assert [t for t in yes if not constraint.accepts(t)] == []
    assert [t for t in no if constraint.accepts(t)] == []


@pytest.mark.parametrize(
    ("texts", "yes", "no"),
    [
        (["ok", "error"], ["ok", "error"], ["o", "OK", "ok ", ""]),
        (["a", "ab"], ["a", "ab"], ["b", "aba"]),
        (["", "x"], ["", "x"], ["xx"]),
        (["é中😀\n"], ["é中😀\n"], ["e\u0301中😀\n", "é中😀"]),
    ],
)
def test_choice(texts, yes, no):
    check(OutputConstraint.choice(texts), yes, no)


def test_a_choice_is_a_set():
    assert OutputConstraint.choice(["b", "a", "b"]) == OutputConstraint.choice(("a", "b"))
    for texts, index in (([], None), ("ab", None), (["\ud800"], 0), (["a", 3], 1)):
        with pytest.raises(InvalidChoice) as error:
            OutputConstraint.choice(texts)
        assert error.value.index == index
    OutputConstraint.choice([str(i) for i in range(10_000)]).check()
    with pytest.raises(ConstraintLimit):
        OutputConstraint.choice([str(i) for i in range(10_001)])


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", [""], ["a"]),
        ("a.b", ["axb", "a😀b"], ["a\nb", "a\u2028b"]),
        (r"\d+", ["19"], ["١٢", ""]),
        (r"\w", ["_"], ["é"]),
        (r"\s", ["\u3000", "\ufeff", "\t"], ["x"]),
        ("^a$|^b$", ["a", "b"], ["ab"]),
        ("a{2,3}?", ["aa", "aaa"], ["a", "aaaa"]),
        ("x(?:yz*)?", ["x", "xy", "xyzz"], ["xz"]),
        ("[^a]", ["é", "\n"], ["a", b"\xed\xa0\x80", "\ud800"]),
        (r"\x41\u4e2d\/\-", ["A中/-"], ["A中/"]),
    ],
)
def test_regex(pattern, yes, no):
    check(OutputConstraint.regex(pattern), yes, no)


@pytest.mark.parametrize(
    ("pattern", "offset"),
    [
        (r"(a)\1", 3), ("(?=a)", 0), ("(?<!a)b", 0), (r"\bx", 0), (r"\p{L}", 0), ("(?i)a", 0), ("a^b", 1), (r"\q", 0),
        (r"\ud83d\ude00", 0), ("[z-a]", 1), ("a{3,1}", 1), ("a**", 2), ("(", 0), ("[]", 0),
    ],
)  # fmt: skip
def test_regex_refusals(pattern, offset):
    with pytest.raises(InvalidRegex) as error:
        OutputConstraint.regex(pattern).check()
    assert error.value.offset == offset


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ('root ::= "status=" ("ok" | "error") "\\n"', ["status=ok\n", "status=error\n"], ["status=ok"]),
        ("root ::= [0-9]+", ["1", "12"], [""]),
        ('root ::= "(" root ")" | "x"', ["((x))"], ["((x)"]),
        ('root ::= root "a" | ""', ["", "aaa"], []),
        ("root ::= [^a]", ["中"], ["a", b"\xed\xa0\x80"]),
        ('a ::= "x"* (= "b")\nroot ::= a "b"', ["xb", "b"], ["x"]),
        ('a ::= "x"* (= "c")\nroot ::= a "b"', ["xb"], []),
        ('root ::= ([^"\\\\] | "\\\\" ["\\\\n])*', ["", 'a\\n\\"'], ['"', "\\x"]),
        ('root ::= "<|im_end|>"', ["<|im_end|>"], [""]),
    ],
)
def test_grammar(text, yes, no):
    check(OutputConstraint.grammar(text), yes, no)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("root ::= x", 1, 10), ('root ::= "é" ;', 1, 14), ('root ::= "a"\nroot ::= "b"', 2, 1), ('a ::= "b"', 1, 1),
        ('root ::= "a" |', 1, 15), ('root ::= Regex("a")', 1, 10), ("root ::= TagDispatch()", 1, 10),
        ("root ::= TokenTagDispatch()", 1, 10), ("root ::= Substring()", 1, 10), ("root ::= Foo(1)", 1, 10),
        ('root[temperature=0.1] ::= "a"', 1, 5), ('root[max_tokens=3] ::= "a"', 1, 5), ('root[lazy] ::= "a"', 1, 5),
        ('root ::= "\\ud800"', 1, 11), ('root ::= "\\U00110000"', 1, 11), ("root ::= [\\d]", 1, 11),
        ('root ::= "a"{99999999999}', 1, 14), ('root ::= "\0"', 1, 11),
    ],
)  # fmt: skip
def test_grammar_refusals(text, line, column):
    with pytest.raises(InvalidGrammar) as error:
        OutputConstraint.grammar(text).check()
    assert (error.value.line, error.value.column) == (line, column)


def test_a_grammar_without_text_is_unsatisfiable():
    with pytest.raises(UnsatisfiableSchema):
        OutputConstraint.grammar("root ::= root").check()


def test_json_object():
    check(OutputConstraint.json_object(), ["{}", '{"a":[1,null]}'], ["[]", "1", "{ }", '{"a": 1}'])


AB = {**CLOSED, "properties": {"a": INT, "b": INT}, "required": ["a"]}
LIST_NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {**CLOSED, "properties": {"v": INT, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]},
    },
}
SHAPES = {"oneOf": [
    {**CLOSED, "properties": {"k": {"const": k}, k: INT}, "required": ["k", k]} for k in ("a", "b")
]}  # fmt: skip

LANGUAGES = [
    # root and spelling
    ({}, ["null", '"x"', '[1,{"a":true}]', "-1.5e3"], ["01", "1.", "-0", "1e400", "[1, 2]"]),
    (True, ["null", "{}"], ["nul"]),
    (STR, ['"\\n"', '"é"', '"\\u0001"', '""'],
     ['"\n"', '"\\u00e9"', '"\\/"', '"\\ud800"', b'"\xed\xa0\x80"', '"\\u000A"', '"', "x"]),
    ({"type": ["string", "null"], "minLength": 2}, ["null", '"ab"'], ['"a"', "1"]),
    ({"minLength": 3}, ["1", '"abc"'], ['"ab"']),
    (BOOL, ["true", "false"], ["null"]),
    ({"type": "null"}, ["null"], ["true"]),
    # objects
    (AB, ['{"a":1}', '{"a":1,"b":2}'], ['{"b":2,"a":1}', '{"b":2}', '{"a":1,"c":3}', '{"a":1,"a":2}', "{}"]),
    ({"type": "object", "properties": {"a": INT}}, ['{"a":1,"z":[]}', '{"z":1}', "{}", '{"aa":1,"":2}'],
     ['{"a":"x"}', '{"z":1,"a":1}', '{"\\u0061":1}', '{"\\u0061":"x"}', '{"a":1,}']),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": STR}, ['{"a":1,"z":"q"}'], ['{"z":1}']),
    ({**CLOSED, "properties": {"a": False}}, ["{}"], ['{"a":1}']),
    ({**CLOSED, "properties": {'é"x': INT}}, ['{"é\\"x":1}'], ['{"\\u00e9\\"x":1}']),
    # arrays
    ({"type": "array", "items": INT, "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]", "[1,]"]),
    ({"type": "array", "prefixItems": [INT, STR]}, ["[]", "[1]", '[1,"a"]', '[1,"a",null]'], ['["a"]']),
    ({"type": "array", "prefixItems": [INT, STR], "items": False}, ['[1,"a"]'], ['[1,"a",3]']),
    ({"type": "array", "prefixItems": [INT, STR], "items": BOOL, "minItems": 1, "maxItems": 3},
     ['[1,"a",true]', "[1]"], ['[1,"a",3]', '[1,"a",true,true]', "[]"]),
    ({"type": "array", "prefixItems": [INT, False]}, ["[]", "[1]"], ["[1,2]"]),
    ({**DRAFT_07, "type": "array", "items": [INT, STR], "additionalItems": BOOL}, ['[1,"a",true]'], ['[1,"a",3]']),
    # strings
    ({**STR, "minLength": 2, "maxLength": 3}, ['"ab"', '"\\n\\n"', '"😀😀"', '"\\"\\\\x"'],
     ['"a"', '"abcd"', '"\\n\\n\\n\\n"']),
    ({**STR, "maxLength": 0}, ['""'], ['"a"']),
    ({**STR, "maxLength": 500}, ['"' + "中" * 500 + '"', '"' + "a" * 499 + '\\n"'],
     ['"' + "中" * 501 + '"', '"' + "a" * 500 + '\\n"']),
    ({**STR, "pattern": "b"}, ['"abc"'], ['"ac"']),
    ({**STR, "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"']),
    ({**STR, "pattern": "^[a-z]+$", "maxLength": 3}, ['"abc"'], ['"abcd"', '""']),
    ({**STR, "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]}, ['"az"', '"abcz"'], ['"a"']),
    ({**STR, "pattern": '^"\n$'}, ['"\\"\\n"'], ['""\n"', '"\\"\n"']),
    ({**STR, "pattern": "^\\s$"}, ['"\\t"', '"\u3000"'], ['"\\u0020"', '"\t"']),
    # numbers
    ({**INT, "minimum": 0, "maximum": 10}, ["0", "10"], ["-1", "11", "5.0", "1e1", "-0", "007"]),
    ({**INT, "minimum": 0.5, "maximum": 10.7}, ["1", "10"], ["0", "11"]),
    ({**INT, "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
    (INT, [str(-S64), str(S64 - 1)], [str(S64), str(-S64 - 1)]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "1", "0.5", "1e-3", "5E-1", "1.0"],
     ["1.5", "-0.1", "1.0000001", "1e1"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.9999999999999999", "5e-324"],
     ["0.0", "1e-400", "0.99999999999999999"]),
    ('{"type":"number","minimum":1e300}', ["1e300", "1.5e300"], ["9e299", "1e309"]),
    ({"type": "number", "minimum": 0.1, "maximum": 0.3}, ["0.1", "0.3", "0.2999"],
     ["0.30000000000000001", "0.123456789012345678", "0.31"]),
    ({"type": "number", "minimum": 9007199254740993}, ["9007199254740993", "9007199254740994.0"],
     ["9007199254740992.0", "9007199254740992", "9.007199254740992e15"]),
    # finite values
    ({"enum": ["a", "bb", "ccc"], "minLength": 2}, ['"bb"', '"ccc"'], ['"a"']),
    ({"enum": [1, 2, 3], "minimum": 2}, ["2", "3"], ["1"]),
    ({"enum": ["a", 1], **INT}, ["1"], ['"a"']),
    ({"const": {"b": 1, "a": [None]}}, ['{"b":1,"a":[null]}'], ['{"a":[null],"b":1}']),
    ({"const": {"type": "bogus", "minimum": "x"}}, ['{"type":"bogus","minimum":"x"}'], []),
    ('{"enum":[1.0,-0.0,1e5,0.10,1e300,1.5E-9]}', ["1", "0", "100000", "0.1", "1e300", "1.5e-9"], ["1.0", "-0"]),
    ({"const": {"a": 1, "b": 2}, "enum": [{"b": 2, "a": 1}]}, ['{"a":1,"b":2}'], ['{"b":2,"a":1}']),
    ({"enum": [1, "x"], "const": 1.0}, ["1"], ['"x"', "1.0"]),
    ({"type": ["number", "integer"]}, ["1.5", "1"], ['"x"']),
    # composition and references
    ({**INT, "anyOf": [{"minimum": 5}, {"maximum": 1}]}, ["6", "0"], ["3", '"x"']),
    ({**STR, "anyOf": [{"maxLength": 2}, {"minLength": 4}]}, ['"ab"', '"abcd"'], ['"abc"', "3"]),
    ({"allOf": [INT, {"minimum": 5}]}, ["7"], ["3", '"x"']),
    ({"allOf": [{**CLOSED, "properties": {"a": INT}}, {"properties": {"b": INT}}]}, ["{}", '{"a":1}'],
     ['{"b":1}', '{"a":1,"b":1}']),
    ({"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]},
                {"type": "object", "properties": {"b": STR}, "required": ["b"]}]},
     ['{"a":1,"b":"x"}'], ['{"b":"x","a":1}', '{"a":1}']),
    ({"type": "array", "allOf": [{"prefixItems": [{**INT, "minimum": 3}]}, {"items": {**INT, "minimum": 5}}]},
     ["[5]", "[5,5]"], ["[3,5]"]),
    ({"oneOf": [INT, STR]}, ["1", '"x"'], ["null", "1.5"]),
    (SHAPES, ['{"k":"a","a":1}', '{"k":"b","b":1}'], ['{"k":"a","b":1}', '{"k":"b","a":1}']),
    ({"$ref": "#/$defs/i", "minimum": 5, "$defs": {"i": INT}}, ["5"], ["4", '"x"']),
    (LIST_NODE, ['{"v":1}', '{"v":1,"next":{"v":2,"next":{"v":3}}}'], ['{"v":1,"next":{}}']),
    ({"title": 3, "description": [], "default": {"type": 1}, "examples": 7, "$comment": {}, "readOnly": "x",
      "writeOnly": None, "deprecated": 1, "$id": "urn:x", **INT}, ["1"], ["null"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "yes", "no"), LANGUAGES, ids=[json.dumps(c[0])[:60] for c in LANGUAGES])
def test_schema_languages(schema, yes, no):
    check(OutputConstraint.json_schema(schema), yes, no)


def test_sixty_optional_fields():
    names = [f"field{i}" for i in range(60)]
    schema = {**CLOSED, "properties": dict.fromkeys(names, INT)}
    constraint = OutputConstraint.json_schema(schema)
    for chosen in (names, names[::2], names[5:9], names[59:], []):
        text = json.dumps(dict.fromkeys(chosen, 1), separators=(",", ":"))
        assert constraint.accepts(text)
    assert not constraint.accepts('{"field3":1,"field2":1}')


UNSATISFIABLE = [
    (False, ""),
    ({**CLOSED, "properties": {"a": False}, "required": ["a"]}, "/properties/a"),
    ({**CLOSED, "properties": {}, "required": ["x"]}, None),
    ({"type": "array", "prefixItems": [INT, False], "minItems": 2}, "/prefixItems/1"),
    ({**STR, "minLength": 3, "maxLength": 2}, ""),
    ({**INT, "minimum": 5, "maximum": 3}, ""),
    ({"type": "number", "minimum": 5, "maximum": 3}, ""),
    ({**INT, "minimum": 0.2, "maximum": 0.8}, ""),
    ({"const": "abc", "maxLength": 1}, ""),
    ({"allOf": [{**CLOSED, "properties": {"a": INT}}, {"properties": {"b": INT}, "required": ["b"]}]}, None),
    ({"$ref": "#/$defs/n", "$defs": {"n": {**CLOSED, "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}},
     None),
    ({**STR, "pattern": "^a", "allOf": [{"pattern": "^b"}]}, None),
    ({"type": "object", "properties": {"x": {"type": "object", "properties": {"y": {"enum": [1], "type": "string"}},
                                             "required": ["y"]}}, "required": ["x"]}, "/properties/x/properties/y"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "pointer"), UNSATISFIABLE, ids=[json.dumps(c[0])[:60] for c in UNSATISFIABLE])
def test_unsatisfiable(schema, pointer):
    with pytest.raises(UnsatisfiableSchema) as error:
        OutputConstraint.json_schema(schema).check()
    assert pointer in (None, error.value.pointer)


REFUSED_KEYWORDS = {
    "dependentSchemas": {"a": {}}, "dependencies": {"a": ["b"]}, "contains": INT, "minContains": 1, "maxContains": 1,
    "propertyNames": {"maxLength": 1}, "unevaluatedItems": False, "unevaluatedProperties": False, "$anchor": "a",
    "$dynamicRef": "#a", "$dynamicAnchor": "a", "$recursiveRef": "#", "$vocabulary": {}, "contentEncoding": "base64",
    "contentMediaType": "text/plain", "contentSchema": {},
}  # fmt: skip

UNSUPPORTED = [
    ({"type": "object", "required": ["x"]}, "/required/0"),
    ({**STR, "format": "email"}, "/format"),
    ({**STR, "pattern": "(?=a)b"}, "/pattern"),
    ({**INT, "minimum": S64}, None),
    ('{"minimum":0.30000000000000001}', "/minimum"),
    ('{"const":18446744073709551615}', "/const"),
    ('{"enum":[1,0.1234567890123456789]}', "/enum/1"),
    ({"type": "number", "multipleOf": 0.01}, "/multipleOf"),
    ({"oneOf": [INT, {"type": "number"}]}, "/oneOf"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "/oneOf"),
    ({"oneOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2.0, "a": 1}}]}, "/oneOf"),
    ({"oneOf": [{"const": 5}, {"type": "integer", "minimum": 5}]}, "/oneOf"),
    ({"oneOf": [{"const": 5, "title": "a"}, {"const": "x"}, {"type": "object"}, {"minimum": 6}]}, "/oneOf"),
    ({**DRAFT_07, "$ref": "#/definitions/i", "minimum": 5, "definitions": {"i": INT}}, "/minimum"),
    ({"$ref": "https://example.com/x"}, "/$ref"),
    ({"$ref": "#anchor"}, "/$ref"),
    ({"$ref": "other.json#/a"}, "/$ref"),
    ({"properties": {"a": {"$id": "urn:y"}}}, "/properties/a/$id"),
    ({**INT, "minimun": 5}, "/minimun"),
    ({"$schema": "https://json-schema.org/draft/2019-09/schema"}, "/$schema"),
    ({"properties": {"a/b": {"not-a-keyword": 1}}}, "/properties/a~1b/not-a-keyword"),
    ({"discriminator": {"propertyName": "k"}}, "/discriminator"),
    *(({keyword: value}, f"/{keyword}") for keyword, value in REFUSED_KEYWORDS.items()),
]


@pytest.mark.parametrize(("schema", "pointer"), UNSUPPORTED, ids=[json.dumps(c[0])[:60] for c in UNSUPPORTED])
def test_unsupported(schema, pointer):
    with pytest.raises(UnsupportedSchema) as error:
        OutputConstraint.json_schema(schema).check()
    assert pointer in (None, error.value.pointer)
    if pointer == "/oneOf":
        assert len(error.value.related) == 2
        assert all(p.startswith("/oneOf/") for p in error.value.related)
    if pointer == "/pattern":
        assert error.value.__cause__.offset == 0


INVALID = [
    ({"enum": []}, "/enum"),
    ({"$ref": "#/$defs/none"}, "/$ref"),
    ({"$ref": "#/properties", "properties": {}}, "/$ref"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}}, "/$defs/a"),
    ({"allOf": [{"$ref": "#"}]}, None),
    ({"type": "foo"}, "/type"),
    ({"type": []}, "/type"),
    ({"type": ["string", "string"]}, "/type/1"),
    ({"required": "a"}, "/required"),
    ({"required": ["a", 1]}, "/required/1"),
    ({"maxLength": -1}, "/maxLength"),
    ({"minLength": 2.5}, "/minLength"),
    ({"minimum": "1"}, "/minimum"),
    ({"properties": []}, "/properties"),
    ({"properties": {"a": 1}}, "/properties/a"),
    ({"items": [INT]}, "/items"),
    ({"anyOf": []}, "/anyOf"),
    ({"pattern": 1}, "/pattern"),
    ({"multipleOf": 0}, "/multipleOf"),
    ([], ""),
]


@pytest.mark.parametrize(("schema", "pointer"), INVALID, ids=[json.dumps(c[0])[:60] for c in INVALID])
def test_invalid(schema, pointer):
    with pytest.raises(InvalidSchema) as error:
        OutputConstraint.json_schema(json.dumps(schema)).check()
    assert pointer in (None, error.value.pointer)


@pytest.mark.parametrize(
    ("text", "line", "column"), [("{bad", 1, 2), ('{"type":"integer",\n"type":"string"}', 2, 1), ('{"a":1', 1, 7)]
)
def test_text_that_is_not_json(text, line, column):
    with pytest.raises(InvalidSchema) as error:
        OutputConstraint.json_schema(text).check()
    assert (error.value.line, error.value.column) == (line, column)


def test_minimum_of_an_integral_count():
    check(OutputConstraint.json_schema('{"type":"string","minLength":2.0}'), ['"ab"'], ['"a"'])


def test_limits_just_below_and_above():
    deep = []
    for _ in range(255):
        deep = [deep]
    OutputConstraint.json_schema({"const": deep}).check()
    with pytest.raises(ConstraintLimit) as error:
        OutputConstraint.json_schema({"properties": {"a": {"const": [deep]}}}).check()
    assert (error.value.limit, error.value.pointer) == ("depth", "/properties/a/const")
    pattern = {**STR, "pattern": "a.*b.*c"}
    OutputConstraint.json_schema({**pattern, "maxLength": 8192}).check()
    with pytest.raises(ConstraintLimit) as error:
        OutputConstraint.json_schema({"items": {**pattern, "maxLength": 8193}}).check()
    assert (error.value.limit, error.value.pointer) == ("length", "/items/pattern")
    lows = {"anyOf": [{**INT, "minimum": 1000 + i} for i in range(128)]}
    highs = {"anyOf": [{**INT, "maximum": 873 + i} for i in range(128)]}
    check(OutputConstraint.json_schema({"allOf": [lows, highs]}), ["1000"], ["1001", "999"])
    one_more = {"type": "array", "prefixItems": [{"allOf": [INT, {**INT, "minimum": 0}]}, {"allOf": [lows, highs]}]}
    with pytest.raises(ConstraintLimit) as error:
        OutputConstraint.json_schema(one_more).check()
    assert error.value.limit == "intersections"

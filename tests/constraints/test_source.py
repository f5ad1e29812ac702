"""The source reader against the standard library, and its places."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints.source import read, text_of
from ninfer.errors import ConstraintLimit, InvalidSchema

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)


@given(value=values, indent=st.sampled_from([None, 2]), ascii=st.booleans())
def test_reads_what_the_standard_library_writes(value, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    node = read(text)
    assert node.plain() == value
    for inner in node.walk():
        at = value
        for token in inner.pointer.split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            at = at[int(name)] if isinstance(at, list) else at[name]
        assert inner.plain() == at


@given(st.text('{}[]",:0123456789.eE+-truefalsn \\u\n', max_size=25))
def test_accepts_exactly_strict_json(text):
    def unique(pairs):
        if len({k for k, _ in pairs}) < len(pairs):
            raise ValueError
        return dict(pairs)

    def no_constant(_):
        raise ValueError

    try:
        expected = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
        json.dumps(expected, ensure_ascii=False).encode()
    except ValueError:
        with pytest.raises(InvalidSchema):
            read(text)
    else:
        read(text)


def test_order_number_spelling_and_places_survive():
    node = read('{"b": 1.0,\n "a~/x": [0.30000000000000001, 1e400]}')
    assert list(node.value) == ["b", "a~/x"]
    assert node.get("b").text == "1.0"
    assert node.get("a~/x").value[0].value == Decimal("0.30000000000000001")
    assert node.get("a~/x").value[1].pointer == "/a~0~1x/1"
    assert node.get("zzz") is None


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("{bad", 1, 2), ('{"a":1,\n "a":2}', 2, 2), ("[1,]", 1, 4), ('{"a" 1}', 1, 6), ("[1] x", 1, 5), ("", 1, 1),
        ("NaN", 1, 1), ("-", 1, 1), ("01", 1, 2), (r'"\ud800"', 1, 1), ("\ufeff1", 1, 1), ('["\n"]', 1, 3),
        ("[1", 1, 3),
    ],
)  # fmt: skip
def test_refusals_name_line_and_column(text, line, column):
    with pytest.raises(InvalidSchema) as error:
        read(text)
    assert (error.value.line, error.value.column) == (line, column)


def test_sources_of_every_form():
    class Model:
        @staticmethod
        def model_json_schema():
            return {"type": "object"}

    assert text_of({"b": 1, "a": True}) == '{"b": 1, "a": true}'
    assert text_of(b"{}") == "{}"
    assert text_of(Model) == '{"type": "object"}'
    assert text_of(True) == "true"
    for bad in (3, {"a": float("nan")}, {"a": object()}, b"\xff"):
        with pytest.raises(InvalidSchema):
            text_of(bad)


def test_limits():
    with pytest.raises(ConstraintLimit):
        read("[" * 100_000)
    with pytest.raises(ConstraintLimit):
        read('"' + "x" * (1 << 20) + '"')
    with pytest.raises(ConstraintLimit):
        read("1" * 5000)

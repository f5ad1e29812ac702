"""Bodies are read without losing anything, and places of errors are told in the caller's words."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import ContextOverflow, InvalidRequest, ToolContractError, UnsupportedSchema
from ninfer.gateway.http.body import parse, schema_text
from ninfer.gateway.http.errors import ApiError, api_error, protocol_path

spelled = st.one_of(
    st.integers().map(str),
    st.decimals(allow_nan=False, allow_infinity=False).map(lambda number: f"{number:e}"),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})\.[0-9]{1,20}", fullmatch=True),
)
plain = st.none() | st.booleans() | st.text(st.characters(exclude_categories=["Cs"]))
documents = st.recursive(
    plain.map(json.dumps) | spelled,
    lambda inside: (
        st.lists(inside).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inside).map(
            lambda members: "{" + ", ".join(f"{json.dumps(name)}: {item}" for name, item in members.items()) + "}"
        )
    ),
    max_leaves=20,
)


def exact(text):
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


@given(documents)
def test_a_schema_is_passed_on_as_it_was_written(document):
    body = parse(f'{{"a": {document}}}'.encode())
    assert exact(schema_text(body["a"])) == exact(document)


@given(st.binary(max_size=40))
def test_other_bytes_are_a_json_object_or_refused(raw):
    try:
        expected = json.loads(raw.decode())
    except (ValueError, RecursionError):
        expected = None
    if isinstance(expected, dict):
        assert parse(raw) == expected
    else:
        with pytest.raises(ApiError) as caught:
            parse(raw)
        assert caught.value.status == 400


@pytest.mark.parametrize("raw", [b'{"a": 1, "a": 1}', b'{"b": [{"a": 1, "a": 2}]}'])
def test_a_name_that_occurs_twice(raw):
    with pytest.raises(ApiError, match="'a' occurs twice"):
        parse(raw)


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (InvalidRequest("x", field="messages[1].content"), "input[3].content"),
        (InvalidRequest("x", field="messages[12].content"), "messages[12].content"),
        (InvalidRequest("x", field="temperature"), "temperature"),
        (ToolContractError("x", tool="f", pointer="/parameters/properties/a b", field="tools[0]"),
         "tools[0].input_schema.properties['a b']"),
        (UnsupportedSchema("x", pointer="/anyOf/1/x~1y").within("tools[0].parameters"),
         "tools[0].input_schema.anyOf[1]['x/y']"),
        (UnsupportedSchema("x", pointer="/a"), "text.format.schema.a"),
        (ContextOverflow(9, 8), "input"),
    ],
)  # fmt: skip
def test_places_are_told_in_the_callers_words(error, path):
    paths = {"messages[1]": "input[3]", "tools[0].parameters": "tools[0].input_schema", "prompt": "input",
             "constraint": "text.format.schema"}  # fmt: skip
    assert protocol_path(error, paths) == path
    assert api_error(error, paths).path == path

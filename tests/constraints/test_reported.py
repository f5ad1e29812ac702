"""What has broken in other constrained decoders: bounds that cost too much, descriptions that change the language,
white space that is demanded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.constraints import OutputConstraint, language
from ninfer.constraints.insides import ContentIndex
from ninfer.constraints.service import ConstraintService, LanguagePlan
from ninfer.constraints.vocab import TokenIndex
from ninfer.errors import ConstraintLimit

STR = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {**STR, "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"type": "object", "properties": {"city": STR}, "required": ["city"], "additionalProperties": False},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def open_matcher(index, constraint):
    service = ConstraintService(index.classes, 1 << 24)
    return service.open(LanguagePlan(constraint.kind, constraint, lambda: language(constraint))).matcher


def legal(matcher) -> set[int]:
    slots = np.zeros((1, matcher.nbytes // 4), np.uint32)
    matcher.lookahead((), slots)
    return set(np.flatnonzero(np.unpackbits(slots.view(np.uint8), bitorder="little")).tolist())


def write(matcher, data: bytes) -> list[set[int]]:
    """Byte by byte; the mask before each."""
    masks = []
    for byte in data:
        masks.append(legal(matcher))
        assert byte in masks[-1]
        matcher.preview([byte])
        matcher.commit()
    return masks


def test_a_length_bound_makes_no_mask_dearer(byte_index, monkeypatch):
    """A mask inside a string is looked up once for all places that are as far from both bounds as any token reaches,
    so the work does not grow with the bound."""
    made: list[object] = []
    keep = ContentIndex.keep

    def counted(self, key, make):
        return keep(self, key, lambda: (made.append(key), make())[1])

    monkeypatch.setattr(ContentIndex, "keep", counted)
    work = []
    for bound in (128, 512, 100_000):
        index = TokenIndex(byte_index.classes)
        made.clear()
        masks = write(open_matcher(index, OutputConstraint.json_schema({**STR, "maxLength": bound})), b'"' + b"a" * 100)
        assert all(mask == masks[1] for mask in masks[2:])
        work.append(len(made))
    assert work[0] == work[1] == work[2] <= 8


SWEEP = sorted({2**k + d for k in range(1, 14) for d in (-1, 0, 1) if 2**k + d <= 8192})


@pytest.mark.parametrize("bounds", [[1, 2, 64, 1998, 2000, 8192], pytest.param(SWEEP, marks=pytest.mark.full)])
@pytest.mark.parametrize("keyword", ["maxLength", "minLength", "maxItems", "minItems"])
def test_every_bound_compiles_and_is_kept(keyword, bounds):
    for bound in bounds:
        if keyword.endswith("Length"):
            schema, text = {**STR, keyword: bound}, lambda n: '"' + "a" * n + '"'
        else:
            schema, text = {"type": "array", "items": {"const": 1}, keyword: bound}, lambda n: json.dumps([1] * n)
        constraint = OutputConstraint.json_schema(schema)
        beyond = bound + 1 if keyword.startswith("max") else bound - 1
        assert constraint.accepts(text(bound).replace(" ", "")), bound
        assert not constraint.accepts(text(beyond).replace(" ", "")), bound


def test_a_bound_beyond_the_documented_limit_says_so():
    with pytest.raises(ConstraintLimit) as caught:
        OutputConstraint.json_schema({"type": "array", "items": {"const": 1}, "maxItems": 1 << 20}).check()
    assert (caught.value.limit, caught.value.pointer) == ("items", "")


def described(draw, schema):
    """The schema with a description, a title or neither in every place that may have one."""
    if not isinstance(schema, dict):
        return schema
    new = {
        key: {name: described(draw, one) for name, one in value.items()}
        if key == "properties"
        else described(draw, value)
        for key, value in schema.items()
    }
    for keyword in ("description", "title", "$comment"):
        if draw(st.booleans()):
            new = (
                {keyword: draw(st.text(max_size=12)), **new}
                if draw(st.booleans())
                else {**new, keyword: draw(st.text())}
            )
    return new


@settings(max_examples=10)
@given(data=st.data())
def test_descriptions_change_neither_the_grammar_nor_a_mask(byte_index, data):
    plain, other = (OutputConstraint.json_schema(s) for s in (PERSON, described(data.draw, PERSON)))
    assert language(other) == language(plain)
    text = b'{"name":"Ada","tags":["a"],"home":{"city":"x"}}'
    assert write(open_matcher(byte_index, other), text) == write(open_matcher(byte_index, plain), text)


def test_behind_a_colon_comes_the_value_and_no_space(small_index):
    """The quote alone, not only longer tokens that begin with it, and no white space: neither demanded nor allowed."""
    matcher = open_matcher(small_index, OutputConstraint.json_schema({**PERSON, "required": ["name", "home"]}))
    for at, mask in enumerate(write(matcher, b'{"name":"a","home":{"city":"b"}}')):
        starts = {small_index.classes.data[token][:1] for token in mask}
        assert not starts & {b"\t", b"\n", b"\r"}
        if at in (8, 27):
            assert ord('"') in mask
        if at not in (9, 10, 28, 29):  # outside of strings that are free
            assert b" " not in starts

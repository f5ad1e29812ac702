"""Random schemas of the supported keywords against the jsonschema package: its values and our generated texts."""

from __future__ import annotations

import itertools
import json
from random import Random

from hypothesis import event, given, settings
from hypothesis import strategies as st
from oracles.json_documents import compact, orders, samples, validator

from ninfer.constraints.output import OutputConstraint, language
from ninfer.constraints.recognise import Machine
from ninfer.errors import ConstraintLimit, InvalidSchema, UnsatisfiableSchema, UnsupportedSchema

SCALARS = [None, True, False, -1, 0, 1, 2, 3, 0.5, 1.5, "", "a", "b", "ab", "ba", "abc", "a1"]
PATTERNS = ["a", "^a", "b$", "^[ab]+$", "^a|b$", "[0-9]", "^(ab)*$"]
NAMES = ["a", "b", "c", "a1"]
VALUES = [
    *SCALARS,
    *([x] for x in SCALARS[:8:2]), [], *([x, y] for x, y in itertools.product([None, 1, 2, "a", "ab"], repeat=2)),
    [1, 2, 3], [1, 1, 2], ["a", 1, None], [[]], [{"a": 1}],
    {}, *({n: v} for n in NAMES for v in (None, 1, 2, "a", "abc")),
    *({"a": x, "b": y} for x, y in itertools.product([1, "a", "b", None], repeat=2)),
    {"a": 1, "c": 1}, {"b": "a", "c": True}, {"a": 1, "b": 2, "c": 3}, {"a": {"a": 1}}, {"a": [1], "a1": 2},
]  # fmt: skip

some = st.integers(0, 3)
bound = st.sampled_from([-1, 0, 0.5, 1, 2, 3])
values = st.sampled_from([*SCALARS, [], [1], {}, {"a": 1}])


def optional_keywords(draw, **strategies):
    return {name: draw(strategy) for name, strategy in strategies.items() if draw(some) == 0}


@st.composite
def schemas(draw, depth=2, refs=(), kinds=("number", "string", "array", "object", "finite", "composed", "any")):
    if draw(st.integers(0, 9)) == 0:
        return draw(st.booleans())
    inner = schemas(depth=depth - 1, refs=refs) if depth else st.one_of(st.booleans(), st.just({"type": "integer"}))
    several = st.lists(inner, min_size=1, max_size=3)
    kind = draw(st.sampled_from(kinds))
    schema = {}
    if kind == "number":
        schema = optional_keywords(
            draw, minimum=bound, maximum=bound, exclusiveMinimum=bound, exclusiveMaximum=bound,
            multipleOf=st.sampled_from([1, 2, 3]),
        )  # fmt: skip
        types = st.sampled_from(["integer", "number", ["integer", "null"]])
    elif kind == "string":
        schema = optional_keywords(draw, minLength=some, maxLength=some, pattern=st.sampled_from(PATTERNS))
        types = st.sampled_from(["string", ["string", "boolean"]])
    elif kind == "array":
        schema = optional_keywords(
            draw, items=inner, prefixItems=several, minItems=some, maxItems=some, uniqueItems=st.booleans()
        )
        types = st.just("array")
    elif kind == "object":
        names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
        schema = {"properties": {name: draw(inner) for name in names}}
        schema |= optional_keywords(
            draw, additionalProperties=st.one_of(st.booleans(), inner), minProperties=some, maxProperties=some,
            patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        )  # fmt: skip
        if names:
            schema |= optional_keywords(
                draw, required=st.lists(st.sampled_from(names), unique=True, max_size=2),
                dependentRequired=st.dictionaries(
                    st.sampled_from(names), st.lists(st.sampled_from(names), unique=True, max_size=2), max_size=2
                ),
            )  # fmt: skip
        types = st.just("object")
    elif kind == "finite":
        schema = {"enum": draw(st.lists(values, min_size=1, max_size=4))} if draw(some) else {"const": draw(values)}
        types = st.sampled_from(["integer", "string", "object"])
    else:
        types = st.sampled_from(["integer", "string", "object", ["array", "string"]])
    if draw(some) if kind in ("number", "string", "array", "object") else draw(some) == 0:
        schema["type"] = draw(types)
    if depth and (kind == "composed" or draw(some) == 0):
        chosen = draw(st.sampled_from(["allOf", "anyOf", "oneOf", "not", "if", "$ref"]))
        if chosen == "$ref" and refs:
            schema["$ref"] = f"#/$defs/{draw(st.sampled_from(refs))}"
        elif chosen in ("allOf", "anyOf", "oneOf"):
            schema[chosen] = draw(several)
        elif chosen == "not":
            schema["not"] = draw(inner)
        else:
            schema |= {"if": draw(inner)} | optional_keywords(draw, then=inner) | {"else": draw(inner)}
    return schema


@st.composite
def documents(draw):
    root = draw(schemas(refs=("n",)))
    if isinstance(root, dict):
        root = {**root, "$defs": {"n": draw(schemas(depth=1, refs=("n",)))}}
    return root


def compiled(schema):
    """The schema's grammar, None when no value satisfies it; raises what is refused."""
    try:
        return language(OutputConstraint.json_schema(schema))
    except UnsatisfiableSchema:
        return None


def agree(schema, seed):
    """Compare with jsonschema: which values are accepted, and whether drawn texts are valid."""
    valid = validator(schema)
    try:
        grammar = compiled(schema)
    except (UnsupportedSchema, ConstraintLimit, InvalidSchema) as error:
        event(f"refused: {getattr(error, 'keyword', '') or type(error).__name__}")
        return
    event("unsatisfiable" if grammar is None else "compiled")
    machine = Machine(grammar) if grammar else None
    for value in VALUES:
        accepted = machine is not None and any(machine.accepts(compact(v)) for v in orders(value))
        assert accepted == valid.is_valid(value), (schema, value)
    for text in itertools.islice(samples(grammar, Random(seed)), 5) if grammar and machine else ():
        assert machine.accepts(text), (schema, text)
        assert valid.is_valid(json.loads(text)), (schema, text)


seeds = st.integers(0, 1 << 30)
more = settings(max_examples=6 * settings.default.max_examples)


@more
@given(schema=documents(), seed=seeds)
def test_documents(schema, seed):
    agree(schema, seed)


@more
@given(schema=schemas(depth=0), types=st.sampled_from(["number", "string", "array", "object", "integer"]), seed=seeds)
def test_denials(schema, types, seed):
    agree({"type": types, "not": schema}, seed)


@more
@given(data=st.data(), seed=seeds)
def test_intersections(data, seed):
    kind = data.draw(st.sampled_from(["number", "string", "array", "object"]))
    agree({"type": kind, "allOf": [data.draw(schemas(depth=0, kinds=(kind,))) for _ in range(2)]}, seed)


@more
@given(schema=documents())
def test_candidates_are_filtered_and_never_refused(schema):
    filtered = {"enum": VALUES, "allOf": [schema], "$defs": schema.get("$defs", {}) if isinstance(schema, dict) else {}}
    valid = validator(filtered)
    try:
        grammar = compiled(filtered)
    except InvalidSchema:  # a loop of references
        return
    machine = Machine(grammar) if grammar else None
    for value in VALUES:
        assert (machine is not None and machine.accepts(compact(value))) == valid.is_valid(value), (schema, value)

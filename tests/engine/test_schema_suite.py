"""What the small model finishes under a schema satisfies the schema: those of the public test suite, and drawn ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from oracles.schemas import schema

import ninfer

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "tiny.ninfer"
WHOLE, SHARE = 500, 25


def candidates() -> Iterator[Any]:
    """Schemas of the public suite, where it is at hand, then drawn ones without end."""
    folder = Path(os.environ.get("NINFER_TEST_DATA", "/nowhere"))
    for path in sorted(folder.glob("json-schema-test-suite/**/draft2020-12/*.json")):
        for group in json.loads(path.read_text()):
            yield group["schema"]
    random = Random(4)
    while True:
        yield schema(random)


def enforced() -> Iterator[tuple[ninfer.OutputConstraint, Any]]:
    """Those that can be enforced, each once."""
    seen = set()
    for found in candidates():
        constraint = ninfer.OutputConstraint.json_schema(json.dumps(found, ensure_ascii=False))
        if constraint.source not in seen:
            seen.add(constraint.source)
            try:
                constraint.check()
            except ninfer.ConstraintError:
                continue
            yield constraint, found


@pytest.mark.parametrize("count", [SHARE, pytest.param(WHOLE, marks=pytest.mark.full)])
def test_finished_answers_satisfy_their_schema(count):
    """Greedy and at temperature 1. The share takes every twentieth of the whole."""
    source = enforced()
    chosen = [next(source) for _ in range(WHOLE)][:: WHOLE // count]
    assert len(chosen) == count
    prompt = ninfer.Chat([{"role": "user", "content": "Write a record as JSON."}], thinking=False)
    finished = 0
    with ninfer.Engine(TINY, max_context=256, max_concurrency=4, progress=False) as engine:
        for constraint, found in chosen:
            handles = [
                engine.submit(
                    prompt, constraint=constraint, max_tokens=160,
                    sampling=ninfer.SamplingParams(temperature=temperature, seed=1, top_k=0),
                )
                for temperature in (0.0, 1.0)
            ]  # fmt: skip
            for handle in handles:
                result = handle.result()
                if result.finish_reason == "stop":
                    finished += 1
                    assert result.constraint.terminated
                    assert constraint.accepts(result.text)
                    assert result.parsed == json.loads(result.text)
                    jsonschema.Draft202012Validator(
                        found, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
                    ).validate(result.parsed)
                else:
                    assert result.finish_reason == "length"
                    assert not result.constraint.terminated
    assert finished > count, "of two answers each"

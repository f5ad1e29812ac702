"""Documents a random model writes under the schemas of the public JSON Schema test suite satisfy those schemas."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import ninfer
from ninfer.models.qwen3_5.synthetic import synthetic_source

SHARE = 15
"""Every how many schemas are taken, where not all are."""


def schemas(folder: Path):
    """All schemas of the suite that can be enforced, each once."""
    found = {}
    for path in sorted(folder.glob("json-schema-test-suite/**/draft2020-12/*.json")):
        for group in json.loads(path.read_text()):
            constraint = ninfer.OutputConstraint.json_schema(json.dumps(group["schema"]))
            try:
                constraint.check()
            except ninfer.ConstraintError:
                continue
            found.setdefault(constraint.source, (constraint, group["schema"]))
    return list(found.values())


@pytest.mark.parametrize("share", [SHARE, pytest.param(1, marks=pytest.mark.full)])
def test_finished_documents_satisfy_their_schema(test_data, share):
    chosen = schemas(test_data)[::share]
    assert len(chosen) >= 100 / share
    prompt = ninfer.Chat([{"role": "user", "content": "Write."}], thinking=False)
    finished = 0
    with ninfer.Engine(synthetic_source("tiny", "q8"), max_context=256, max_concurrency=8, progress=False) as engine:
        for constraint, schema in chosen:
            for temperature in (0.0, 1.0, 40.0):
                sampling = ninfer.SamplingParams(temperature=temperature, seed=1, top_k=0)
                result = engine.generate(prompt, constraint=constraint, max_tokens=60, sampling=sampling)
                if result.finish_reason == "stop":
                    finished += 1
                    assert constraint.accepts(result.text)
                    jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))
                else:
                    assert result.finish_reason == "length"
    assert finished > len(chosen) / 2

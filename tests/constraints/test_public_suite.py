"""The public JSON Schema test suite: nothing invalid accepted, and every refusal on a reviewed list."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from oracles.json_documents import compact, orders

from ninfer.constraints.output import OutputConstraint
from ninfer.errors import ConstraintError, UnsatisfiableSchema

DIALECTS = {"draft2020-12": None, "draft7": "http://json-schema.org/draft-07/schema#"}
REVIEWED = json.loads((Path(__file__).parent / "public_suite.json").read_text())
"""``refused`` holds, by error and keyword, why such schemas are refused and which; ``narrower`` the valid instances
that are not generated, by reason."""


def groups(test_data, dialect):
    folder = test_data / "json-schema-test-suite" / "tests"
    for path in sorted((folder / dialect).rglob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if DIALECTS[dialect] and isinstance(schema, dict):
                schema = {"$schema": DIALECTS[dialect], **schema}
            yield str(path.relative_to(folder)), group["description"], schema, group["tests"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_public_suite(test_data, dialect):
    refused = defaultdict(lambda: defaultdict(list))
    narrower = defaultdict(list)
    invalid_accepted, count = [], Counter()
    for file, description, schema, tests in groups(test_data, dialect):
        constraint = OutputConstraint.json_schema(schema)
        try:
            constraint.check()
        except UnsatisfiableSchema:
            assert not any(t["valid"] for t in tests), (file, description)
            count.update({"empty": 1, "invalid rejected": len(tests)})
            continue
        except ConstraintError as error:
            keyword = getattr(error, "keyword", "")
            refused[f"{type(error).__name__} {keyword}".strip()][file].append(description)
            count["refused"] += 1
            continue
        count["enforced"] += 1
        for test in tests:
            accepted = any(constraint.accepts(compact(v)) for v in orders(test["data"]))
            if accepted and not test["valid"]:
                invalid_accepted.append((file, description, test["description"]))
            if test["valid"] and not accepted:
                narrower[file].append(f"{description}: {test['description']}")
            count[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'rejected'}"] += 1
    assert invalid_accepted == []
    assert count["enforced"] >= 180
    schemas = count["enforced"], count["empty"], count["refused"]
    instances = [f"{kind} {what}" for kind in ("valid", "invalid") for what in ("accepted", "rejected")]
    valid, lacking, wrong, invalid = (count[name] for name in instances)
    row = " | ".join(map(str, (sum(schemas), *schemas, valid, lacking, invalid, wrong)))
    assert f"| {row} |" in (Path(__file__).parents[2] / "docs" / "constraints.md").read_text()
    reviewed = {
        reason: {f: g for f, g in entry["groups"].items() if f.startswith(dialect)}
        for reason, entry in REVIEWED["refused"].items()
    }
    assert {r: dict(g) for r, g in refused.items()} == {r: g for r, g in reviewed.items() if g}
    assert all(entry["why"] for entry in REVIEWED["refused"].values())
    expected = defaultdict(list)
    for entry in REVIEWED["narrower"].values():
        for file, cases in entry.items():
            if file.startswith(dialect):
                expected[file] += cases
    assert {f: sorted(c) for f, c in narrower.items()} == {f: sorted(c) for f, c in expected.items()}

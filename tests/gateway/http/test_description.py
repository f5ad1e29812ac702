"""The server against its own OpenAPI document, and the documentation against the field tables."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from live.server import TINY, serving
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from ninfer import Engine
from ninfer.gateway.http.openapi import document
from ninfer.gateway.http.reference import tables

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)


@pytest.fixture(scope="module")
def small():
    """A server whose answers are short, whatever is asked."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(TINY, max_context=160, max_tokens=8, progress=False))
        yield stack.enter_context(serving(engine))


API = schemathesis.openapi.from_dict(document("ninfer-tiny"))
OPERATIONS = [found.ok() for found in API.get_all_operations()]


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_answer_is_as_described(small, operation, mode):
    @given(operation.as_strategy(generation_mode=mode))
    @settings(suppress_health_check=list(HealthCheck))
    def answers(case):
        case.call_and_validate(base_url=small.url, checks=CHECKS, timeout=60)
        assert small.engine.available

    if mode.is_positive or operation.method == "post":  # a GET has nothing to get wrong
        answers()


def test_nothing_is_left_behind(small):
    assert small.idle()


def test_the_page_lists_every_field():
    """Write it anew with ``python -m ninfer.gateway.http.reference``."""
    assert tables() in PAGE.read_text("utf-8")

"""Frontends over a small trained vocabulary: with the minimal template, and with the published one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from ninfer.frontend import Frontend, FrontendResources


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tiny_tokenizer."""
    path = Path(__file__).with_name("tiny_tokenizer.py")
    spec = importlib.util.spec_from_file_location("tiny_tokenizer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_resources(tiny: ModuleType) -> FrontendResources:
    return tiny.resources()


@pytest.fixture(scope="session")
def frontend(tiny_resources: FrontendResources) -> Frontend:
    """The minimal template."""
    return Frontend(tiny_resources)


@pytest.fixture(scope="session")
def template_source(test_data: Path) -> str:
    """The chat template published with Qwen3.5-4B."""
    return (test_data / "qwen3.5-4b.chat_template.jinja").read_text()


@pytest.fixture(scope="session")
def qwen(tiny: ModuleType, template_source: str) -> Frontend:
    """The published template over the small vocabulary."""
    return Frontend(tiny.resources(template_source))

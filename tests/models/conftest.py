"""Helper modules of this folder, as fixtures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"models_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"models_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The float64 model."""
    return _load("reference")


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """Random models of the family."""
    return _load("oracle")


@pytest.fixture(scope="session")
def runner() -> ModuleType:
    """Runs a bound model on a device."""
    return _load("runner")

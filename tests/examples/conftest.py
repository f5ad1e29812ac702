"""The modules of examples/tiny, which import each other by plain names."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture
def tiny(monkeypatch):
    """Modules by name: ``tiny("corpus", "words")`` has them as attributes."""
    monkeypatch.syspath_prepend(str(TINY))
    return lambda *names: SimpleNamespace(**{name: importlib.import_module(name) for name in names})

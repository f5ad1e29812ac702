"""Engines over a scripted program: no model, real lanes and pages, every rule of the contract checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.world import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Makes Worlds; at the end each is closed, and none may have broken a rule."""
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(monkeypatch, **options))
        return made[-1]

    yield make
    for world in made:
        world.engine.close()
        assert world.violations() == []
        assert world.program.closed == 1

"""Kernels that start before those before them have ended give what they give one after another."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernels.machine import EmulatedDevice
from kernels.test_model import DENSE, MOE, runner  # noqa: F401

from ninfer.artifact import Artifact
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.synthetic import synthetic_source


@pytest.mark.parametrize(
    ("config", "recipe", "kv_dtype"),
    [
        (DENSE, "q4-mixed", "bf16"),
        pytest.param(DENSE, "fp8", "i8", marks=pytest.mark.full),
        pytest.param(MOE, "q8", "bf16", marks=pytest.mark.full),
    ],
)
def test_a_model(
    device: Any, runner: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], recipe: str, kv_dtype: str
) -> None:  # fmt: skip
    """Chunks, steps of one row and of two, and a verified pass that is folded, on blocks enough to share contexts."""
    if not isinstance(device, EmulatedDevice):
        pytest.skip("a GPU overlaps kernels as it likes")
    monkeypatch.setattr(device, "multiprocessors", 8)
    tokens, results = np.random.default_rng(3).integers(0, 400, 160), []
    source = synthetic_source(config, recipe, seed=5)
    for overlaps in (False, True):
        monkeypatch.setattr(device, "overlaps", overlaps)
        model = runner.Runner(device, bind(Artifact(source), device), lanes=2, kv_dtype=kv_dtype)
        Row = runner.Row
        got = [model.prefill(tokens[:100], 70), model.prefill(tokens[:50], 30, lane=1)]
        got += model.run([Row(tokens[100:101], 100)])
        got += model.run([Row(tokens[101:102], 101), Row(tokens[50:51], 50, 1)])
        rows = [Row(tokens[102:106], 102), Row(tokens[51:55], 51, 1)]
        got += model.run(rows, record=True)
        model.fold(rows, [2, 4])
        got += model.run([Row(tokens[104:105], 104)])
        results.append(got)
    for early, late in zip(results[1], results[0], strict=True):
        assert np.array_equal(early, late)

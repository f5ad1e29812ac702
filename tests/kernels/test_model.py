"""A whole model through the CUDA Ops against the same model on the host."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernels.machine import EmulatedDevice

from ninfer._cpu.device import CpuDevice
from ninfer.artifact import Artifact
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.geometries import text_geometry
from ninfer.models.qwen3_5.synthetic import synthetic_source

COMMON: dict[str, Any] = {
    "heads": (6, 2), "gdn": (2, 6), "tied": False, "vocab": 400, "head_dim": 32, "gdn_dims": (16, 24),
    "rotary": (0.25, (2, 1, 1)), "positions": 4096,
}  # fmt: skip
DENSE, MOE = text_geometry(96, 4, dense=160, **COMMON), text_geometry(96, 4, moe=(6, 2, 80, 112), **COMMON)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    path = Path(__file__).parents[1] / "models" / "runner.py"
    spec = importlib.util.spec_from_file_location("models_runner", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["models_runner"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("config", "recipe", "kv_dtype"), [(DENSE, "q4-mixed", "bf16"), (DENSE, "bf16", "i8"), (MOE, "q4-mixed", "bf16")]
)
def test_logits_equal_the_host(
    device: Any, runner: ModuleType, config: dict[str, Any], recipe: str, kv_dtype: str
) -> None:
    """Prefill in a chunk and steps, a batch of two, and a verified pass that is folded."""
    tokens = np.random.default_rng(3).integers(0, 400, 100)
    host = CpuDevice(threads=1)
    got, want = ([] for _ in range(2))
    for one, results in ((host, want), (device, got)):
        source = synthetic_source(config, recipe, seed=5)
        model = runner.Runner(one, bind(Artifact(source), one), lanes=2, kv_dtype="f32" if one is host else kv_dtype)
        Row = runner.Row
        results.append(model.prefill(tokens[:70], 70))
        results.append(model.prefill(tokens[:50], 30, lane=1))
        results += model.run([Row(tokens[70:71], 70), Row(tokens[50:51], 50, 1)])
        rows = [Row(tokens[71:75], 71), Row(tokens[51:55], 51, 1)]
        results += model.run(rows, record=True)
        model.fold(rows, [2, 4])
        results += model.run([Row(tokens[73:74], 73), Row(tokens[55:56], 55, 1)])
    host.close()
    for ours, exact in zip(got, want):
        assert np.isfinite(ours).all()
        error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert error < (0.05 if config is DENSE else 0.3), f"{error:.3f}"


def test_columns_of_a_round_are_put_in_order_by_who_makes_them(
    device: Any, runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of six columns: only what no product has made, or left, has a launch of its own."""
    monkeypatch.setattr(device, "multiprocessors", 16)
    sizes = {**COMMON, "heads": (8, 2), "gdn": (2, 16), "gdn_dims": (16, 16)}
    source = synthetic_source(text_geometry(256, 5, dense=256, **sizes), "q4-mixed", seed=5)
    tokens = np.random.default_rng(3).integers(0, 400, 18)
    host, results = CpuDevice(threads=1), []
    for one in (host, device):
        model = runner.Runner(one, bind(Artifact(source), one), lanes=3, kv_dtype="f32" if one is host else "bf16")
        rows = [runner.Row(tokens[6 * i : 6 * i + 6], 0, i) for i in range(3)]
        before = Counter(getattr(one, "launches", ()))
        results.append(np.concatenate(model.run(rows, record=True)))
    host.close()
    error = np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0])
    assert error < 0.05, f"{error:.3f}"
    if isinstance(device, EmulatedDevice):
        launches = Counter(device.launches) - before
        assert launches["panels"] == 2, "the columns of the first inputs, and of the head"

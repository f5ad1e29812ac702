"""The multi-token-prediction module against a float64 reference, on random geometries of the family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ninfer._cpu.device import CpuDevice
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.forward import draft, logits, plan_workspace
from ninfer.models.qwen3_5.state import allocate_kv

TOKENS = 90


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1)
    yield device
    device.close()


class Module:
    """The bound MTP module of one random model, and the float64 one."""

    def __init__(self, seed: int, device: CpuDevice, oracle: Any, reference: Any, runner: Any, folder: Path) -> None:
        config = oracle.random_config(seed)
        hf = oracle.hugging_face(config, seed)
        state = {name: value.detach().numpy() for name, value in hf.state_dict().items()}
        state = oracle.with_mtp(config, state, seed + 100)
        artifact = oracle.write(folder / "m.ninfer", config, oracle.artifact_weights(config, state))
        self.reference = reference.Reference(config, state)
        self.runner = runner.Runner(device, bind(artifact, device, ("text", "mtp")), lanes=2)
        r, c = self.runner, self.runner.config
        self.kv = allocate_kv(c, r.scope, 1, 8, 2, 4, "f32")[0]
        r.put(self.kv.blocks, np.array([[5, 2, 0, 1], [4, 7, 3, 6]], np.int32))
        self.ws = plan_workspace(c, r.scope, device, 256, 256, mtp=True)
        self.row, self.vocabulary, self.width = runner.Row, c.vocab_size, c.hidden_size

    def run(self, rows: Any, hidden: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Outputs [B*W, H] for rows that hold the following tokens; hidden [B*W, H]."""
        r, packed = self.runner, self.runner.rows(rows)
        n = packed.B * packed.W
        source = r.put(r.scope.buffer("in", (n, self.width), "f32"), hidden.astype(np.float32))
        out = r.final.head(n, self.width)
        draft(r.device.ops, r.model, self.ws, packed, self.kv, source, out)
        return r.get(out)

    def scores(self, n: int) -> npt.NDArray[Any]:
        """Logits [n, R] of the last outputs."""
        r, out = self.runner, self.runner.scores.head(n, self.vocabulary)
        logits(r.device.ops, r.model, r.final.head(n, self.width), out)
        return r.get(out)


@pytest.fixture(scope="module", params=range(6))
def module(
    request: pytest.FixtureRequest, device: CpuDevice, oracle: ModuleType, reference: ModuleType, runner: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> Module:  # fmt: skip
    return Module(request.param, device, oracle, reference, runner, tmp_path_factory.mktemp("mtp"))


def test_a_pass_equals_the_reference_in_any_chunks(module: Module) -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, module.vocabulary, TOKENS + 1)
    axes = np.cumsum(rng.integers(0, 3, (3, TOKENS)), axis=1)
    hidden = module.reference.hidden(tokens[:TOKENS], axes)
    exact = module.reference.mtp(hidden, tokens[1:], axes)
    whole = module.run([module.row(tokens[1:], 0, positions=axes)], hidden)
    scale = 3e-5 * max(1.0, float(np.abs(exact).max()))
    np.testing.assert_allclose(whole, exact, atol=scale)
    want = module.reference.head(exact)
    np.testing.assert_allclose(module.scores(TOKENS), want, atol=3e-5 * max(1.0, float(want.std())))
    for begin, end in ((0, 33), (33, 34), (34, 37), (37, TOKENS)):
        part = module.row(tokens[begin + 1 : end + 1], begin, 1, axes[:, begin:end])
        np.testing.assert_array_equal(module.run([part], hidden[begin:end]), whole[begin:end])


def test_columns_behind_the_history_can_be_written_again(module: Module) -> None:
    """Drafted columns fed with the module's own output leave nothing behind once the true ones are written."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, module.vocabulary, 40)
    positions = np.broadcast_to(np.arange(39), (3, 39))
    hidden = module.reference.hidden(tokens[:39], positions)
    whole = module.run([module.row(tokens[1:], 0)], hidden)
    module.run([module.row(tokens[1:21], 0, 1)], hidden[:20])
    step = whole[19:20]
    for at in range(20, 24):
        step = module.run([module.row([7], at, 1)], step)
    np.testing.assert_array_equal(module.run([module.row(tokens[21:], 20, 1)], hidden[20:]), whole[20:])

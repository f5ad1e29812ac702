"""A block-drafting companion through the CUDA Ops against the same one on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.checks import close
from kernels.test_model import DENSE, runner  # noqa: F401

from ninfer._cpu.device import CpuDevice
from ninfer.artifact import Artifact
from ninfer.models.qwen3_5 import dflash
from ninfer.models.qwen3_5.bind import bind
from ninfer.models.qwen3_5.forward import forward
from ninfer.models.qwen3_5.synthetic import synthetic_source


@pytest.mark.parametrize(("component", "recipe"), [("dflash", "bf16"), ("dflash", "q4-mixed"), ("dflash2", "bf16")])
def test_blocks_equal_the_host(device: Any, runner: Any, component: str, recipe: str) -> None:  # noqa: F811
    tokens = np.random.default_rng(3).integers(0, 400, 130)
    host, results = CpuDevice(threads=1), []
    for one in (host, device):
        source = synthetic_source(DENSE, recipe, seed=5, components=("text", component))
        model = bind(Artifact(source), one, ("text", component))
        r = runner.Runner(one, model, lanes=2, kv_dtype="f32" if one is host else "bf16")
        config = model.dflash.config
        kv = dflash.allocate_context(config, r.scope, one, 8, 2, 4, 2, dflash.ring_pages(64, 8, 256))
        for table in {id(planes.blocks): planes.blocks for planes in kv if planes.blocks}.values():
            r.put(table, np.array([[5, 2, 0, 1], [4, 7, 3, 6]], np.int32))
        ws = dflash.plan_workspace(config, 96, r.scope, one, 256, 16, 256)
        for rows in (
            [runner.Row(tokens[:90], 0), runner.Row(tokens[:3], 0, 1)], [runner.Row(tokens[90:120], 90)],
        ):  # fmt: skip
            packed = r.rows(rows)
            forward(one.ops, model, r.ws, packed, r.kv, r.state, None, ws.features, config.taps)
            dflash.append(one.ops, model.dflash, ws, packed, kv)
        block = [config.mask] * 7
        out = r.final.head(16, 96)
        rows = r.rows([runner.Row([tokens[120], *block], 120), runner.Row([tokens[3], *block], 3, 1)])
        dflash.draft(one.ops, model, ws, rows, kv, r.ints("accepted", np.arange(16)), out)
        got = r.get(out)
        results.append(got if got.dtype == np.float32 else (got.astype(np.uint32) << 16).view(np.float32))
    host.close()
    close(results[1], results[0], 6e-2)
